"""Several runs at once on one machine, each with its own local Ray cluster (``VERL_USE_EXTERNAL_MODULES`` names this module).

verl names the socket by which weights reach vLLM after Ray's job id, which is the same in every fresh local cluster: of two
runs each would read the other's weights. With ``OPD_RUN_ID`` set, the job id that verl sees ends in it.
"""

from __future__ import annotations

import os
from typing import Any

from ray.runtime_context import RuntimeContext

_job_id = RuntimeContext.get_job_id


def get_job_id(self: Any) -> str:
    return f"{_job_id(self)}-{os.environ['OPD_RUN_ID']}"


if os.environ.get("OPD_RUN_ID"):
    RuntimeContext.get_job_id = get_job_id
