"""The rollout side: the student answers from its view, and every response gets the teacher's prompt beside its own.

Images are decoded and both prompts are built once per prompt, whatever the number of rollouts. The teacher's text goes
through the same token builder as the student's, so the two differ only in their image tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import ray
import torch
import transfer_queue as tq
from PIL import Image
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from opd_recipes.dataset import (
    ROW_IMAGES,
    ROW_NUMBER,
    ROW_VIEW,
    TRACED,
    hinted,
    map_parts,
    prepared_images,
    with_images,
)
from opd_recipes.images import RowImages
from opd_recipes.recipe import Recipe
from opd_recipes.registry import RecipeError
from opd_recipes.selection import FEATURES, features
from opd_recipes.verl_compat import undecorated

logger = logging.getLogger(__name__)

#: Column of a training row's features, where there is something to select.
FEATURE_COLUMN = "opd_features"

#: Column of a training row's tokens in all views of the teacher.
TEACHER_TOKENS = "opd_teacher_tokens"

#: In the ``extra_fields`` of vLLM's answer: the mean entropy of the response (:mod:`opd_recipes.entropy_server`).
MEAN_ENTROPY = "opd_mean_entropy"

#: Tokens that stand for pixels. A policy that samples one would announce an image that is not there.
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")


@dataclass
class Prompt:
    """One view of a prompt, ready for the model.

    Args:
        ids: (P,) tokens, image placeholders expanded.
        positions: (planes, P) position ids, or (P,) for models without mRoPE.
        inputs: Pixels and grids, as the model takes them.
        images: What vLLM gets, the size that the processor wants.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    inputs: dict[str, torch.Tensor]
    images: list[Image.Image]

    def extended(self, length: int) -> torch.Tensor:
        """Positions of the prompt and of the text behind it, (planes, length) or (length,)."""
        more = length - self.positions.shape[-1]
        after = torch.arange(1, more + 1, dtype=self.positions.dtype)
        if self.positions.dim() == 1:
            return torch.cat([self.positions, self.positions[-1] + after])
        # Plane 0 counts tokens, the others count rotary positions; text advances each by one.
        last = torch.cat([self.positions[:1, -1:], self.positions[1:].max().expand(len(self.positions) - 1, 1)])
        return torch.cat([self.positions, last + after], dim=1)


@dataclass
class Views:
    """All prompts of a row.

    Args:
        student: What vLLM answers.
        teacher: What the teacher reads, by view (``teacher``, ``negative``); empty in validation.
        area_ratio: Share of the evidence in the image, a feature for selections.
        scored: Whether the answer is compared with the reference.
    """

    student: Prompt
    teacher: dict[str, Prompt]
    area_ratio: float = 1.0
    scored: bool = False


# The tasks of one prompt's rollouts inherit it; passing it as an argument would send it through verl's queue.
_views: ContextVar[Views] = ContextVar("opd_views")


@register("opd_single_turn")
class PreparedSingleTurn(SingleTurnAgentLoop):
    """verl's single-turn loop on the prompt that is there already: verl's own runs the processor again for every rollout."""

    async def process_multi_modal_info(self, messages: list[dict]) -> dict[str, Any]:
        return {"images": _views.get().student.images}

    async def ct_build_initial_tokens(self, messages: list[dict], *args, **kwargs) -> list[int]:
        ids = _views.get().student.ids
        if len(ids) > self.rollout_config.prompt_length:
            raise ValueError(
                f"a prompt of {len(ids)} tokens, image included, exceeds data.max_prompt_length="
                f"{self.rollout_config.prompt_length}; raise it, or lower the image's size (data.mm_processor_kwargs)"
            )
        return ids.tolist()


_Worker: Any = undecorated(AgentLoopWorkerTQ)


