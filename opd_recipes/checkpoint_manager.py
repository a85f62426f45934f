"""verl's checkpoint manager, which also loads what another number of ranks has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from opd_recipes.checkpoints import SHARDS, saved_world
from opd_recipes.resharding import load_optimizer, load_weights


class CheckpointManager(FSDPCheckpointManager):
    """For other ranks' shards each rank reads those of all, a parameter at a time, and keeps its part.

    Random states of ranks are not taken over: they are of other ranks. (They decide over dropout alone: rollouts and the
    order of the data have their own.)
    """

    @classmethod
    def of(cls, manager: FSDPCheckpointManager) -> CheckpointManager:
        return cls(
            model=manager.model,
            optimizer=manager.optimizer,
            lr_scheduler=manager.lr_scheduler,
            processing_class=manager.processing_class,
            checkpoint_config=manager.checkpoint_config,
            trust_remote_code=manager.trust_remote_code,
        )

    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False):
        folder = Path(local_path)
        world = saved_world(folder)
        if world == self.world_size:
            return super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        if self.should_load_model:
            shards = [_read(folder, "model", world, rank) for rank in range(world)]
            load_weights(self.model, shards, partial=self.is_lora_only_state_dict(shards[0]))
        if self.should_load_optimizer:
            load_optimizer(self.optimizer, [_read(folder, "optimizer", world, rank) for rank in range(world)])
        if self.should_load_extra and self.lr_scheduler is not None:
            # As verl does: it has Python's and numpy's random states, so it is not of tensors alone.
            extra = torch.load(folder / SHARDS["extra"].format(world=world, rank=0), weights_only=False)
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        torch.distributed.barrier()


def _read(folder: Path, part: str, world: int, rank: int) -> Any:
    file = folder / SHARDS[part].format(world=world, rank=rank)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
