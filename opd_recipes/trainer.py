"""The trainer: verl's synchronous v1 trainer without the passes that a distillation step does not need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainer, PPOTrainerSync, register_trainer

from opd_recipes.loss import MOMENTS, pearson
from opd_recipes.recipe import check_run
from opd_recipes.verl_compat import LiteralSync
from opd_recipes.worker import OpdActorRolloutRefWorker

#: The columns that the update reads. The others (raw prompts, rewards, ...) stay in the queue.
UPDATE_COLUMNS = [
    "input_ids",
    "position_ids",
    "multi_modal_inputs",
    "responses",
    "loss_mask",
    "rollout_log_probs",
    "teacher_input_ids",
    "teacher_positions",
    "teacher_multi_modal_inputs",
]


# A mixin for the type checker too: its methods are those of verl's trainer.
_Trainer: Any = PPOTrainer if TYPE_CHECKING else object


class OpdTrainerMixin(_Trainer):
    """What every trainer mode shares: the worker class, and the shape of a step."""

    def __init__(self, config):
        self.recipe = check_run(config)
        super().__init__(config)
        self.replay_buffer.poll_interval = self.recipe.poll_interval
        actor = config.actor_rollout_ref.actor
        #: With one update per batch the policy that trains is the one that sampled: no old log-probs are needed.
        self.single_update = actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1

    def _init_resource_pool_mgr(self):
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(OpdActorRolloutRefWorker)

    def _init_dataloader(self):
        super()._init_dataloader()
        self.val_dataset.set_views(self.recipe.validation_views)

    def _balance_batch(self, batch: KVBatchMeta, metrics, **kwargs) -> KVBatchMeta:
        expected = (
            self.config.data.train_batch_size // self.parameter_sync_step * self.config.actor_rollout_ref.rollout.n
        )
        failed = expected - len(batch)
        if failed > 0 and self.recipe.on_bad_row == "error":
            raise RuntimeError(
                f"{failed} of {expected} rollouts of step {self.global_steps} failed; the rollout worker's log above says "
                "why. Set opd.on_bad_row=skip to go on without such rows"
            )
        metrics["opd/failed_rollouts"] = failed
        return super()._balance_batch(batch, metrics, **kwargs)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        return batch if self.single_update else super()._compute_old_log_prob(batch, metrics)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        # The loss has no advantage, but verl's metrics read the column.
        zeros = [torch.zeros(tag["response_len"]) for tag in batch.tags]
        column = torch.nested.as_nested_tensor(zeros, layout=torch.jagged)
        fields = TensorDict({"advantages": column, "returns": column}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        columns = UPDATE_COLUMNS if self.single_update else [*UPDATE_COLUMNS, "old_log_probs"]
        narrow = KVBatchMeta(
            partition_id=batch.partition_id,
            keys=batch.keys,
            tags=batch.tags,
            fields=columns,
            extra_info=batch.extra_info or {},
        )
        super()._update_actor(narrow, metrics)
        for key in [key for key in metrics if key.startswith("actor/opd/")]:
            metrics[key.removeprefix("actor/")] = metrics.pop(key)
        moments = {key.removeprefix(MOMENTS): metrics.pop(key) for key in list(metrics) if key.startswith(MOMENTS)}
        if moments:
            metrics["opd/rollout_pearson"] = pearson(moments)
        return batch

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        # Rewards, advantages and returns are not computed: their zeros would only mislead.
        for key in [key for key in metrics if key.startswith("critic/")]:
            del metrics[key]


@register_trainer("opd_sync")
class OpdTrainerSync(OpdTrainerMixin, PPOTrainerSync):
    """``trainer.v1.trainer_mode=opd_sync``: rollout, update and weight sync take turns on the same devices."""

    trainer_mode = LiteralSync()
