"""Tiny random models of every family that users train, made in code: real configurations, classes, processors, chat formats.

``python -m tests.families FAMILY`` compares vLLM's log-probabilities of what it samples with the engine's (docs/families.md).
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from data_prep.toy.base_model import initialize
from data_prep.toy.processor import CHAT_TEMPLATE, CONTEXT, PAD, build_tokenizer
from tests import harness

QUESTION = [{"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "What colour?"}]}]

#: Width and height: landscape, portrait, tiny, odd-sided, and 1:8, where a side that is rounded down would be empty.
SIZES = [(160, 96), (96, 160), (12, 9), (101, 67), (24, 190)]

#: Few enough pixels that the tests are fast, enough that sizes above have different numbers of tokens.
PIXELS = {"shortest_edge": 64 * 64, "longest_edge": 192 * 192}
NORMALISED = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "temporal_patch_size": 2, "merge_size": 2}

HIDDEN = 64
TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


@dataclass(frozen=True)
class Family:
    """One family, as transformers names it.

    Args:
        model_type: Root ``model_type``; also the name here.
        prefix: Of the classes ``<prefix>Config``, ``<prefix>Model`` and ``<prefix>ForConditionalGeneration``.
        patch: Pixels along one side of a patch.
        image_token: Stands for one merged patch in the prompt.
        vision_tokens: All that announce or stand for pixels.
        processor: Builds the processor.
        text, vision: What differs from the common tiny sizes.
        extra: Further arguments of the root configuration.
        tied: Whether the head shares the embedding's weight.
        dtype: What vLLM's CPU backend computes this family in.
    """

    model_type: str
    prefix: str
    patch: int
    image_token: str
    vision_tokens: tuple[str, ...]
    processor: Callable[[Family], Any]
    text: dict[str, Any]
    vision: dict[str, Any]
    extra: dict[str, str] = field(default_factory=dict)
    tied: bool = False
    dtype: str = "float32"

    @property
    def modeling(self) -> Any:
        return import_module(f"transformers.models.{self.model_type}.modeling_{self.model_type}")

    def of(self, kind: str) -> Any:
        """The class ``<prefix><kind>``."""
        import transformers

        return getattr(transformers, self.prefix + kind)


def _qwen_processor(family: Family) -> Any:
    import transformers

    pixels = {"size": PIXELS, "patch_size": family.patch, **NORMALISED}
    parts = {
        "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
        "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
        "qwen3_5": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    }
    processor, video = (getattr(transformers, name) for name in parts[family.model_type])
    return processor(
        image_processor=transformers.Qwen2VLImageProcessor(**pixels),
        tokenizer=build_tokenizer(),
        video_processor=video(**pixels),
        chat_template=CHAT_TEMPLATE,
    )


def _rope(sections: list[int], **options: Any) -> dict[str, Any]:
    """Rotary pairs for time, height and width: half of what is rotated of a head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **options}}


QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
QWEN: dict[str, Any] = {"image_token": "<|image_pad|>", "vision_tokens": QWEN_TOKENS, "processor": _qwen_processor}

FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "qwen2_5_vl",
            "Qwen2_5_VL",
            14,
            **QWEN,
            text=_rope([4, 6, 6]),
            vision={"window_size": 56, "fullatt_block_indexes": [1]},
            extra=QWEN_IDS,
        ),
        Family(
            "qwen3_vl",
            "Qwen3VL",
            16,
            **QWEN,
            text={"head_dim": 32, **_rope([6, 5, 5], mrope_interleaved=True)},
            vision={"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
            extra=QWEN_IDS,
            tied=True,
        ),
        Family(
            "qwen3_5",
            "Qwen3_5",
            16,
            **QWEN,
            text={
                "num_hidden_layers": 4,
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                "head_dim": 64,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 32,
                "linear_value_head_dim": 32,
                "mamba_ssm_dtype": "float32",  # as published; vLLM reads it
                **_rope([3, 3, 2], mrope_interleaved=True, partial_rotary_factor=0.25),
            },
            vision={"num_position_embeddings": 64},
            extra=QWEN_IDS,
            dtype="bfloat16",
        ),
    )
}


