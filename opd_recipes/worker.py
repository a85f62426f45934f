"""The actor worker: verl's, with a teacher beside the student on the same ranks, trained by the recipe's loss."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.memory_utils import aggressive_empty_cache
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from opd_recipes.checkpoints import (
    STATE_FILE,
    TEACHER_FOLDER,
    check_contents,
    check_origin,
    rank_files,
    read_state,
    saved_world,
)
from opd_recipes.engine import loss_function
from opd_recipes.lora import MEANING
from opd_recipes.recipe import Recipe
from opd_recipes.registry import RecipeError
from opd_recipes.teacher import local
from opd_recipes.verl_compat import engine_device, row_major_positions, start_process_group

#: Of the engine: updates taken, skipped, and skipped in a row.
STEP_COUNTS = ("finite_steps", "skipped_steps", "skipped_in_a_row")


class StudentTrainingWorker(TrainingWorker):
    """verl's training worker around our engine."""

    def __init__(self, config: TrainingWorkerConfig):
        with engine_device():
            super().__init__(config)


class OpdActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's hybrid worker; only what concerns the teacher is different."""

    actor_worker_cls = StudentTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        start_process_group()
        super().init_model()
        recipe = Recipe.load(self.config.opd)
        student = self.actor.engine
        student.attach(recipe)
        self.teacher = student.teacher
        if recipe.compares_in_update:  # else verl's policy-gradient loss stays
            self.actor.set_loss_fn(loss_function(recipe))
        # As verl does at the end of its own: vLLM, on the same device, takes what it sees free.
        aggressive_empty_cache(force_sync=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data):
        if tu.pop(data, "whole_batch", default=False):
            rows = len(data) * self.actor.engine.get_data_parallel_size()
            tu.assign_non_tensor(data, mini_batch_size=rows, global_batch_size=rows)
        return super().update_actor(with_row_major_positions(data))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_utilities(self) -> list[float]:
        """The utility of each of this rank's rows in the last update, in their order."""
        return self.actor.engine.utilities

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_log_prob(self, data):
        return super().compute_log_prob(with_row_major_positions(data))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def trace(self, data):
        with self.actor.engine.eval_mode():
            return self.actor.engine.trace(with_row_major_positions(data))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None):
        super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        self.teacher.save_checkpoint(os.path.join(local_path, TEACHER_FOLDER), global_step=global_step)
        state = {
            "teacher": self._teacher_spec(),
            "adapter": self._adapter_spec(),
            **{name: getattr(self.actor.engine, name) for name in STEP_COUNTS},
        }
        # One for each rank, like verl's shards: a node may have a disk of its own.
        file = STATE_FILE.format(world=dist.get_world_size(), rank=dist.get_rank())
        Path(local_path, file).write_text(json.dumps(state))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_bytes(self) -> int:
        """What this rank's part of a checkpoint takes: weights of student and teacher, and Adam's two moments."""
        engine = self.actor.engine
        trained = [local(p) for p in engine.module.parameters() if p.requires_grad]
        whole = [local(p) for p in engine.module.parameters()]
        saved = trained if self.config.model.lora_rank and engine.checkpoint_config.save_lora_only else whole
        return sum(part.nbytes for part in [*saved, *trained, *trained, *self.teacher.shards()])

    def _teacher_spec(self) -> dict:
        """What a resumed run must agree in; a rate may change."""
        spec = dict(self.config.opd.teacher)
        return {key: spec.get(key) for key in ("kind", "path")}

    def _adapter_spec(self) -> dict | None:
        """What the adapter's weights mean; None without LoRA."""
        model: Any = OmegaConf.to_container(self.config.model)
        return {key: model[key] for key in MEANING} if model["lora_rank"] else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        """Student and teacher, also where another number of ranks has written them.

        Raises:
            RecipeError: They are another trainer's, damaged, or of a run that differs in what the weights mean.
        """
        actor = Path(local_path)
        check_origin(actor)
        world, mine, count = saved_world(actor), dist.get_rank(), dist.get_world_size()
        files = [rank_files(actor, world, rank, self.config.actor.checkpoint.load_contents) for rank in range(world)]
        state = read_state(files[mine if world == count else 0][-1])
        if state["teacher"] != self._teacher_spec():
            raise RecipeError(
                f"{local_path} was written with opd.teacher={state['teacher']}, this run has {self._teacher_spec()}: its "
                "weights are not those that this teacher would have. Resume with the teacher of that run, or start a new "
                "run from these weights (opd_recipes export, trainer.resume_mode=disable)"
            )
        if state.get("adapter") != self._adapter_spec():
            raise RecipeError(
                f"{local_path} was written with the adapter {state.get('adapter')}, this run has {self._adapter_spec()} "
                "(actor_rollout_ref.model): its weights would mean something else. Resume with the settings of that run, or "
                "start a new run from its merged weights (opd_recipes export, trainer.resume_mode=disable)"
            )
        # Another number of ranks reads the files of all; it is enough that one has compared each.
        for *tensors, _ in files[mine::count]:
            check_contents(tensors)
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        self.teacher.load_checkpoint(str(actor / TEACHER_FOLDER), del_local_after_load=del_local_after_load)
        for name in STEP_COUNTS:
            setattr(self.actor.engine, name, state.get(name, 0))


class OpdDetachActorWorker(OpdActorRolloutRefWorker, DetachActorWorker):
    """The same where rollouts have devices of their own: verl's part keeps the weights that a batch was sampled with."""


def with_row_major_positions(data):
    """What our engines take in the place of verl's ``position_ids``; done before verl handles the batch."""
    data["positions"] = row_major_positions(data.pop("position_ids"))
    return data
