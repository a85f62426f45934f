"""Which models this package runs, and what is refused before a step is taken (docs/families.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from opd_recipes.registry import RecipeError

#: Root ``model_type`` of the models for which verl 0.9.1 makes prompts, mRoPE positions and forwards that its FSDP2 can shard.
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")

#: Those with linear attention, whose layers carry a state from token to token.
HYBRID = ("qwen3_5", "qwen3_5_moe")


def check_family(model_type: str | None) -> None:
    """Refuse a model of another family; ``model_type`` is its root's, None where verl makes no image processor for it."""
    if model_type not in FAMILIES:
        found = f"is of family {model_type!r}" if model_type else "has no image processor that verl 0.9.1 knows"
        raise RecipeError(
            f"actor_rollout_ref.model.path: the model {found}; this package runs {', '.join(FAMILIES)} (docs/families.md says "
            "what each other one lacks)"
        )


def check_processor(processor: Any) -> None:
    """:func:`check_family` of a processor as verl loads it, with the model's configuration on it."""
    config = getattr(processor, "config", None)
    if processor is None or config is not None:
        check_family(getattr(config, "model_type", None))


def check_pixels(settings: Mapping[str, Any] | None) -> None:
    """Refuse ``data.mm_processor_kwargs`` that transformers 5.9 takes for the pixels and not for the tokens, or the reverse.

    Its image processor ignores ``min_pixels`` without ``max_pixels`` and counts by it; it obeys ``size`` and counts without.
    """
    settings = settings or {}
    given = [key for key in ("min_pixels", "max_pixels", "size", "images_kwargs") if key in settings]
    if given and given != ["min_pixels", "max_pixels"]:
        raise RecipeError(
            f"data.mm_processor_kwargs has {', '.join(given)}: write min_pixels and max_pixels, both and nothing else of an "
            "image's size; otherwise prompts would not have the number of tokens that is counted before training"
        )


def check_packing(model_type: str, packs: bool, kernels: bool) -> None:
    """Refuse packed rows where a linear attention would carry its state from one row into the next.

    Without the kernels of flash-linear-attention, transformers computes these layers in PyTorch, by a function that takes
    the rows' boundaries and ignores them.

    Args:
        packs: ``actor_rollout_ref.model.use_remove_padding``.
        kernels: Whether the kernels are there.
    """
    if model_type in HYBRID and packs and not kernels:
        raise RecipeError(
            f"actor_rollout_ref.model.use_remove_padding=true with a model of family {model_type}, but flash-linear-attention "
            "is not installed (or there is no GPU): its linear attention would carry the state of each row into the next one. "
            "Install it, or set use_remove_padding=false"
        )


def check_model_files(path: str, packs: bool) -> None:
    """The checks on a model folder of this machine, before Ray starts; a hub name or an address is left to the workers."""
    from importlib.util import find_spec

    file = os.path.join(os.path.expanduser(path), "config.json")
    if not os.path.isfile(file):
        return
    with open(file) as opened:
        config = json.load(opened)
    check_family(config.get("model_type"))
    check_packing(config["model_type"], packs, kernels=find_spec("fla") is not None)  # the workers look for a GPU, too