def build(name: str, folder: Path) -> Path:
    """Write model and processor as a Hugging Face folder; ``config.json`` is what verl and vLLM read."""
    family = FAMILIES[name]
    _own_methods(name)
    processor = family.processor(family)
    token_id = processor.tokenizer.convert_tokens_to_ids
    text = {
        **TEXT,
        **family.text,
        "vocab_size": len(processor.tokenizer),
        "eos_token_id": processor.tokenizer.eos_token_id,
        "pad_token_id": token_id(PAD),
        "tie_word_embeddings": family.tied,
    }
    config = family.of("Config")(
        text_config=text,
        vision_config={**VISION, "patch_size": family.patch, **family.vision},
        tie_word_embeddings=family.tied,
        dtype="float32",
        **{key: token_id(token) for key, token in family.extra.items()},
    )
    torch.manual_seed(0)
    model = family.of("ForConditionalGeneration")._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    initialize(model)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def plain(folder: Path) -> Any:
    """The model as transformers alone loads and runs it."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@contextmanager
def unpatched(name: str) -> Iterator[None]:
    """Transformers' classes with their own methods, of which verl replaces some for its engines; at the end as they were."""
    from transformers.integrations import flash_attention

    before, flash = _methods(name), flash_attention._flash_attention_forward
    _put(_own_methods(name))
    try:
        yield
    finally:
        _put(before)
        flash_attention._flash_attention_forward = flash


@cache
def _own_methods(name: str) -> dict[type, dict[str, Any]]:
    """:func:`_methods` when this is called first: before any engine is built."""
    return _methods(name)


def _methods(name: str) -> dict[type, dict[str, Any]]:
    modeling = FAMILIES[name].modeling
    classes = [v for v in vars(modeling).values() if isinstance(v, type) and v.__module__ == modeling.__name__]
    return {cls: {key: value for key, value in vars(cls).items() if callable(value)} for cls in classes}


def _put(methods: dict[type, dict[str, Any]]) -> None:
    for cls, own in methods.items():
        for key, value in own.items():
            if vars(cls).get(key) is not value:
                setattr(cls, key, value)


def config(folder: Path, *overrides: str) -> Any:
    return harness.config(f"actor_rollout_ref.model.path={folder}", *overrides)


def worker(folder: Path, mm_processor_kwargs: dict[str, Any] | None = None) -> Any:
    """The rollout worker without its Ray and vLLM parts, as its ``__init__`` leaves it for this model."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    from opd_recipes.dataset import TwoViewDataset
    from opd_recipes.recipe import Recipe
    from opd_recipes.rollout import TwoViewAgentLoopWorker

    cfg = config(folder)
    made = object.__new__(TwoViewAgentLoopWorker)
    model = omega_conf_to_dataclass(cfg.actor_rollout_ref.model)
    made.config, made.recipe = cfg, Recipe.load(cfg.opd)
    made.tokenizer, made.processor = model.tokenizer, model.processor
    made.dataset_cls, made.mm_processor_kwargs = TwoViewDataset, mm_processor_kwargs or {}
    made.builder = create_continuous_token_builder(
        model.tokenizer,
        hf_model_type=model.hf_config.model_type,
        processor=model.processor,
        chat_template_kwargs={},
        mm_processor_kwargs=made.mm_processor_kwargs,
    )
    return made


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coarse noise: no two regions alike, so that a shifted or missing patch changes the answer."""
    generator = random.Random(seed)
    coarse = Image.frombytes("RGB", (8, 8), bytes(generator.randrange(256) for _ in range(192)))
    return coarse.resize((width, height), Image.Resampling.NEAREST)


def prompt(worker: Any, image: Image.Image) -> Any:
    from opd_recipes.dataset import with_images

    return worker._prompt(with_images(QUESTION, [image]))


def row(student: Any, teacher: Any, response: list[int]) -> dict[str, Any]:
    """What the rollout worker stores of one response to the :class:`~opd_recipes.rollout.Prompt` ``student``."""
    tail = torch.tensor(response, dtype=torch.long)
    ids = [torch.cat([view.ids, tail]) for view in (student, teacher)]
    positions = teacher.extended(len(ids[1]))
    return {
        "input_ids": ids[0],
        "position_ids": student.extended(len(ids[0])),
        "multi_modal_inputs": student.inputs,
        "responses": tail,
        "loss_mask": torch.ones_like(tail),
        "rollout_log_probs": torch.full((len(tail),), -1.0),
        "teacher_input_ids": ids[1],
        "teacher_positions": positions.transpose(0, 1).contiguous(),
        "teacher_multi_modal_inputs": teacher.inputs,
    }


