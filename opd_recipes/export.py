"""``opd_recipes export CHECKPOINT --to FOLDER``: the student or the teacher of a checkpoint as a Hugging Face folder.

verl's merger picks the model class; what is different here: shards are loaded as
tensors only (``weights_only``), a checkpoint that lacks a part is refused by name, weights may stay in fp32, and the folder is
there with everything or not at all.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from opd_recipes.checkpoints import SHARDS, TEACHER_FOLDER, WORLD_FILE, check_contents, saved_world
from opd_recipes.lora import DOWN, META_FILE, Scale, is_adapter, merged, plain_name
from opd_recipes.registry import RecipeError
from opd_recipes.resharding import whole

#: The models of a checkpoint; the teacher's folder lies in the student's.
STUDENT, TEACHER = "student", TEACHER_FOLDER
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: What verl writes beside the shards: the model's configuration, tokenizer, processor and chat template.
MODEL_FOLDER = "huggingface"
#: Written anew with the weights; every other file of :data:`MODEL_FOLDER` is copied as it is.
WRITTEN = {"config.json", "model.safetensors.index.json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="a global_step_N folder of a run, or its actor folder")
    parser.add_argument("--to", type=Path, required=True, help="the folder to write; must not exist, or be empty")
    parser.add_argument("--which", choices=[STUDENT, TEACHER], default=STUDENT, help="which model (default: student)")
    parser.add_argument(
        "--adapter", action="store_true", help="of a LoRA run: the adapter alone, for peft; not merged into the weights"
    )
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="of the weights (default: bfloat16, as vLLM ran them; of an adapter: float32)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        export(args.checkpoint, args.to, which=args.which, dtype=args.dtype, adapter=args.adapter)
    except (RecipeError, OSError) as error:
        print(f"opd_recipes: {error}", file=sys.stderr)
        return 1
    what = "adapter of the " if args.adapter else ""
    print(f"opd_recipes: the {what}{args.which} of {args.checkpoint} is in {args.to}")
    return 0


def export(
    checkpoint: Path, target: Path, *, which: str = STUDENT, dtype: str | None = None, adapter: bool = False
) -> None:
    """Write a model of an FSDP2 checkpoint as a folder that transformers and vLLM load; of a LoRA run, the merged model.

    Args:
        checkpoint: ``global_step_N`` as the trainer writes it, or the folder in it that has the shards.
        target: The folder to write; it appears when it is complete.
        which: ``student``, or ``teacher``: the moving average beside it.
        dtype: ``bfloat16`` or ``float32``, in which the shards are; by default the former, and of an adapter the latter.
        adapter: Write the adapter alone, as a folder that peft loads.

    Raises:
        RecipeError: The target is not empty; or the checkpoint lacks a shard, the teacher or an adapter, or has what is
            not a model's.
    """
    target = target.resolve()
    _check_target(target)
    source = find_model(checkpoint, which)
    paths = find_shards(source)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        merger = _merger(source, partial)
        weights = Weights(paths)
        if adapter:
            save_adapter(source, weights, DTYPES[dtype or "float32"], partial)
        else:
            state = plain_weights(source, weights, DTYPES[dtype or "bfloat16"])
            _save(merger, source / MODEL_FOLDER, state, partial)
        os.replace(partial, target)  # an empty target is replaced as well
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RecipeError(f"--to {target}: exists and is not empty; name another folder, or remove it")


def find_model(checkpoint: Path, which: str) -> Path:
    """The folder with the shards of ``which`` model.

    Raises:
        RecipeError: There is none.
    """
    student = checkpoint / "actor" if (checkpoint / "actor").is_dir() else checkpoint
    source = student if which == STUDENT else student / TEACHER
    if (source / WORLD_FILE).is_file():
        return source
    if (student / WORLD_FILE).is_file():
        raise RecipeError(f"{student} has no {TEACHER} folder: the run had no teacher; use --which student")
    raise RecipeError(f"{checkpoint} is no checkpoint of FSDP: neither it nor its actor folder has a {WORLD_FILE}")


def find_shards(source: Path) -> list[Path]:
    """The shard of each rank, in their order.

    Raises:
        RecipeError: Some are missing, named.
    """
    world = saved_world(source)
    shards = [source / SHARDS["model"].format(world=world, rank=rank) for rank in range(world)]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise RecipeError(
            f"{source} lacks {len(missing)} of {world} shards: {shown}. Where nodes saved to disks of their own, "
            "bring all ranks' files into this folder; else the checkpoint is incomplete: take an earlier one"
        )
    if not (source / MODEL_FOLDER / "config.json").is_file():
        raise RecipeError(
            f"{source / MODEL_FOLDER} has no config.json: the checkpoint is incomplete; take an earlier one"
        )
    return shards


def load_shard(path: Path) -> dict[str, torch.Tensor]:
    """One rank's tensors, mapped from disk. Nothing but tensors is unpickled.

    Raises:
        RecipeError: The file is damaged, or has other objects in it.
    """
    check_contents([path])
    import torch.distributed.tensor  # what a shard may have beside plain tensors is declared safe there

    # It warns of a mesh without processes, which is all that a mesh is here.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise RecipeError(f"{path}: cannot be read as a file of tensors: {str(error).splitlines()[0]}") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise RecipeError(f"{path}: is not a model's shard, a mapping of names to tensors")
    return dict(state)


def _merger(source: Path, folder: Path) -> Any:
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    model = str(source / MODEL_FOLDER)
    return FSDPModelMerger(
        ModelMergerConfig(
            operation="merge", backend="fsdp", local_dir=str(source), hf_model_config_path=model, target_dir=str(folder)
        )
    )


class Weights:
    """The whole tensors of a checkpoint, put together from its shards when they are asked for.

    Args:
        paths: The shard of each rank, in their order.

    Raises:
        RecipeError: The shards do not fit one another.
    """

    def __init__(self, paths: list[Path]):
        self._shards = [load_shard(path) for path in paths]
        self.names = list(self._shards[0])
        for path, shard in zip(paths, self._shards, strict=True):
            if odd := sorted(shard.keys() ^ self._shards[0].keys()):
                raise RecipeError(f"{path}: differs from {paths[0].name} in {len(odd)} names, e.g. {odd[0]}")

    def whole(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return whole(name, [shard[name] for shard in self._shards]).to(dtype)

    @property
    def adapter(self) -> list[str]:
        return [name for name in self.names if is_adapter(name)]

    def scale(self, source: Path) -> Scale:
        """How the adapter is scaled.

        Raises:
            RecipeError: What is written beside the shards is missing, or is of another adapter.
        """
        scale = Scale.read(source)
        for name in self.adapter:
            rank = self._shards[0][name].shape[0 if name.endswith(DOWN) else 1]
            if rank != scale.rank:
                raise RecipeError(f"{source}: {name} has rank {rank}, {META_FILE} says {scale.rank}")
        return scale


def plain_weights(source: Path, weights: Weights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The model's weights by their names without peft; an adapter is merged in fp32.

    A teacher with an adapter has nothing else in its folder: the frozen weights are the student's.

    Raises:
        RecipeError: The checkpoint has an adapter alone.
    """
    if not weights.adapter:
        return {name: weights.whole(name, dtype) for name in weights.names}
    scale, frozen = weights.scale(source), weights
    if len(weights.adapter) == len(weights.names) and source.name == TEACHER:
        frozen = Weights(find_shards(source.parent))
    names = [*(name for name in frozen.names if not is_adapter(name)), *weights.adapter]
    if len(names) == len(weights.adapter):
        raise RecipeError(
            f"{source}: has the adapter alone (save_lora_only), so there is nothing to merge it with; use --adapter, and "
            "peft's merge_and_unload on the model that the run started from"
        )

    def whole(name: str) -> torch.Tensor:
        return (weights if is_adapter(name) else frozen).whole(name, torch.float32)

    return {name: weight.to(dtype) for name, weight in merged(names, whole, scale.factor)}


