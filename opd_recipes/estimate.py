"""``opd_recipes estimate --config-name vision_opd OVERRIDES``: the memory of each GPU, told before one is touched.

A step has two moments that count, and verl holds different things in each: the rollout (vLLM's share beside what training
leaves resident) and the update (vLLM asleep). Formulas: docs/cluster.md. What concerns activations and the head's chunks is
:func:`data_prep.check_memory.estimate_memory`'s, which ``data check`` reports for the rows it has seen.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_recipes.lora import count_adapter
from opd_recipes.recipe import Recipe
from opd_recipes.registry import RecipeError

#: Bytes of a parameter: fp32, whose sum is data_prep.check_memory.BYTES_PER_PARAMETER.
WEIGHTS, GRADIENTS, ADAM, TEACHER = 4, 4, 8, 4
#: For the allocator, communication buffers and the vision tower: this share of all that is not sharded state.
RESERVE = 0.25

_QWEN35 = {
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "vocab_size": 248320,
}
#: Sizes of the models that the papers train, from the config.json that their publishers' hub pages show.
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3.5-4B": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": _QWEN35 | {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
        "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2560},
    },
    "Qwen/Qwen3.5-9B": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": _QWEN35 | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
        "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096},
    },
}

UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}


@dataclass(frozen=True)
class Estimate:
    """Bytes on each GPU.

    Args:
        parameters: Of the student, an adapter's included.
        trained: Of these, what is trained: all, or an adapter.
        devices: GPUs of the run.
        update: Parts of the update, by name.
        rollout: Parts of the rollout, by name.
        kv_cache: What of vLLM's share its weights leave.
        without_checkpointing: Activations if gradient checkpointing were off.
        gpu_memory: Of one GPU.
        notes: What costs time, not memory.
    """

    parameters: int
    trained: int
    devices: int
    update: dict[str, int]
    rollout: dict[str, int]
    kv_cache: int
    without_checkpointing: int
    gpu_memory: int
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        peak = max(sum(self.update.values()), sum(self.rollout.values()))
        return peak <= self.gpu_memory and self.kv_cache > 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config-name", default="vision_opd", help="the recipe (default: vision_opd)")
    parser.add_argument("--gpu-memory", default="80GiB", help="of one GPU, e.g. 80GiB or 141GB (default: 80GiB)")
    parser.add_argument(
        "--model-config",
        type=Path,
        help=f"config.json of the model, or its folder; not needed for a local model nor for {', '.join(KNOWN)}",
    )
    parser.add_argument("overrides", nargs="*", help="as for training, e.g. trainer.nnodes=4")


def run(args: argparse.Namespace) -> int:
    """Print the estimate; 0 where it fits, 1 where not, 2 where there is none."""
    from data_prep.configuration import compose_config
    from data_prep.rows import DataError

    try:
        config = compose_config(args.config_name, None, args.overrides)
        found = estimate(config, model_config(config, args.model_config), parse_memory(args.gpu_memory))
    except (DataError, RecipeError, OSError) as error:
        print(f"opd_recipes: {error}", file=sys.stderr)
        return 2
    print(text(found))
    return 0 if found.fits else 1


def parse_memory(written: str) -> int:
    """Bytes of ``80GiB``, ``141GB`` and the like.

    Raises:
        RecipeError: It is not a number with a unit.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GiB|MiB|GB|MB)\s*", written)
    if match is None:
        raise RecipeError(f"--gpu-memory {written}: write a number with one of {', '.join(UNITS)}, e.g. 80GiB")
    return int(float(match[1]) * UNITS[match[2]])


def model_config(config: Any, file: Path | None = None, setting: str = "actor_rollout_ref.model.path") -> Any:
    """The model's Hugging Face configuration.

    Args:
        file: Its ``config.json`` or the folder with it; None: found by the model's path.
        setting: Names the model.

    Raises:
        RecipeError: There is none on this machine, and the model is not one of :data:`KNOWN`.
    """
    from omegaconf import OmegaConf
    from transformers import AutoConfig

    path = str(OmegaConf.select(config, setting))
    folder = file if file is not None else Path(path).expanduser()
    source = folder / "config.json" if folder.is_dir() else folder
    if source.is_file():
        described = json.loads(source.read_text())
    elif file is not None:
        raise RecipeError(f"--model-config {file}: no such file")
    elif path in KNOWN:
        described = json.loads(json.dumps(KNOWN[path]))  # a copy all through: transformers fills it in
    else:
        raise RecipeError(
            f"{setting}={path}: not on this machine, and its sizes are not known here; name a folder with its config.json"
            f"{' or give that with --model-config' if 'actor' in setting else ''} (known: {', '.join(KNOWN)})"
        )
    return AutoConfig.for_model(described.pop("model_type"), **described)


