"""The two training engines of a distillation step: verl's FSDP engine with the head streamed over response positions.

One update of a mini-batch is: the teacher's forward over its own prompts, which keeps only the final hidden states at
response positions; then the student's forward and backward, in whose head the two are compared chunk by chunk; then the
optimizer step and the teacher's rule. Student and teacher are cut into micro-batches each by its own token counts, and
the activations of one are gone before the other runs. Nothing of size tokens x vocabulary or tokens x K is ever stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.metric.utils import AggregationType, Metric
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from opd_recipes.loss import Normaliser, distill_loss
from opd_recipes.recipe import Recipe
from opd_recipes.registry import RecipeError
from opd_recipes.teacher import follow
from opd_recipes.topk_head import HeadOutput, HiddenRequest, ScoreRequest, StreamedHead, TeacherStates
from opd_recipes.verl_compat import ENGINE_DEVICE, plane_major_positions

#: What an engine reads of a prompt; for a teacher's view the rollout worker adds each behind the view's name.
VIEW_COLUMNS = ("input_ids", "positions", "multi_modal_inputs")


def view_columns(*views: str) -> list[str]:
    """The names of the columns of ``views`` (``teacher``, ``negative``)."""
    return [f"{view}_{column}" for view in views for column in VIEW_COLUMNS]


def response_index(micro_batch: TensorDict, packed: bool) -> torch.Tensor:
    """(N,) positions in the flattened model input whose next token is a response token, row after row.

    The logits at position i predict token i + 1: a response of r tokens that ends at position e is predicted at
    e - r - 1 ... e - 2. Packed rows follow one another; padded rows start at multiples of the longest row.
    """
    offsets = micro_batch["input_ids"].offsets()
    lengths, responses = offsets.diff(), micro_batch["responses"].offsets().diff()
    starts = offsets[:-1] if packed else torch.arange(len(lengths), device=lengths.device) * lengths.max()
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), responses)
    within = torch.arange(len(row), device=lengths.device) - micro_batch["responses"].offsets()[:-1][row]
    return (starts + lengths - responses - 1)[row] + within


def _packed(micro_batch: TensorDict) -> bool:
    """The layout in which verl's ``prepare_model_inputs`` will put this micro-batch: the same key, the same default."""
    return tu.get_non_tensor_data(micro_batch, "use_remove_padding", True)


class _HeadEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine, with :class:`StreamedHead` for an ``lm_head``."""

    def _build_module(self):
        module = super()._build_module()
        self.head = StreamedHead.install(module)
        return module

    def _answer(self, micro_batch: TensorDict, request: Callable) -> HeadOutput:
        """Run the model on a micro-batch and return what ``request`` makes of the final hidden states."""
        inputs = micro_batch.exclude("positions")
        inputs["position_ids"] = plane_major_positions(micro_batch["positions"])
        model_inputs, _ = self.prepare_model_inputs(micro_batch=inputs)
        dtype = self._autocast_dtype
        mixed = nullcontext() if dtype == torch.float32 else torch.autocast(get_device_name(), dtype=dtype)
        with mixed, self.head.serving(request):
            return self.module(**model_inputs, use_cache=False).logits

    def hidden_states(self, rows: TensorDict, *, temperature: float = 1.0, chunk: int = 0) -> dict[str, torch.Tensor]:
        """Final hidden states at the positions that predict the response tokens, without gradient.

        Args:
            rows: ``input_ids``, ``positions``, ``multi_modal_inputs``, ``responses``, ``loss_mask``.
            temperature: Divides the logits of the tokens' log-probabilities.
            chunk: Where above 0, also score the response tokens, that many positions at a time.

        Returns:
            ``hidden``, nested (B, response length, D), and with ``chunk`` also ``log_probs``, nested (B, response length).
        """
        settings = {
            "temperature": temperature,
            "hidden_chunk": chunk,
            "use_remove_padding": self.use_remove_padding,
            "use_dynamic_bsz": self.engine_config.use_dynamic_bsz,
            "max_token_len_per_gpu": self.engine_config.infer_max_token_len_per_gpu,
            "micro_batch_size_per_gpu": self.engine_config.infer_micro_batch_size_per_gpu,
        }
        tu.assign_non_tensor(rows, **settings)
        return super().infer_batch(rows)["model_output"]

    def _hidden_step(self, micro_batch: TensorDict):
        """:meth:`hidden_states` of one micro-batch, in the form of verl's ``forward_step``."""
        micro_batch = micro_batch.to(get_device_id())
        chunk = tu.get_non_tensor_data(micro_batch, "hidden_chunk", 0)
        request = HiddenRequest(
            response_index(micro_batch, _packed(micro_batch)),
            micro_batch["responses"].values() if chunk else None,
            temperature=float(micro_batch["temperature"]),
            chunk=chunk,
        )
        lengths = micro_batch["responses"].offsets().diff().tolist()
        answer = {key: _by_row(value, lengths) for key, value in self._answer(micro_batch, request).items()}
        return None, {"model_output": answer, "loss": 0.0, "metrics": {}}

    def head_weight(self) -> torch.Tensor:
        """The whole head (V, D) in the compute dtype, gathered from its shards."""
        weight = self.head.weight.detach().to(device=get_device_id(), dtype=self._autocast_dtype)
        # A gathered weight that FSDP2 still holds is its storage, which it will free.
        return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.clone()


