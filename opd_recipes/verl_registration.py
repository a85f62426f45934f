"""What this package adds to verl: trainer modes (``trainer.v1.trainer_mode``) and ``algorithm.adv_estimator=opd_topk``."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1 import PPOTrainer, register_trainer

import opd_recipes.advantage  # noqa: F401  registers the estimator
from opd_recipes.check import TRAINER_MODES


def _register(mode: str) -> None:
    @register_trainer(mode)
    class Made(PPOTrainer):
        """Makes the trainer of this mode, whose imports only the process that trains should pay for."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            from opd_recipes.trainer import TRAINERS

            return TRAINERS[mode](*args, **kwargs)


for name in TRAINER_MODES:
    _register(name)