def check_resources(config: Any) -> tuple[str, ...]:
    """Whether nodes, GPUs and batch go together; returns notes on what is merely wasteful.

    Raises:
        RecipeError: A number of GPUs that cannot be divided as the configuration asks.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    where = f"trainer.nnodes={config.trainer.nnodes}, n_gpus_per_node={config.trainer.n_gpus_per_node}"
    for key, size in (
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", rollout.tensor_model_parallel_size),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", _shards(config)),
    ):
        if size < 1 or devices % size:
            raise RecipeError(f"{key}={size} with {where}: must divide the {devices} GPUs")
    rows = actor.ppo_mini_batch_size * rollout.n
    if config.data.train_batch_size % actor.ppo_mini_batch_size:
        raise RecipeError(
            f"data.train_batch_size={config.data.train_batch_size} with actor_rollout_ref.actor.ppo_mini_batch_size="
            f"{actor.ppo_mini_batch_size}: must be a multiple of it"
        )
    if rows % devices:
        return (f"an update of {rows} rollouts on {devices} GPUs is filled up with {-rows % devices} empty ones",)
    return ()


def _shards(config: Any) -> int:
    size = config.actor_rollout_ref.actor.fsdp_config.fsdp_size
    return size if size > 0 else config.trainer.nnodes * config.trainer.n_gpus_per_node


def estimate(config: Any, sizes: Any, gpu_memory: int) -> Estimate:
    """The parts of both moments, for prompts as long as ``data.max_prompt_length`` allows.

    Args:
        config: The composed configuration.
        sizes: The model's Hugging Face configuration.
        gpu_memory: Bytes of one GPU.

    Raises:
        RecipeError: The configuration cannot be run, or its model not be built.
    """
    from data_prep.check_memory import count_parameters, estimate_memory
    from opd_recipes.check import check_run

    recipe = check_run(config, files=False)
    notes = check_resources(config)
    known = estimate_memory(config, sizes, config.data.max_prompt_length)
    if known["parameters"] is None:
        raise RecipeError("the model cannot be built from its configuration, so there is nothing to estimate from")
    model = config.actor_rollout_ref.model
    adapter = count_adapter(sizes, model) if model.lora_rank else None
    student = known["parameters"] + (adapter or 0)
    trained = adapter or student
    teacher, teacher_sizes = trained, sizes  # with an adapter the teacher has nothing else of its own
    if recipe.teacher.path is not None:
        teacher_sizes = model_config(config, setting="opd.teacher.path")
        teacher = count_parameters(teacher_sizes) or teacher
    rollout, fsdp = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.fsdp_config
    state = _state(fsdp, student, trained, teacher, _shards(config))
    working = {
        "activations": known["activation_bytes"],
        "head: chunks": known["head_bytes"],
        **_gathered(config, sizes, teacher_sizes, known["parameters"], adapter),
        "teacher's hidden states": _hidden_states(config, teacher_sizes, recipe),
    }
    share = int(rollout.gpu_memory_utilization * gpu_memory)
    asleep = {} if rollout.free_cache_engine else {"vLLM": share}
    resident = {name: 0 if _offloaded(fsdp, name) else size for name, size in state.items() if name != "gradients"}
    if fsdp.param_offload:  # then only one of the two models is on the GPU, and the student's pass is the larger one
        state["teacher"] = 0
    vllm_weights = 2 * known["parameters"] // rollout.tensor_model_parallel_size
    return Estimate(
        parameters=student,
        trained=trained,
        devices=known["devices"],
        update={**state, **working, "reserve": int(RESERVE * sum(working.values())), **asleep},
        rollout={**resident, "vLLM": share},
        kv_cache=share - vllm_weights,
        without_checkpointing=_without_checkpointing(config, sizes),
        gpu_memory=gpu_memory,
        notes=notes,
    )


def _state(fsdp: Any, student: int, trained: int, teacher: int, shards: int) -> dict[str, int]:
    if fsdp.offload_policy:  # FSDP2's own: everything sharded stays in the host's memory
        return dict.fromkeys(("weights", "gradients", "Adam", "teacher"), 0)
    sizes = {"weights": WEIGHTS * student, "gradients": GRADIENTS * trained, "Adam": ADAM * trained}
    return {name: math.ceil(size / shards) for name, size in (sizes | {"teacher": TEACHER * teacher}).items()}


def _offloaded(fsdp: Any, name: str) -> bool:
    return bool(fsdp.optimizer_offload if name == "Adam" else fsdp.param_offload)


def _width(config: Any) -> int:
    precision = (config.actor_rollout_ref.actor.fsdp_config.get("mixed_precision") or {}).get("param_dtype", "bf16")
    return 4 if precision in ("fp32", "float32") else 2


def _head(sizes: Any) -> int:
    text = sizes.get_text_config()
    return text.vocab_size * text.hidden_size


def _gathered(config: Any, sizes: Any, teacher: Any, parameters: int, adapter: int | None) -> dict[str, int]:
    """What is whole on each GPU while it is used: the head of both models, two layers, and the student's gradients.

    With an adapter the head and the layers have no gradient, but the adapter's own parts of the layers have.
    """
    text, width, head = sizes.get_text_config(), _width(config), _head(sizes)
    layer = (parameters - head * (1 if sizes.tie_word_embeddings else 2)) // text.num_hidden_layers
    if adapter is not None:
        whole = (head + _head(teacher)) * width
        return {
            "head: whole weights": whole,
            "layers: whole weights": 2 * (layer + 2 * adapter // text.num_hidden_layers) * width,
        }
    summed = 4 * head if width == 2 else 0  # topk_head adds chunks' gradients in fp32
    whole = (2 * head + _head(teacher)) * width + summed
    return {"head: whole weights": whole, "layers: whole weights": 2 * 2 * layer * width}


def _hidden_states(config: Any, sizes: Any, recipe: Recipe) -> int:
    """The teacher's final states of all response tokens of a mini-batch, for each of its views."""
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    rows = math.ceil(config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n / devices)
    views = 1 + (recipe.negative_view is not None) + (recipe.teacher.live_share > 0)
    return rows * config.data.max_response_length * sizes.get_text_config().hidden_size * _width(config) * views