def _by_row(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(values.split(lengths)), layout=torch.jagged)


class TeacherEngine(_HeadEngine):
    """A model that is never trained by gradient: no optimizer state, the same sharding as the student.

    It keeps fp32 weights like the student (an averaging step of 5% of a 2e-6 update is lost in bf16).
    """

    @classmethod
    def beside(cls, student: StudentEngine, path: str | None = None) -> TeacherEngine:
        """Build the teacher of ``student`` on the same ranks, with the same sharding.

        Args:
            path: Its checkpoint; None: the student's.
        """
        model_config = student.model_config
        if path is not None:
            model_config = replace(model_config, path=path, hf_config_path=None, tokenizer_path=None)
            _check_inputs(student.model_config, model_config)
        teacher = cls(
            model_config=model_config,
            engine_config=deepcopy(student.engine_config),
            optimizer_config=student.optimizer_config,
            checkpoint_config=CheckpointConfig(save_contents=["model"], load_contents=["model"]),
        )
        teacher._is_offload_optimizer = False  # there is none, and verl moves it on loading without looking
        teacher.initialize()
        return teacher

    def _build_optimizer(self, module):
        return None

    def _build_lr_scheduler(self, optimizer):
        return None

    def forward_step(self, micro_batch: TensorDict, loss_function, forward_only: bool):
        assert forward_only, "the teacher has no backward"
        return self._hidden_step(micro_batch)


#: Settings of an image processor that decide what a pixel patch is; the teacher gets the student's patches.
PATCH_SETTINGS = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std")


