"""The engine that trains the student, with its teacher beside it.

One update of a mini-batch is: the teacher's forward over its own prompts, which keeps only the final hidden states at
response positions; then the student's forward and backward, in whose head the two are compared chunk by chunk; then the
optimizer step and the teacher's rule. Student and teacher are cut into micro-batches each by its own token counts, and
the activations of one are gone before the other runs. Nothing of size tokens x vocabulary is ever stored; what
is of size tokens x K lives from the student's forward to its backward, on the rank that made it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric.utils import AggregationType, Metric
from verl.workers.engine.base import EngineRegistry

from opd_recipes.adapter_teacher import AdapterTeacher
from opd_recipes.head_engine import (
    VIEW_COLUMNS,
    HeadEngine,
    TeacherEngine,
    by_row,
    packed,
    response_index,
    rows_of_view,
    view_columns,
)
from opd_recipes.loss import Normaliser, distill_loss
from opd_recipes.recipe import Recipe
from opd_recipes.topk_head import HeadOutput, ScoreRequest, TeacherStates
from opd_recipes.trace_tokens import WEIGHT, answer_columns, token_columns
from opd_recipes.verl_compat import ENGINE_DEVICE


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device=ENGINE_DEVICE)
class StudentEngine(HeadEngine):
    """The model that is trained. :meth:`attach` gives it its recipe, and the recipe's teacher beside it."""

    recipe: Recipe
    teacher: TeacherEngine | AdapterTeacher

    def attach(self, recipe: Recipe) -> None:
        self.recipe = recipe
        shares = self._is_lora and recipe.teacher.path is None
        self.teacher = AdapterTeacher(self) if shares else TeacherEngine.beside(self, recipe.teacher.path)
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

    def trace(self, data: TensorDict) -> TensorDict:
        """What :mod:`opd_recipes.trace` writes of each response token, in eval mode. The data is that of an update."""
        temperature, lengths = float(data["temperature"]), data["responses"].offsets().diff().tolist()
        asked, _ = self._ask_teacher(data)
        hidden = self.hidden_states(data.select(*VIEW_COLUMNS, "responses", "loss_mask"))["hidden"].values()
        columns = token_columns(
            hidden.to(get_device_id()),
            self.head_weight(),
            self._teacher_states(asked.to(get_device_id())),
            asked["responses"].values().to(get_device_id()),
            divergence=self.recipe.divergence,
            temperature=temperature,
            chunk=self.recipe.head_chunk,
        )
        self._teacher_weight = None
        if "token_weights" in asked:
            columns[WEIGHT] = asked["token_weights"].values()
        return answer_columns(columns, lengths)

    def _ask_teacher(self, data: TensorDict) -> tuple[TensorDict, dict[str, Metric]]:
        """Let the teacher read its views of all rows, in one pass.

        Returns:
            The student's data, to which the teacher's hidden states and the token weights have been added; metrics.
        """
        recipe, temperature = self.recipe, float(data["temperature"])
        names = ["teacher", "negative"] if recipe.weights.contrast else ["teacher"]
        views = [rows_of_view(data, name) for name in names]
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
            student["token_weights"] = by_row(weights, data["responses"].offsets().diff().tolist())
            metrics |= self._margin_metrics(positive - negative, weights, data["loss_mask"].values())
        return student, metrics

    def _live_states(self, data: TensorDict) -> torch.Tensor:
        """The student's own hidden states on the teacher's view, inside an update: without dropout, as the teacher's are."""
        training = self.module.training
        self.module.eval()
        try:
            return self.hidden_states(rows_of_view(data, "teacher"))["hidden"]
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
            self.teacher.follow(self.recipe.teacher.rule, self, self.finite_steps)
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

    def _step(self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool):
        if tu.get_non_tensor_data(micro_batch, "hidden_chunk", None) is not None:
            return self._hidden_step(micro_batch)
        micro_batch = micro_batch.to(get_device_id())
        compared = "teacher_hidden" in micro_batch
        request = ScoreRequest(
            response_index(micro_batch, packed(micro_batch)),
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