def _without_checkpointing(config: Any, sizes: Any) -> int:
    from omegaconf import OmegaConf

    from data_prep.check_memory import estimate_memory

    other = OmegaConf.merge(config, {"actor_rollout_ref": {"model": {"enable_gradient_checkpointing": False}}})
    return estimate_memory(other, sizes, config.data.max_prompt_length)["activation_bytes"]


def text(found: Estimate) -> str:
    """The estimate as a table, in GiB."""

    def gib(size: int) -> str:
        return f"{size / 2**30:7.2f}"

    def rows(title: str, parts: dict[str, int]) -> list[str]:
        lines = [f"  {gib(size)}  {name}" for name, size in parts.items()]
        return [title, *lines, f"  {gib(sum(parts.values()))}  together"]

    trained = "" if found.trained == found.parameters else f", {found.trained / 1e6:.1f} million of them trained,"
    verdict = "fits" if found.fits else "DOES NOT FIT"
    return "\n".join(
        [
            f"{found.parameters / 1e9:.2f} billion parameters{trained} on {found.devices} GPUs; GiB of each (estimate):",
            *rows("update", found.update),
            f"  (activations without gradient checkpointing: {gib(found.without_checkpointing).strip()})",
            *rows("rollout", found.rollout),
            f"  (of vLLM's share {gib(found.kv_cache).strip()} are left for its KV cache and activations)",
            *(f"note: {note}" for note in found.notes),
            f"{verdict} in {gib(found.gpu_memory).strip()} GiB" + ("" if found.fits else f": {_remedy(found)}"),
        ]
    )


def _remedy(found: Estimate) -> str:
    causes = (
        (
            found.kv_cache <= 0,
            "vLLM's weights exceed its share: raise rollout.gpu_memory_utilization or tensor_model_parallel_size",
        ),
        (
            sum(found.rollout.values()) > found.gpu_memory,
            "lower rollout.gpu_memory_utilization, or offload: actor.fsdp_config.param_offload and optimizer_offload",
        ),
        (
            sum(found.update.values()) > found.gpu_memory,
            "lower actor.ppo_max_token_len_per_gpu (not below a prompt with its response) or opd.head_chunk, or take more GPUs",
        ),
    )
    return "; ".join(remedy for present, remedy in causes if present)