class TwoViewAgentLoopWorker(_Worker):
    """verl's agent-loop worker with a second prompt for every response."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.processor is None:
            raise RecipeError(
                f"actor_rollout_ref.model.path={self.config.actor_rollout_ref.model.path} has no processor: two views "
                "need a vision-language model"
            )
        self.recipe = Recipe.load(self.config.opd)
        self.banned = vision_token_ids(self.tokenizer)
        data = self.config.data
        self.builder = create_continuous_token_builder(
            self.tokenizer,
            hf_model_type=self.hf_model_type,
            chat_template_kwargs=data.get("apply_chat_template_kwargs", {}),
            mm_processor_kwargs=self.mm_processor_kwargs,
            processor=self.processor,
        )

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        source: RowImages = prompt.pop(ROW_IMAGES)
        view = None if prompt.pop(TRACED, False) else prompt.pop(ROW_VIEW)
        try:
            loop = asyncio.get_running_loop()
            messages, views = await loop.run_in_executor(
                None, self._prepare, list(prompt["raw_prompt"]), source, view, prompt.get("reward_model"), trajectory
            )
        except Exception as error:
            # verl waits for a status of every prompt: without one the step would hang.
            logger.exception(f"row {prompt.get(ROW_NUMBER)} of the rows in use: the views cannot be prepared: {error}")
            partition = "val" if trajectory["validate"] else "train"
            await tq.async_kv_put(key=prompt["uid"], partition_id=partition, tag={"status": "failure"})
            return
        prompt["raw_prompt"] = messages
        _views.set(views)
        sampling_params = {**sampling_params, "logit_bias": dict.fromkeys(self.banned, -100.0)}
        await super()._run_prompt(prompt, sampling_params, trajectory, trace)

    async def _run_agent_loop(self, sampling_params: dict, trajectory: dict, *, agent_name: str, trace=True, **kwargs):
        if self.recipe.seeded_rollouts:
            # A seed of its own for every response: vLLM's shared one depends on the order in which requests arrive.
            identity = (self.rollout_config.seed, kwargs["global_steps"], kwargs[ROW_NUMBER], kwargs["session_id"])
            digest = hashlib.sha256(repr(tuple(map(int, identity))).encode()).digest()
            sampling_params = {**sampling_params, "seed": int.from_bytes(digest[:4], "big")}
        return await super()._run_agent_loop(sampling_params, trajectory, agent_name=agent_name, trace=trace, **kwargs)

    def _prepare(
        self, messages: list[dict], source: RowImages, view: str | None, reward: dict | None, trajectory: dict
    ) -> tuple[list[dict], Views]:
        """The student's messages and all prompts; ``view`` is that of a validation row, None with the views of training."""
        if trajectory["validate"] and view is not None:
            messages = with_images(messages, source.render(self.recipe.validation_views[view]))
            return messages, Views(self._prompt(messages), {}, scored=True)
        images = dict(source.rendered(self.recipe.views))
        asked = hinted(messages, self.recipe.teacher_hint, (reward or {}).get("ground_truth"))
        prompts = {name: self._prompt(with_images(asked, seen)) for name, seen in images.items() if name != "student"}
        messages = with_images(messages, images["student"])
        scored = trajectory["validate"] or self.recipe.objective.task_advantage is not None
        return messages, Views(self._prompt(messages), prompts, source.area_ratio(images), scored)

    def _prompt(self, messages: list[dict]) -> Prompt:
        images = prepared_images(self.dataset_cls, self.processor, messages, self.config.data)
        inputs: dict[str, Any] = {}
        ids = torch.tensor(self.builder.build_initial_tokens(messages, images=images, mm_inputs_out=inputs))
        inputs = {k: torch.as_tensor(v) for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
        if "pixel_values" not in inputs:
            raise ValueError("the processor made no pixel values for the images of this prompt")
        positions = super()._compute_position_ids(ids[None], torch.ones_like(ids)[None], inputs).squeeze(0)
        grid = inputs["image_grid_thw"]
        inputs["images_seqlens"] = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
        return Prompt(ids, positions, inputs, images)

    def _compute_multi_modal_inputs(self, output, input_ids):
        return dict(_views.get().student.inputs)

    def _compute_position_ids(self, input_ids, attention_mask, multi_modal_inputs, mm_processor_kwargs=None):
        # From the prompt alone: a response is text, whatever tokens it has.
        return _views.get().student.extended(input_ids.shape[-1])[None]

    async def _compute_score(self, outputs, kwargs: dict) -> None:
        if not _views.get().scored:
            outputs[-1].reward_score = 0.0  # no reward enters training, and rows need no answer
            return
        source = kwargs["data_source"]
        for view in self.recipe.validation_views:
            source = source.removesuffix(f"@{view}")
        await super()._compute_score(outputs, {**kwargs, "data_source": source})

    async def _agent_loop_postprocess(self, output, validate: bool, **kwargs) -> None:
        if isinstance(output, list):
            raise NotImplementedError("agent loops with several outputs have no second view; use single_turn_agent")
        views = _views.get()
        if output.prompt_ids != views.student.ids.tolist():
            raise RuntimeError("the agent loop changed the prompt; the teacher's would not correspond to it")
        cut_at_vision_token(output, self.banned, self.tokenizer.eos_token_id)
        kwargs["raw_prompt"] = _without_images(kwargs["raw_prompt"])
        for name, prompt in views.teacher.items():
            ids = torch.cat([prompt.ids, torch.tensor(output.response_ids, dtype=prompt.ids.dtype)])
            positions = prompt.extended(len(ids))
            kwargs[f"{name}_input_ids"] = ids
            kwargs[f"{name}_positions"] = positions.transpose(0, 1).contiguous() if positions.dim() == 2 else positions
            kwargs[f"{name}_multi_modal_inputs"] = prompt.inputs
        if views.teacher:
            kwargs[TEACHER_TOKENS] = sum(len(kwargs[f"{name}_input_ids"]) for name in views.teacher)
        entropy = output.extra_fields.pop(MEAN_ENTROPY, None)
        if views.teacher and self.recipe.selects:
            if entropy is None and "mean_entropy" in self.recipe.selection.needs:
                raise RuntimeError("opd.selection needs each response's entropy, but the vLLM server did not send it")
            kwargs[FEATURE_COLUMN] = row_features(output, views, entropy or 0.0)
        await super()._agent_loop_postprocess(output, validate, **kwargs)


class TwoViewAgentLoopManager(AgentLoopManagerTQ):
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class``."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(TwoViewAgentLoopWorker)


def row_features(output, views: Views, entropy: float) -> torch.Tensor:
    """The row's :data:`~opd_recipes.selection.FEATURES`, float64 (6,); all 0 where no token of the response counts."""
    counted = [value for value, mask in zip(output.response_logprobs, output.response_mask, strict=True) if mask]
    if not counted:
        return torch.zeros(len(FEATURES), dtype=torch.float64)
    values = (*features(counted), entropy, len(counted), len(views.student.ids), views.area_ratio)
    return torch.tensor(values, dtype=torch.float64)


def vision_token_ids(tokenizer) -> list[int]:
    """The vision tokens that this tokenizer knows."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in VISION_TOKENS if token in vocabulary]


def cut_at_vision_token(output, banned: list[int], eos: int) -> None:
    """End a response before its first vision token. Sampling bans them, so this is for engines that ignore the ban."""
    at = next((i for i, token in enumerate(output.response_ids) if token in set(banned)), None)
    if at is None:
        return
    logger.warning(f"a vision token was sampled at position {at} of a response; the response ends before it")
    keep = max(at, 1)  # verl cannot store an empty response: one masked token stands for it
    output.response_ids = output.response_ids[:keep] if at else [eos]
    output.response_mask = output.response_mask[:keep] if at else [0]
    if output.response_logprobs is not None:
        output.response_logprobs = output.response_logprobs[:keep] if at else [0.0]


def _without_images(messages: list[dict]) -> list[dict]:
    """Text and placeholders only: pixels in verl's queue would be copied for every rollout."""

    def strip(part: Any) -> Any:
        return {"type": "image"} if isinstance(part, dict) and isinstance(part.get("image"), Image.Image) else part

    return map_parts(messages, strip)
