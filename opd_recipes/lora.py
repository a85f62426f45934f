"""LoRA (arXiv 2106.09685): settings, names and arithmetic that training, export and the memory estimate share.

The model is peft's, built by verl's engine. W is a frozen weight of it and (A, B) the adapter beside it: the layer
computes (W + alpha / rank B A) x. Only that plain form is known here; what departs from it is refused, since weights are
merged here for the rollouts and for exported models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from opd_recipes.registry import RecipeError

#: peft's name for the model inside of its own, and for the frozen layer beside an adapter.
INSIDE, FROZEN = "base_model.model.", ".base_layer"
#: An adapter's weights; ``default`` is the name that verl gives to the only one.
DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"
#: What verl writes into a checkpoint, beside the shards.
META_FILE = "lora_train_meta.json"
#: Settings that decide what the weights of a checkpoint mean; a resumed run must agree in them.
MEANING = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules")

Named = tuple[str, torch.Tensor]

_MODEL = "actor_rollout_ref.model"


def check_lora(config: Any) -> None:
    """Refuse settings of verl that cannot go with LoRA.

    Raises:
        RecipeError: The first one, with the remedy.
    """
    model, backend = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.checkpoint_engine.backend
    rank = model.lora_rank or 0
    if model.lora.get("rank", 0):
        raise RecipeError(
            f"{_MODEL}.lora.rank={model.lora.rank}: is for Megatron; FSDP's own is {_MODEL}.lora_rank (+overlay=lora)"
        )
    if rank == 0:
        if model.lora_adapter_path is not None:
            raise RecipeError(
                f"{_MODEL}.lora_adapter_path={model.lora_adapter_path} with lora_rank=0: it would not be loaded; set "
                "lora_rank to the adapter's rank"
            )
        return
    if rank < 0 or model.lora_alpha <= 0 or int(model.lora_alpha) != model.lora_alpha:
        raise RecipeError(f"{_MODEL}.lora_rank={rank}, lora_alpha={model.lora_alpha}: must be whole numbers above 0")
    if not model.lora.get("merge", False):
        raise RecipeError(
            f"{_MODEL}.lora.merge=false with lora_rank={rank}: vLLM leaves out adapters of the vision tower, and "
            "rollouts would not be the student's; set lora.merge=true (+overlay=lora does)"
        )
    if model.get("target_parameters"):
        raise RecipeError(f"{_MODEL}.target_parameters: must be null, only adapters of linear layers can be merged")
    if _names_head(model.target_modules) and not _names_head(model.exclude_modules):
        raise RecipeError(
            f"{_MODEL}.target_modules={model.target_modules}: has lm_head, whose weight the streamed head needs as it is; "
            "leave it out (all-linear does)"
        )
    if backend == "delta_sharded":
        raise RecipeError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend} with {_MODEL}.lora_rank={rank}: it sends the "
            "frozen weights alone; use naive, or nccl on separate devices"
        )


def _names_head(modules: Any) -> bool:
    """Whether peft would find ``lm_head`` among ``modules``: names or their ends, or one pattern for the whole name."""
    if modules is None or modules == "all-linear":
        return False
    if isinstance(modules, str):
        return re.fullmatch(modules, "lm_head") is not None
    return any(name.rsplit(".", 1)[-1] == "lm_head" for name in modules)


def check_adapter(settings: Any, rank: int) -> None:
    """Refuse an adapter that is not a plain one.

    Args:
        settings: peft's ``LoraConfig``, from ``lora_adapter_path`` or made by verl.
        rank: ``lora_rank``.

    Raises:
        RecipeError: What it has that the plain form has not.
    """
    names = (
        "use_dora",
        "use_rslora",
        "lora_bias",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
        "target_parameters",
    )
    odd = [name for name in names if getattr(settings, name, None)]
    if settings.bias != "none":
        odd.append("bias")
    if odd:
        raise RecipeError(
            f"{_MODEL}.lora_adapter_path: the adapter has {', '.join(odd)}; only plain LoRA can be merged for rollouts"
        )
    if settings.r != rank:
        raise RecipeError(
            f"{_MODEL}.lora_rank={rank}: the adapter of lora_adapter_path has rank {settings.r}; set that"
        )


@dataclass(frozen=True)
class Scale:
    """Rank and alpha of a checkpoint's adapter."""

    rank: int
    alpha: int

    @property
    def factor(self) -> float:
        return self.alpha / self.rank

    @classmethod
    def read(cls, folder: Path) -> Scale:
        """From what verl wrote beside the shards.

        Raises:
            RecipeError: It is missing, or not in the form that verl writes.
        """
        file = folder / META_FILE
        try:
            meta = json.loads(file.read_text())
            scale = cls(int(meta["r"]), int(meta["lora_alpha"]))
        except FileNotFoundError:
            raise RecipeError(f"{folder} has an adapter but no {META_FILE}, which says how it is scaled") from None
        except (ValueError, KeyError, TypeError) as error:
            raise RecipeError(f"{file}: does not say rank and alpha: {error}") from error
        if scale.rank < 1 or scale.alpha <= 0:
            raise RecipeError(f"{file}: r={scale.rank}, lora_alpha={scale.alpha}: must be above 0")
        return scale


def is_adapter(name: str) -> bool:
    """Whether a parameter of peft's model is an adapter's."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """The name in the model without peft."""
    return name.removeprefix(INSIDE).replace(FROZEN, "")


def merged(names: Iterable[str], read: Callable[[str], torch.Tensor], factor: float) -> Iterator[Named]:
    """The weights of the model without peft, W + alpha / rank B A, one at a time and in the order of ``names``.

    Args:
        names: Of all weights of peft's model.
        read: The whole weight of a name.
        factor: alpha / rank.
    """
    names = list(names)
    known = set(names)
    for name in names:
        if is_adapter(name):
            continue
        weight = read(name)
        layer = name.removesuffix(f"{FROZEN}.weight")
        if f"{layer}{DOWN}" in known:
            weight = torch.addmm(weight, read(f"{layer}{UP}"), read(f"{layer}{DOWN}"), alpha=factor)
        yield plain_name(name), weight


def count_adapter(sizes: Any, model: Any) -> int:
    """Parameters that an adapter adds, on a model that is built without memory.

    Args:
        sizes: The model's Hugging Face configuration.
        model: ``actor_rollout_ref.model``, with a ``lora_rank`` above 0.

    Raises:
        RecipeError: peft finds nothing that ``target_modules`` names.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    targets, excluded = (
        value if value is None or isinstance(value, str) else list(value)
        for value in (model.target_modules, model.exclude_modules)
    )
    settings = LoraConfig(r=model.lora_rank, target_modules=targets, exclude_modules=excluded)
    with torch.device("meta"):
        whole: Any = AutoModelForImageTextToText.from_config(sizes)
        try:
            whole = get_peft_model(whole, settings)
        except ValueError as error:
            raise RecipeError(f"{_MODEL}.target_modules={model.target_modules}: {error}") from error
    return sum(parameter.numel() for parameter in whole.parameters() if parameter.requires_grad)
