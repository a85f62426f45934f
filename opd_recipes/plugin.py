"""What verl loads in each of its processes (the ``verl.plugins`` entry point): the platform registration.

verl reports a plugin's failure only at debug level, so this module prints its own.
"""

from __future__ import annotations

import sys
import traceback

try:
    from opd_recipes.backends import cpu  # noqa: F401  registers VERL_PLATFORM=cpu
except Exception:
    print("opd_recipes: registering with verl failed; this process will not know VERL_PLATFORM=cpu", file=sys.stderr)
    traceback.print_exc()
    raise