def model_inputs(ids: torch.Tensor, inputs: dict[str, torch.Tensor], image_token_id: int) -> dict[str, torch.Tensor]:
    """What transformers' processor would hand to the model for one whole sequence; positions are the model's own."""
    return {
        "input_ids": ids[None],
        "attention_mask": torch.ones_like(ids)[None],
        "mm_token_type_ids": (ids == image_token_id).long()[None],
        "pixel_values": inputs["pixel_values"],
        "image_grid_thw": inputs["image_grid_thw"],
    }


def logits(model: Any, ids: torch.Tensor, inputs: dict[str, torch.Tensor], length: int) -> torch.Tensor:
    """(length, V): what transformers' own forward says before each of the last ``length`` tokens of one sequence."""
    whole = model(**model_inputs(ids, inputs, model.config.image_token_id)).logits[0]
    return whole[len(ids) - length - 1 : len(ids) - 1]


def compare(name: str, folder: Path, dtype: str) -> dict[str, Any]:
    """Let vLLM answer pictures of all sizes, and score its answers with the engine.

    Returns:
        How many tokens, Pearson's correlation of the two log-probabilities, and their largest difference.
    """
    harness.start()
    made = worker(build(name, folder))
    views = [prompt(made, picture(*size, seed=i)) for i, size in enumerate(SIZES * 4)]
    with unpatched(name):
        student, _ = harness.engines(config(folder))  # before vLLM, which gives model types configurations of its own
        sampled = _sample(folder, views, made, dtype)
        rows = [row(view, view, tokens) for view, (tokens, _) in zip(views, sampled, strict=True)]
        with student.eval_mode():
            found = student.infer_batch(harness.batch(rows))["model_output"]["log_probs"].unbind()
    ours = torch.cat([each[-len(r["responses"]) - 1 : -1] for each, r in zip(found, rows, strict=True)]).double()
    theirs = torch.tensor([value for _, values in sampled for value in values], dtype=torch.float64)
    pearson = torch.corrcoef(torch.stack([ours, theirs]))[0, 1].item()
    return {"tokens": len(ours), "pearson": pearson, "largest difference": (ours - theirs).abs().max().item()}


def _sample(folder: Path, views: list, made: Any, dtype: str) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of one answer to each prompt, up to the first vision token."""
    import vllm
    from verl.workers.rollout.utils import qwen2_5_vl_dedup_image_tokens

    from opd_recipes.rollout import vision_token_ids

    rollout = config(folder).actor_rollout_ref.rollout
    model = vllm.LLM(
        str(folder),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enable_chunked_prefill=False,
        logprobs_mode="processed_logprobs",
        seed=0,
        **rollout.engine_kwargs.vllm,
    )
    prompts = [
        {
            "prompt_token_ids": qwen2_5_vl_dedup_image_tokens(view.ids.tolist(), made.processor),
            "multi_modal_data": {"image": view.images},
        }
        for view in views
    ]
    settings = vllm.SamplingParams(temperature=1.0, max_tokens=12, logprobs=0, ignore_eos=True)
    banned, out = set(vision_token_ids(made.tokenizer)), []
    for view, answer in zip(views, model.generate(prompts, settings), strict=True):
        if answer.prompt_token_ids != view.ids.tolist():
            raise AssertionError(f"vLLM expands the prompt to {len(answer.prompt_token_ids)}, ours has {len(view.ids)}")
        tokens = answer.outputs[0].token_ids
        kept = next((i for i, token in enumerate(tokens) if token in banned), len(tokens))
        scores = [step[token].logprob for token, step in zip(tokens, answer.outputs[0].logprobs, strict=True)]
        out.append((list(tokens[:kept]), scores[:kept]))
    return out


def main(name: str, dtype: str | None = None) -> None:
    import os
    import tempfile

    import tests.conftest  # noqa: F401  sets verl's platform

    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    with tempfile.TemporaryDirectory() as folder:
        print(name, json.dumps(compare(name, Path(folder), dtype or FAMILIES[name].dtype)))


if __name__ == "__main__":
    main(*sys.argv[1:])
