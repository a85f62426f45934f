"""Two mends for verl's own workers, on which the comparators run: GRPO by ``verl.trainer.main_ppo``, SFT by ``sft_trainer``.

Our engines do not need them. verl imports this module in each worker that builds the model's configuration, through its own
setting ``model.external_lib``; nothing else of its trainers is changed.

- Positions: where all sequences of a batch have the same length, verl 0.9.1 relabels the nested mRoPE positions wrongly. The
  update then crashes, and the log-probs before it are silently those of shifted positions. Short answers always have the
  same length sooner or later, on any machine. See :func:`~opd_recipes.verl_compat.row_major_positions`.
- Process group: on CPU verl asks for a backend that torch refuses. See :func:`~opd_recipes.verl_compat.start_process_group`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from opd_recipes.verl_compat import plane_major_positions, row_major_positions, start_process_group

#: Modules of verl that hold each function under its name; those not imported yet will take it from the first one.
POSITIONS = ("verl.utils.tensordict_utils", "verl.workers.engine_workers", "verl.workers.engine.base")
PROCESS_GROUPS = ("verl.utils.distributed", "verl.workers.engine_workers")


def mend_positions(data: Any) -> None:
    """In the place of verl's ``maybe_fix_3d_position_ids``: put the lengths of ``data["position_ids"]`` right, in place."""
    if "position_ids" in data.keys() and data["position_ids"].dim() == 3:  # noqa: SIM118  a TensorDict has no `in`
        data["position_ids"] = plane_major_positions(row_major_positions(data["position_ids"]))


def on_any_device(start: Callable) -> Callable:
    """In the place of verl's functions that start the process group: on CPU the one that torch accepts."""

    @wraps(start)
    def started(*args: Any, **kwargs: Any) -> Any:
        from verl.utils.device import get_device_name

        return start_process_group() if get_device_name() == "cpu" else start(*args, **kwargs)

    return started


def apply() -> None:
    import verl.utils.distributed as distributed
    import verl.utils.tensordict_utils  # noqa: F401  the first of POSITIONS

    _replace(POSITIONS, "maybe_fix_3d_position_ids", mend_positions)
    for name in ("initialize_global_process_group", "initialize_global_process_group_ray"):
        _replace(PROCESS_GROUPS, name, on_any_device(getattr(distributed, name)))


def _replace(modules: tuple[str, ...], name: str, value: Callable) -> None:
    for module in modules:
        if hasattr(sys.modules.get(module), name):
            setattr(sys.modules[module], name, value)


apply()
