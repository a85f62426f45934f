"""The teacher of a LoRA run: the student's own model with another adapter, so the frozen weights are not held twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig

from opd_recipes.checkpoint_manager import CheckpointManager
from opd_recipes.lora import is_adapter
from opd_recipes.teacher import local, move, reshard, stays


class AdapterTeacher:
    """Stands for a :class:`~opd_recipes.head_engine.TeacherEngine`: the same forward, rule and checkpoints.

    It starts with a copy of the student's adapter, whose A is random: two adapters drawn apart would have no average.
    Only its shards of the adapter are its own; for the length of :meth:`eval_mode` they take the place of the student's.

    Args:
        student: Its engine, of a model with an adapter.
    """

    def __init__(self, student: Any):
        self.student = student
        self._weights = self._copy()
        self._checkpoints = CheckpointManager(
            model=student.module,
            processing_class=student.model_config.get_processor(),
            checkpoint_config=CheckpointConfig(save_contents=["model"], load_contents=["model"], save_lora_only=True),
            trust_remote_code=student.model_config.trust_remote_code,
        )

    def _live(self) -> dict[str, torch.Tensor]:
        """The student's, in place. Asked for anew each time: offloading replaces them."""
        return {name: local(p) for name, p in self.student.module.named_parameters() if is_adapter(name)}

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: shard.detach().clone() for name, shard in self._live().items()}

    @torch.no_grad()
    def _put(self, weights: dict[str, torch.Tensor]) -> None:
        reshard(self.student.module)  # what is gathered has the weights from before
        for name, shard in self._live().items():
            shard.copy_(weights[name])

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The student's module has the teacher's adapter; afterwards its own again, bit for bit."""
        own = self._copy()
        self._put(self._weights)
        try:
            yield
        finally:
            self._put(own)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Inside the student's own mode, in which its weights are on the device: the model is the teacher's."""
        module = self.student.module
        training = module.training
        with self._in_place():
            module.eval()
            try:
                yield
            finally:
                module.train(training)

    def hidden_states(self, rows: Any, **options: Any) -> dict[str, torch.Tensor]:
        """:meth:`~opd_recipes.head_engine.HeadEngine.hidden_states`; in :meth:`eval_mode` alone."""
        return self.student.hidden_states(rows, **options)

    def head_weight(self) -> torch.Tensor:
        return self.student.head_weight()  # frozen, so the one head is both models'

    def shards(self) -> list[torch.Tensor]:
        """This rank's part of the weights that are the teacher's alone."""
        return list(self._weights.values())

    def follow(self, rule: Callable, student: Any, step: int) -> None:
        """Move the adapter by the recipe's rule: an average is one of A and one of B."""
        if not stays(rule):
            move(rule, self._weights, self._live(), step)

    def save_checkpoint(self, local_path: str, global_step: int = 0) -> None:
        """The adapter's shards alone, in the form of verl's ``save_lora_only``."""
        with self._in_place(), self._manager():
            self.student.save_checkpoint(local_path, global_step=global_step)

    def load_checkpoint(self, local_path: str, del_local_after_load: bool = False) -> None:
        with self._in_place(), self._manager():
            self.student.load_checkpoint(local_path, del_local_after_load=del_local_after_load)
            self._weights = self._copy()

    @contextmanager
    def _manager(self) -> Iterator[None]:
        """verl's engine moves weights to and from the host around its manager's work: for now that is the teacher's."""
        before, self.student.checkpoint_manager = self.student.checkpoint_manager, self._checkpoints
        try:
            yield
        finally:
            self.student.checkpoint_manager = before