def save_adapter(source: Path, weights: Weights, dtype: torch.dtype, folder: Path) -> None:
    """An adapter as peft writes it.

    Raises:
        RecipeError: There is none.
    """
    if not weights.adapter:
        raise RecipeError(f"{source}: the run trained all weights and has no adapter; leave out --adapter")
    from peft import LoraConfig
    from safetensors.torch import save_file

    scale = weights.scale(source)
    state = {name.replace(".default.", "."): weights.whole(name, dtype) for name in weights.adapter}
    layers = sorted(plain_name(name).removesuffix(DOWN) for name in weights.adapter if name.endswith(DOWN))
    settings = LoraConfig(
        r=scale.rank,
        lora_alpha=scale.alpha,
        target_modules=layers,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    settings.save_pretrained(str(folder))
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "adapter_config.json", folder / "adapter_model.safetensors")


def _save(merger: Any, described: Path, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Weights and configuration by transformers; the other files are copied from where the model is ``described``."""
    from accelerate import init_empty_weights
    from verl.model_merger.output_validation import validate_hf_model_output
    from verl.utils.transformers_compat import drop_tied_target_keys

    dtype = next(iter(state.values())).dtype
    with init_empty_weights():
        model: Any = merger.get_transformers_auto_model_class().from_config(merger.model_config, dtype=dtype)
    _check_names(described, model, state)
    model = merger.patch_model_generation_config(model)
    drop_tied_target_keys(state, model, merger.model_config)
    model.save_pretrained(folder, state_dict=state)
    for file in described.iterdir():
        if file.is_file() and file.name not in WRITTEN and file.suffix != ".safetensors":
            shutil.copy2(file, folder / file.name)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors gives the weights to their owner alone
    validate_hf_model_output(folder)


def _check_names(described: Path, model: Any, state: Mapping[str, torch.Tensor]) -> None:
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    odd = sorted(name for name in expected.keys() | state.keys() if name not in expected or name not in state)
    if not odd:
        odd = sorted(name for name, shape in expected.items() if state[name].shape != shape)
    if odd:
        raise RecipeError(
            f"{described.parent}: its weights are not those of the {type(model).__name__} that {described.name}/config.json "
            f"describes; {len(odd)} differ, e.g. {odd[0]}"
        )
