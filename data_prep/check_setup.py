"""What rows are checked against: the recipe with its whole configuration, and the model's processor.

Prompts are drawn and counted by the data set class that training uses, so the two cannot come to different numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.check_schema import Columns
from data_prep.check_text import SpecialTokens
from data_prep.configuration import compose_config
from data_prep.rows import DataError
from opd_recipes.dataset import TwoViewDataset
from opd_recipes.recipe import Recipe
from opd_recipes.views import View


class Prompts(TwoViewDataset):
    """Training's own data set without rows: it builds the messages and counts the tokens of any row."""

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Nothing to fetch."""

    def _read_files_and_tokenize(self) -> None:
        """Nothing to read."""


@dataclass(frozen=True)
class Limits:
    """Numbers that a row must keep to; None where there is no such limit.

    Args:
        prompt, response: ``data.max_prompt_length`` and ``data.max_response_length``, in tokens.
        model: Longest prompt with its response, in tokens, for vLLM and for the training engines.
        rollout: The same for vLLM alone (``rollout.max_model_len``).
        micro_batch: Most tokens of a micro-batch, which must hold one prompt with its response.
        batch: Rows of a training batch.
        min_pixels, max_pixels: What the processor enlarges and shrinks images to.
        factor: Side in pixels of what becomes one image token.
    """

    prompt: int
    response: int
    model: int | None
    rollout: int | None
    micro_batch: int | None
    batch: int
    min_pixels: int | None
    max_pixels: int | None
    factor: int | None


@dataclass(frozen=True)
class Setup:
    """A composed recipe with its model's processor."""

    config: Any
    recipe: Recipe
    prompts: Prompts
    special: SpecialTokens
    limits: Limits
    model_config: Any

    def views(self, validation: bool) -> dict[str, View]:
        """The views that training draws of each row of a training or a validation file."""
        views = dict(self.recipe.views)
        if validation:
            known = [view.spec for view in views.values()]
            views |= {name: view for name, view in self.recipe.validation_views.items() if view.spec not in known}
        return views

    def columns(self, validation: bool) -> Columns:
        views = self.views(validation).values()
        prompts = self.prompts
        return Columns(
            prompts.prompt_key,
            prompts.image_key,
            prompts.box_key,
            prompts.evidence_key,
            needs_box=any(view.needs_box for view in views),
            needs_evidence=any(view.provided for view in views),
            needs_answer=validation or self.recipe.needs_answer is not None,
        )


def load_setup(config_name: str, overlays: str | None, overrides: Sequence[str], model: str) -> Setup:
    """Compose the configuration as training does, check it, and load the model's processor.

    Raises:
        RecipeError: Training would refuse the configuration.
        DataError: It does not compose, or the model has no processor that can be loaded.
    """
    from omegaconf.errors import OmegaConfBaseException

    from opd_recipes.check import check_run

    config = compose_config(config_name, overlays, overrides)
    try:
        config.actor_rollout_ref.model.path = model  # not an override: a path may have characters of hydra's grammar
    except OmegaConfBaseException as error:
        raise DataError(f"--config-name {config_name}: {error}") from error
    recipe = check_run(config, files=False)
    tokenizer, processor, model_config = _load_model(config)
    prompts = Prompts([], tokenizer, config.data, processor)
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = SpecialTokens([*tokenizer.all_special_tokens, *added])
    return Setup(config, recipe, prompts, special, limits_of(config, processor, model_config), model_config)


def _load_model(config: Any) -> tuple[Any, Any, Any]:
    """Tokenizer, processor and configuration of the model, as verl's ``HFModelConfig`` loads them."""
    from transformers import AutoConfig
    from verl.utils import hf_processor, hf_tokenizer
    from verl.utils.fs import copy_to_local

    model = config.actor_rollout_ref.model
    trust = model.get("trust_remote_code", False)
    try:
        path = copy_to_local(model.get("tokenizer_path") or model.path)
        tokenizer = hf_tokenizer(path, trust_remote_code=trust)
        processor = hf_processor(path, trust_remote_code=trust)
        model_config = AutoConfig.from_pretrained(
            copy_to_local(model.get("hf_config_path") or model.path), trust_remote_code=trust
        )
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"--model {model.path}: it cannot be loaded: {error}") from error
    if processor is None:
        raise DataError(f"--model {model.path}: it has no image processor; two views need a vision-language model")
    processor.chat_template = (
        model.get("custom_chat_template") or processor.chat_template or getattr(tokenizer, "chat_template", None)
    )
    if not processor.chat_template:
        raise DataError(
            f"--model {model.path}: it has no chat template; name one with actor_rollout_ref.model.custom_chat_template"
        )
    return tokenizer, processor, model_config


def limits_of(config: Any, processor: Any, model_config: Any) -> Limits:
    text = model_config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    actor, data = config.actor_rollout_ref.actor, config.data
    images = processor.image_processor
    own = getattr(images, "size", None) or {}
    kwargs = data.get("mm_processor_kwargs") or {}
    patch, merge = getattr(images, "patch_size", None), getattr(images, "merge_size", None)
    return Limits(
        prompt=data.max_prompt_length,
        response=data.max_response_length,
        model=positions,
        rollout=config.actor_rollout_ref.rollout.get("max_model_len") or positions,
        micro_batch=actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
        batch=data.get("gen_batch_size") or data.train_batch_size,
        min_pixels=kwargs.get("min_pixels") or _edge(own, "shortest_edge"),
        max_pixels=kwargs.get("max_pixels") or _edge(own, "longest_edge"),
        factor=patch * merge if isinstance(patch, int) and isinstance(merge, int) else None,
    )


def _edge(size: Any, name: str) -> int | None:
    """``size`` is a mapping or, in newer processors, an object; Qwen's edges are areas in pixels."""
    value = size.get(name) if hasattr(size, "get") else getattr(size, name, None)
    return value if isinstance(value, int) else None
