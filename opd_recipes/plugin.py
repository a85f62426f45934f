"""What verl loads in each of its processes (the ``verl.plugins`` entry point): platform, trainer modes, advantage estimator.

Trainers and estimator are registered when verl's own are there, not before: most of verl's processes import neither, and for
them this module must stay cheap. verl reports a plugin's failure only at debug level, so this module prints its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any

#: Once verl has imported this, :mod:`opd_recipes.verl_registration` is imported.
TRAINERS = "verl.trainer.ppo.v1"


class _AfterTrainers(importlib.abc.MetaPathFinder):
    """Finds nothing by itself; lets the module be found by the others, and adds to its loading."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != TRAINERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                import opd_recipes.verl_registration  # noqa: F401

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


try:
    from opd_recipes.backends import cpu  # noqa: F401  registers VERL_PLATFORM=cpu

    if TRAINERS in sys.modules:
        import opd_recipes.verl_registration  # noqa: F401
    else:
        sys.meta_path.insert(0, _AfterTrainers())
except Exception:
    print(
        "opd_recipes: registering with verl failed; this process will not know VERL_PLATFORM=cpu, "
        "trainer_mode=opd_sync and adv_estimator=opd_topk",
        file=sys.stderr,
    )
    traceback.print_exc()
    raise
