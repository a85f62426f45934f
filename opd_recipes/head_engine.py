"""verl's FSDP2 engine with the head streamed over response positions, and the teacher, which is such an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from transformers.utils.import_utils import is_flash_linear_attention_available
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from opd_recipes.checkpoint_manager import CheckpointManager
from opd_recipes.families import check_packing
from opd_recipes.grouping import Parts, filled, levelled_parts, members
from opd_recipes.lora import check_adapter, merged
from opd_recipes.registry import RecipeError
from opd_recipes.teacher import follow, local
from opd_recipes.topk_head import HeadOutput, HiddenRequest, StreamedHead
from opd_recipes.verl_compat import plane_major_positions, tower_of_tensors
from opd_recipes.vision_tower import DistinctImages, picture_key

#: What an engine reads of a prompt; for a teacher's view the rollout worker adds each behind the view's name.
VIEW_COLUMNS = ("input_ids", "positions", "multi_modal_inputs")


def view_columns(*views: str) -> list[str]:
    """The names of the columns of ``views`` (``teacher``, ``negative``)."""
    return [f"{view}_{column}" for view in views for column in VIEW_COLUMNS]


def rows_of_view(data: TensorDict, view: str) -> TensorDict:
    """The rows as an engine takes them, with the prompt of ``view`` before the response."""
    rows = TensorDict({}, batch_size=data.batch_size)
    for column in VIEW_COLUMNS:
        rows[column] = data[f"{view}_{column}"]
    for key in ("responses", "loss_mask"):
        rows[key] = data[key]
    return rows


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


def packed(micro_batch: TensorDict) -> bool:
    """The layout in which verl's ``prepare_model_inputs`` will put this micro-batch: the same key, the same default."""
    return tu.get_non_tensor_data(micro_batch, "use_remove_padding", True)


class HeadEngine(FSDPEngineWithLMHead):
    """verl's FSDP2 engine, with :class:`StreamedHead` for an ``lm_head``, and every distinct image of a micro-batch once."""

    #: The micro-batches of the batch that is run now; None where verl chooses them.
    _parts: Parts | None = None
    checkpoint_manager: Any

    def initialize(self):
        super().initialize()
        self.checkpoint_manager = CheckpointManager.of(self.checkpoint_manager)

    def _build_module(self):
        module = super()._build_module()
        check_packing(module.config.model_type, self.use_remove_padding, is_flash_linear_attention_available())
        tower_of_tensors(module)
        self.head = StreamedHead.install(module)
        self.images = DistinctImages.install(module)
        return module

    def _build_lora_module(self, module):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.engine_config.seed)  # A is random, and a run can be repeated
            module = super()._build_lora_module(module)
        settings = module.peft_config["default"]
        check_adapter(settings, self.model_config.lora_rank)
        self.lora_factor = settings.lora_alpha / settings.r
        return module

    def get_per_tensor_param(self, **kwargs):
        """The weights for the rollouts: with an adapter, merged one at a time, in the precision that they are trained in.

        verl's own merge leaves out layers that FSDP2 has in its outermost group (of Qwen3-VL the vision tower's mergers),
        keeps a second copy of all weights while it lasts, and rounds to bf16 whatever the rollouts' dtype is.
        """
        return (self._merged(), None) if self._is_lora else super().get_per_tensor_param(**kwargs)

    def _merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        state, model = self.module.state_dict(), self.module.get_base_model()

        def whole(name: str) -> torch.Tensor:
            shard = state[name].detach().to(get_device_id())
            return shard.full_tensor() if hasattr(shard, "full_tensor") else shard.clone()

        weights = merged(state, whole, self.lora_factor)
        named = (convert_weight_keys(dict([weight]), model).popitem() for weight in weights)
        yield from unfuse_moe_params(named, self.model_config.hf_config.model_type)

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict:
        """verl's, on micro-batches that keep rows with the same images together."""
        parts = self._together(data)
        if parts is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        self._parts = Parts(data, parts)
        try:
            output = super().forward_backward_batch(self._parts.stand_ins(), loss_function, forward_only)
            return output | {"model_output": self._parts.output()}
        finally:
            self._parts = None

    def forward_step(self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool):
        """What verl calls for each micro-batch; an engine's own work is in :meth:`_step`."""
        if self._parts is None:
            return self._step(micro_batch, loss_function, forward_only)
        loss, output = self._step(self._parts.open(micro_batch), loss_function, forward_only)
        self._parts.keep(micro_batch, output.pop("model_output"))
        return loss, output

    def _step(self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool):
        raise NotImplementedError

    def _together(self, data: TensorDict) -> list[list[int]] | None:
        """The rows of each micro-batch; None, on all ranks alike, where verl's own choice is as good or fixed."""
        if self.images is None or not tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
            return None
        pictures = [picture_key(inputs) for inputs in data.get("multi_modal_inputs", [None] * len(data))]
        groups = members([("no image", i) if key is None else key for i, key in enumerate(pictures)])
        lengths, budget = data["input_ids"].offsets().diff().tolist(), int(data["max_token_len_per_gpu"])
        order = [row for rows in groups for row in rows]
        shared, needed = len(groups) < len(pictures), len(filled(lengths, order, budget))
        # FSDP runs as many micro-batches on every rank. A row above the budget is refused by verl, with a message.
        most = torch.tensor([shared, needed, -len(lengths), max(lengths) > budget], device=get_device_id())
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=self.get_data_parallel_group())
        shared, count, rows, too_long = most.tolist()
        if not shared or too_long or count > -rows:
            return None
        return levelled_parts(lengths, order, count, budget)

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
            response_index(micro_batch, packed(micro_batch)),
            micro_batch["responses"].values() if chunk else None,
            temperature=float(micro_batch["temperature"]),
            chunk=chunk,
        )
        lengths = micro_batch["responses"].offsets().diff().tolist()
        answer = {key: by_row(value, lengths) for key, value in self._answer(micro_batch, request).items()}
        return None, {"model_output": answer, "loss": 0.0, "metrics": {}}

    def head_weight(self) -> torch.Tensor:
        """The whole head (V, D) in the compute dtype, gathered from its shards."""
        weight = self.head.weight.detach().to(device=get_device_id(), dtype=self._autocast_dtype)
        # A gathered weight that FSDP2 still holds is its storage, which it will free.
        return weight.full_tensor() if hasattr(weight, "full_tensor") else weight.clone()


def by_row(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(values.split(lengths)), layout=torch.jagged)


class TeacherEngine(HeadEngine):
    """A model that is never trained by gradient: no optimizer state, the same sharding as the student.

    It keeps fp32 weights like the student (an averaging step of 5% of a 2e-6 update is lost in bf16).
    """

    @classmethod
    def beside(cls, student: HeadEngine, path: str | None = None) -> TeacherEngine:
        """Build the teacher of ``student`` on the same ranks, with the same sharding.

        Args:
            path: Its checkpoint; None: the student's.
        """
        model_config = student.model_config
        if path is not None:
            model_config = replace(
                model_config, path=path, hf_config_path=None, tokenizer_path=None, lora_rank=0, lora_adapter_path=None
            )
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

    def shards(self) -> list[torch.Tensor]:
        """This rank's part of the weights."""
        return [local(parameter) for parameter in self.module.parameters()]

    def follow(self, rule: Callable, student: HeadEngine, step: int) -> None:
        """Move the weights by the recipe's rule, after a step of the student's."""
        with self.eval_mode():
            follow(rule, self.module, student.module, step)

    def _step(self, micro_batch: TensorDict, loss_function: Callable | None, forward_only: bool):
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