def _check_inputs(student: Any, teacher: Any) -> None:
    """Refuse a teacher to which the student's tokens or patches mean something else (two ``HFModelConfig``)."""
    if student.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
        raise RecipeError(
            f"opd.teacher.path={teacher.path}: its tokenizer differs from that of actor_rollout_ref.model.path={student.path}; "
            "the teacher scores the student's tokens, so both must have the same ids"
        )
    ours, theirs = (config.processor.image_processor for config in (student, teacher))
    for name in PATCH_SETTINGS:
        if getattr(ours, name, None) != getattr(theirs, name, None):
            raise RecipeError(
                f"opd.teacher.path={teacher.path}: its image processor has {name}={getattr(theirs, name, None)}, that of "
                f"actor_rollout_ref.model.path={student.path} has {getattr(ours, name, None)}; the teacher gets the student's "
                "image patches, so both must agree"
            )


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device=ENGINE_DEVICE)
class StudentEngine(_HeadEngine):
    """The model that is trained. :meth:`attach` gives it its recipe, and the recipe's teacher beside it."""

    recipe: Recipe
    teacher: TeacherEngine

    def attach(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.teacher = TeacherEngine.beside(self, recipe.teacher.path)
        self.finite_steps = 0
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        #: Mean utility of each row of the last update, in the order of its rows; where rollouts are selected.
        self.utilities: list[float] = []
        self._teacher_weight: torch.Tensor | None = None

    def train_batch(self, data: TensorDict, loss_function: Callable) -> dict:
        """One update. ``loss_function`` is the recipe's (:func:`loss_function`); the data has the columns of the teacher's
        views where the loss compares, and ``positions`` as :func:`~opd_recipes.worker.with_row_major_positions` makes them.
        """
        metrics: dict[str, Metric] = {}
        if self.recipe.compares_in_update:
            data, metrics = self._ask_teacher(data)
            self._normaliser = self._count(data)
        keeps = self.recipe.selects
        tu.assign_non_tensor(data, return_model_output=keeps)
        output = super().train_batch(data, loss_function)
        self._teacher_weight = None
        if keeps:
            self.utilities = output["model_output"]["utility"].values().flatten().tolist()
        output["metrics"] |= metrics
        self._after_step(output["metrics"])
        return output

    def infer_batch(self, data: TensorDict, loss_function: Callable | None = None) -> dict:
        """verl's log-prob pass. With ``compare`` in the data also the divergence (``opd_divergence``) and the utility
        (``opd_utility``, where rollouts are selected) of each token, without gradient and without an update."""
        if tu.get_non_tensor_data(data, "compare", False):
            data, _ = self._ask_teacher(data)
        output = super().infer_batch(data, loss_function)
        self._teacher_weight = None
        return output

    def _ask_teacher(self, data: TensorDict) -> tuple[TensorDict, dict[str, Metric]]:
        """Let the teacher read its views of all rows, in one pass.

        Returns:
            The student's data, to which the teacher's hidden states and the token weights have been added; metrics.
        """
        recipe, temperature = self.recipe, float(data["temperature"])
        names = ["teacher", "negative"] if recipe.weights.contrast else ["teacher"]
        views = [_rows_of_view(data, name) for name in names]
        with self.teacher.eval_mode():
            # Both views in one batch: a negative view costs tokens, not a second round over the weights.
            chunk = recipe.head_chunk if recipe.weights.contrast else 0
            rows = tu.concat_tensordict(views) if len(views) > 1 else views[0]
            seen = self.teacher.hidden_states(rows, temperature=temperature, chunk=chunk)
            self._teacher_weight = self.teacher.head_weight()
        student = data.exclude(*view_columns("teacher", "negative"))
        student["teacher_hidden"] = (
            _first_rows(seen["hidden"], len(data)) if recipe.weights.contrast else seen["hidden"]
        )
        if recipe.teacher.live_share:
            student["teacher_live"] = self._live_states(data)
        tokens = sum(int(view["input_ids"].offsets()[-1]) for view in views)
        metrics = {"opd/teacher_tokens": Metric(AggregationType.SUM, tokens * self.get_data_parallel_size())}
        if recipe.weights.contrast:
            scores = seen["log_probs"].values().to(data["loss_mask"].device)
            positive, negative = scores.tensor_split([int(data["responses"].offsets()[-1])])
            weights = recipe.weights(positive, negative)
            student["token_weights"] = _by_row(weights, data["responses"].offsets().diff().tolist())
            metrics |= self._margin_metrics(positive - negative, weights, data["loss_mask"].values())
        return student, metrics

    def _live_states(self, data: TensorDict) -> torch.Tensor:
        """The student's own hidden states on the teacher's view, inside an update: without dropout, as the teacher's are."""
        training = self.module.training
        self.module.eval()
        try:
            return self.hidden_states(_rows_of_view(data, "teacher"))["hidden"]
        finally:
            self.module.train(training)

    def _margin_metrics(self, margin: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> dict[str, Metric]:
        """Exact quantiles over the tokens of all ranks: they do not add up like sums."""
        mine = torch.stack([margin, weights])[:, mask.bool()].double().cpu()
        parts: list[Any] = [None] * self.get_data_parallel_size()
        dist.all_gather_object(parts, mine, group=self.get_data_parallel_group())
        margin, weights = torch.cat(parts, dim=1)
        if len(margin) == 0:
            return {}
        values = {f"opd/margin_p{q}": float(np.quantile(margin.numpy(), q / 100)) for q in (5, 25, 50, 75, 95)}
        values["opd/margin_selected"] = (weights > 0).double().mean().item()
        values["opd/weight_mean"] = weights.mean().item()
        return {key: Metric(AggregationType.MEAN, value) for key, value in values.items()}

    def _after_step(self, metrics: dict) -> None:
        """Let the teacher follow, but only a step that was taken: verl skips the optimizer on a non-finite gradient."""
        if math.isfinite(metrics["grad_norm"]):
            self.finite_steps += 1
            self.skipped_in_a_row = 0
            with self.teacher.eval_mode():
                follow(self.recipe.teacher.rule, self.teacher.module, self.module, self.finite_steps)
        else:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            if self.skipped_in_a_row >= self.recipe.max_skipped_updates:
                raise FloatingPointError(
                    f"{self.skipped_in_a_row} updates in a row had a gradient that is not finite (opd.max_skipped_updates). "
                    "Neither student nor teacher has moved since; continue from the last checkpoint with a lower learning rate"
                )
        metrics["opd/skipped_updates"] = Metric(AggregationType.MAX, self.skipped_steps)

    def _count(self, data: TensorDict) -> Normaliser:
        mask = data["loss_mask"]
        rows = torch.stack([row.sum() > 0 for row in mask.unbind()]).sum()
        weights = data["token_weights"].values() if "token_weights" in data else torch.ones_like(mask.values())
        weight = self.recipe.weights.total(weights, mask.values())
        counts = torch.stack([mask.values().sum().double(), rows.double(), weight.double()]).to(get_device_id())
        dist.all_reduce(counts, group=self.get_data_parallel_group())
        tokens, responses, total = counts.tolist()
        return Normaliser(int(tokens), int(responses), world=self.get_data_parallel_size(), weight=total)

    def forward_step(self, micro_batch: TensorDict, loss_function, forward_only: bool):
        if tu.get_non_tensor_data(micro_batch, "hidden_chunk", None) is not None:
            return self._hidden_step(micro_batch)
        micro_batch = micro_batch.to(get_device_id())
        compared = "teacher_hidden" in micro_batch
        request = ScoreRequest(
            response_index(micro_batch, _packed(micro_batch)),
            micro_batch["responses"].values(),
            temperature=float(micro_batch["temperature"]),
            chunk=self.recipe.head_chunk,
            teacher=self._teacher_states(micro_batch) if compared else None,
            divergence=self.recipe.divergence,
            utility_topk=self.recipe.divergence.topk if self.recipe.selects else None,
        )
        answer = self._answer(micro_batch, request)
        if compared and loss_function is not None:
            loss, metrics = loss_function(answer, micro_batch, self._normaliser)
            metrics = {key: Metric(AggregationType.SUM, value) for key, value in metrics.items()}
            output = {"utility": _row_means(answer["utility"], micro_batch)} if "utility" in answer else {}
            return loss, {"model_output": output, "loss": loss.detach().item(), "metrics": metrics}
        names = {
            "log_probs": "log_probs",
            "entropy": "entropy",
            "divergence": "opd_divergence",
            "utility": "opd_utility",
        }
        output = {names[key]: _spread(answer[key], micro_batch) for key in names if key in answer}
        if loss_function is None:
            assert forward_only, "a loss is needed to train"
            return None, {"model_output": output, "loss": 1.0, "metrics": {}}
        # verl's own policy-gradient loss.
        loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=self.get_data_parallel_group())
        return loss, {"model_output": {}, "loss": loss.detach().item(), "metrics": metrics}

    def _teacher_states(self, micro_batch: TensorDict) -> TeacherStates:
        live = micro_batch["teacher_live"].values() if "teacher_live" in micro_batch else None
        share = self.recipe.teacher.live_share
        return TeacherStates(micro_batch["teacher_hidden"].values(), self._teacher_weight, live, share)


def _rows_of_view(data: TensorDict, view: str) -> TensorDict:
    """The rows as an engine takes them, with the prompt of ``view`` before the response."""
    rows = TensorDict({}, batch_size=data.batch_size)
    for column in VIEW_COLUMNS:
        rows[column] = data[f"{view}_{column}"]
    for key in ("responses", "loss_mask"):
        rows[key] = data[key]
    return rows


def _first_rows(nested: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(nested.unbind())[:count], layout=torch.jagged)


def _row_means(values: torch.Tensor, micro_batch: TensorDict) -> torch.Tensor:
    """Mean over each row's tokens that count, (rows, 1); 0 for a row without any."""
    masks = micro_batch["loss_mask"].unbind()
    parts = values.split([len(mask) for mask in masks])
    means = [(part * mask).sum() / mask.sum().clamp(min=1) for part, mask in zip(parts, masks, strict=True)]
    return torch.stack(means)[:, None]


def distill(answer: HeadOutput, micro_batch: TensorDict, total: Normaliser, *, recipe: Recipe):
    """The loss function of :class:`StudentEngine`: picks the columns that :func:`distill_loss` needs."""

    def column(name: str) -> torch.Tensor | None:
        return micro_batch[name].values() if name in micro_batch else None

    return distill_loss(
        answer,
        objective=recipe.objective,
        token_weights=column("token_weights"),
        mask=column("loss_mask"),
        lengths=micro_batch["responses"].offsets().diff(),
        total=total,
        rollout_log_probs=column("rollout_log_probs"),
        old_log_probs=column("old_log_probs"),
    )


def loss_function(recipe: Recipe) -> Callable:
    return partial(distill, recipe=recipe)


def _spread(values: torch.Tensor, micro_batch: TensorDict) -> torch.Tensor:
    """Put (N,) response values at the positions that predict them, zero elsewhere: the nested (B, length) verl expects."""
    offsets = micro_batch["input_ids"].offsets()
    full = values.new_zeros(int(offsets[-1]))
    full[response_index(micro_batch, packed=True)] = values
    return torch.nested.nested_tensor_from_jagged(full, offsets)
