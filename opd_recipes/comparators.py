"""``opd_recipes grpo`` and ``opd_recipes sft``: verl's own trainers, started with this package's configuration.

What these commands add to verl's is the environment that the configuration names, which verl reads when it is imported.
"""

from __future__ import annotations

import os
import sys

import hydra
from omegaconf import DictConfig, OmegaConf

#: Where a configuration names variables for verl's processes: that of its Ray trainers, and ours for its SFT trainer.
ENVIRONMENT = ("ray_kwargs.ray_init.runtime_env.env_vars", "environment")


def set_environment(config: DictConfig) -> None:
    for key in ENVIRONMENT:
        variables = OmegaConf.select(config, key) or {}
        os.environ.update({name: str(value) for name, value in variables.items()})


@hydra.main(config_path="pkg://opd_recipes.config", config_name="grpo", version_base=None)
def grpo(config: DictConfig) -> None:
    """``python -m verl.trainer.main_ppo`` with ``grpo.yaml``."""
    set_environment(config)
    from verl.trainer import main_ppo

    main_ppo.main(config)


@hydra.main(config_path="pkg://opd_recipes.config", config_name="sft", version_base=None)
def sft(config: DictConfig) -> None:
    """``torchrun -m verl.trainer.sft_trainer`` with ``sft.yaml``: a process for each of ``trainer.n_gpus_per_node``.

    Under torchrun (several nodes start it themselves, see docs/comparators.md) it is one of these processes.
    """
    set_environment(config)
    if "LOCAL_RANK" not in os.environ:
        launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.trainer.n_gpus_per_node}")
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *launch, "-m", "opd_recipes.cli", "sft", *sys.argv[1:]])

    from verl.trainer import sft_trainer

    import opd_recipes.stock  # noqa: F401  before the process group starts

    sft_trainer.main(config)
