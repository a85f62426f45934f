"""The actor worker: verl's, with a teacher beside the student on the same ranks, trained by the recipe's loss."""

from __future__ import annotations

import json
import os
from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.memory_utils import aggressive_empty_cache
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from opd_recipes.engine import loss_function
from opd_recipes.lora import MEANING
from opd_recipes.recipe import Recipe
from opd_recipes.registry import RecipeError
from opd_recipes.teacher import local
from opd_recipes.verl_compat import engine_device, row_major_positions, start_process_group

#: Inside an actor checkpoint: the teacher's shards and the step count of its rule.
TEACHER_FOLDER = "teacher"
STATE_FILE = "opd_state_world_size_{world}_rank_{rank}.json"


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
            "finite_steps": self.actor.engine.finite_steps,
            "skipped_steps": self.actor.engine.skipped_steps,
        }
        with open(self._state_file(local_path), "w") as file:
            json.dump(state, file)

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

    @staticmethod
    def _state_file(local_path: str) -> str:
        # One for each rank, like verl's shards: a node may have a disk of its own.
        return os.path.join(local_path, STATE_FILE.format(world=dist.get_world_size(), rank=dist.get_rank()))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path, hdfs_path=None, del_local_after_load=False):
        teacher = os.path.join(local_path, TEACHER_FOLDER)
        if not os.path.isdir(teacher):
            raise FileNotFoundError(
                f"{local_path} has no '{TEACHER_FOLDER}' folder: it was not written by this trainer. Resuming from it would "
                "restart the teacher from the base model. To start a new run from these weights, merge them into a Hugging "
                "Face folder (opd_recipes export) and set actor_rollout_ref.model.path and trainer.resume_mode=disable"
            )
        with open(self._state_file(local_path)) as file:
            state = json.load(file)
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
        super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        self.teacher.load_checkpoint(teacher, del_local_after_load=del_local_after_load)
        self.actor.engine.finite_steps = state["finite_steps"]
        self.actor.engine.skipped_steps = state["skipped_steps"]


class OpdDetachActorWorker(OpdActorRolloutRefWorker, DetachActorWorker):
    """The same where rollouts have devices of their own: verl's part keeps the weights that a batch was sampled with."""


def with_row_major_positions(data):
    """What our engines take in the place of verl's ``position_ids``; done before verl handles the batch."""
    data["positions"] = row_major_positions(data.pop("position_ids"))
    return data
