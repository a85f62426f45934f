"""``python -m opd_recipes --config-name vision_opd [overrides]``: check the configuration, then run verl's trainer.

Nothing heavy is imported before the configuration is composed, and nothing of Ray starts before it is checked.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from opd_recipes.checkpoints import how_to_continue
from opd_recipes.registry import RecipeError
from opd_recipes.watch import RunStopped


@hydra.main(config_path="pkg://opd_recipes.config", config_name="vision_opd", version_base=None)
def main(config: DictConfig) -> None:
    try:
        run(config)
    except (RecipeError, RunStopped) as error:
        sys.exit(f"opd_recipes: {error}")


def run(config: DictConfig) -> None:
    """Train.

    Raises:
        RecipeError: The configuration, or something that it names, cannot be used.
        RunStopped: The run could not go on.
    """
    from opd_recipes import cluster, leftovers
    from opd_recipes.check import check_run

    existing = cluster.address(config)
    # On an existing cluster the trainer may run on another node than this process: it checks the files itself.
    check_run(config, files=existing is None)
    if existing is not None:
        cluster.check_settings(config, existing)
    # verl reads its platform when it is imported; the workers get the same variables through Ray's runtime environment.
    variables = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    os.environ.update({key: str(value) for key, value in variables.items()})

    import ray
    import ray.exceptions
    from verl.trainer import main_ppo
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.utils.device import auto_set_device

    from opd_recipes.verl_compat import check_version, undecorated

    check_version()

    auto_set_device(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))

    stock: Any = undecorated(main_ppo.TaskRunnerV1)

    class TaskRunner(stock):
        def run(self, config):
            import opd_recipes.verl_registration  # noqa: F401  by its plugin too, but only where the package is installed

            cluster.check_cluster(config)
            kept = leftovers.start()
            super().run(config)
            del kept  # until here

    try:
        main_ppo.run_ppo(config, task_runner_class=ray.remote(TaskRunner))
    except ray.exceptions.RayError as error:
        # Found by a worker (a bad row, say): the message is for the user, the remote traceback is not.
        cause = getattr(error, "cause", None)
        if isinstance(cause, RecipeError | RunStopped):
            if isinstance(cause, RunStopped):
                cause = RunStopped(f"{cause}. {how_to_continue(config)}")
            raise cause from None
        error.add_note(f"opd_recipes: {how_to_continue(config)}")
        raise
    finally:
        leftovers.end_ray()  # with the workers' log lines, so that a message is the last thing to read
