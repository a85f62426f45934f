"""The names that this package adds to verl: ``trainer.v1.trainer_mode=opd_sync`` and ``algorithm.adv_estimator=opd_topk``."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

import opd_recipes.advantage  # noqa: F401  registers the estimator


@register_trainer("opd_sync")
class OpdSync(PPOTrainerSync):
    """Makes :class:`opd_recipes.trainer.OpdTrainerSync`, whose imports only the process that trains should pay for."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        from opd_recipes.trainer import OpdTrainerSync

        return OpdTrainerSync(*args, **kwargs)
