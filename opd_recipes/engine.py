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
from functools import partial

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
from opd_recipes.teacher import follow
from opd_recipes.topk_head import HeadOutput, HiddenRequest, ScoreRequest, StreamedHead
from opd_recipes.verl_compat import ENGINE_DEVICE, plane_major_positions

#: Columns that the rollout worker adds for the teacher, and what they are to the teacher's engine.
TEACHER_COLUMNS = {
    "teacher_input_ids": "input_ids",
    "teacher_positions": "positions",
    "teacher_multi_modal_inputs": "multi_modal_inputs",
}


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


class TeacherEngine(_HeadEngine):
    """A model that is never trained by gradient: no optimizer state, the same sharding as the student.

    It keeps fp32 weights like the student (an averaging step of 5% of a 2e-6 update is lost in bf16).
    """

    @classmethod
    def beside(cls, student: StudentEngine) -> TeacherEngine:
        """Build the teacher of ``student``: same checkpoint, same sharding, on the same ranks."""
        teacher = cls(
            model_config=student.model_config,
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
        micro_batch = micro_batch.to(get_device_id())
        answer = self._answer(micro_batch, HiddenRequest(response_index(micro_batch, _packed(micro_batch))))
        rows = answer["hidden"].split(micro_batch["responses"].offsets().diff().tolist())
        hidden = torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)
        return None, {"model_output": {"hidden": hidden}, "loss": 0.0, "metrics": {}}

    def hidden_states(self, data: TensorDict) -> torch.Tensor:
        """Final hidden states at the positions that predict the response tokens, nested (B, response length, D)."""
        batch = TensorDict({}, batch_size=data.batch_size)
        for column, name in TEACHER_COLUMNS.items():
            batch[name] = data[column]
        for key in ("responses", "loss_mask"):
            batch[key] = data[key]
        settings = {
            "temperature": 1.0,
            "use_remove_padding": self.use_remove_padding,
            "use_dynamic_bsz": self.engine_config.use_dynamic_bsz,
            "max_token_len_per_gpu": self.engine_config.infer_max_token_len_per_gpu,
            "micro_batch_size_per_gpu": self.engine_config.infer_micro_batch_size_per_gpu,
        }
        tu.assign_non_tensor(batch, **settings)
        return self.infer_batch(batch)["model_output"]["hidden"]

    def head_weight(self) -> torch.Tensor:
        """The whole head (V, D) in the compute dtype, gathered from its shards."""
        weight = self.head.weight.detach().to(device=get_device_id(), dtype=self._autocast_dtype)
        # A gathered weight that FSDP2 still holds is its storage, which it will free.
        return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.clone()


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device=ENGINE_DEVICE)
class StudentEngine(_HeadEngine):
    """The model that is trained. :meth:`attach` gives it its teacher and its recipe."""

    recipe: Recipe
    teacher: TeacherEngine

    def attach(self, teacher: TeacherEngine, recipe: Recipe) -> None:
        self.teacher, self.recipe = teacher, recipe
        self.finite_steps = 0
        self.skipped_steps = 0
        self.skipped_in_a_row = 0

    def train_batch(self, data: TensorDict, loss_function: Callable) -> dict:
        """One update. ``loss_function`` is :func:`distill` bound by the worker; the data has the teacher's columns, and
        ``positions`` as :func:`~opd_recipes.worker.with_row_major_positions` makes them.
        """
        with self.teacher.eval_mode():
            data["teacher_hidden"] = self.teacher.hidden_states(data)
            self._teacher_weight = self.teacher.head_weight()
        student = data.exclude(*TEACHER_COLUMNS)
        self._normaliser = self._count(student)
        output = super().train_batch(student, loss_function)
        self._teacher_weight = None
        self._after_step(output["metrics"])
        return output

    def _after_step(self, metrics: dict) -> None:
        """Let the teacher follow, but only a step that was taken: verl skips the optimizer on a non-finite gradient."""
        if math.isfinite(metrics["grad_norm"]):
            self.finite_steps += 1
            self.skipped_in_a_row = 0
            with self.teacher.eval_mode():
                follow(self.recipe.teacher, self.teacher.module, self.module, self.finite_steps)
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
        counts = torch.stack([mask.values().sum(), rows]).to(device=get_device_id(), dtype=torch.long)
        dist.all_reduce(counts, group=self.get_data_parallel_group())
        return Normaliser(tokens=int(counts[0]), responses=int(counts[1]), world=self.get_data_parallel_size())

    def forward_step(self, micro_batch: TensorDict, loss_function, forward_only: bool):
        micro_batch = micro_batch.to(get_device_id())
        teacher = None
        if loss_function is not None:
            teacher = (micro_batch["teacher_hidden"].values(), self._teacher_weight)
        request = ScoreRequest(
            response_index(micro_batch, _packed(micro_batch)),
            micro_batch["responses"].values(),
            temperature=float(micro_batch["temperature"]),
            chunk=self.recipe.head_chunk,
            teacher=teacher,
            divergence=self.recipe.divergence,
        )
        answer = self._answer(micro_batch, request)
        if loss_function is None:
            assert forward_only, "a loss is needed to train"
            output = {key: _spread(answer[key], micro_batch) for key in ("log_probs", "entropy")}
            return None, {"model_output": output, "loss": 1.0, "metrics": {}}
        loss, metrics = loss_function(answer, micro_batch, self._normaliser)
        metrics = {key: Metric(AggregationType.SUM, value) for key, value in metrics.items()}
        return loss, {"model_output": {}, "loss": loss.detach().item(), "metrics": metrics}


def distill(answer: HeadOutput, micro_batch: TensorDict, total: Normaliser, *, recipe: Recipe):
    """The loss function of :class:`StudentEngine`: picks the columns that :func:`distill_loss` needs."""

    def column(name: str) -> torch.Tensor | None:
        return micro_batch[name].values() if name in micro_batch else None

    return distill_loss(
        answer,
        objective=recipe.objective,
        weights=recipe.weights,
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
