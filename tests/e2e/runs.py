"""Training runs as a person starts them: a real Ray cluster, a real vLLM server, real FSDP2 ranks, on this machine's CPU."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from opd_recipes.curve import read_metrics
from opd_recipes.runs import Process
from tests.harness import BASE

TIMEOUT_S = 600
#: All responses have the same length (the limit), so all sequences of a batch do.
EQUAL_LENGTHS = "data.max_response_length=1"


def finish(process: Process) -> Process:
    """Wait for a run, at most :data:`TIMEOUT_S` seconds: then it is ended."""
    try:
        while process.exit_code is None and process.minutes * 60 < TIMEOUT_S:
            time.sleep(0.5)
    finally:
        process.end()
    return process


def command(folder, data, *overrides, overlay="[cpu,toy]", recipe="vision_opd", module="opd_recipes") -> list[str]:
    """Of a short training run on the toy data."""
    return [
        sys.executable,
        *("-m", module, "--config-path", "pkg://opd_recipes.config", "--config-name", recipe, f"+overlay={overlay}"),
        f"actor_rollout_ref.model.path={BASE}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"hydra.run.dir={folder}/hydra",
        "data.train_batch_size=16",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=2",
        "trainer.resume_mode=disable",
        "trainer.val_before_train=false",
        *overrides,
    ]


class Run:
    """A finished run: ``steps[i]`` are the metrics that were logged at step i. Options: see :func:`command`."""

    def __init__(self, folder: Path, name: str, data: Path, *overrides: str, **options: str):
        self.folder = folder / name
        # verl's own entry point reads its platform before the configuration can say it.
        asked = command(self.folder, data, *overrides, **options)
        process = finish(Process(asked, self.folder, {"VERL_PLATFORM": "cpu"}))
        self.log = process.log.read_text(errors="replace")
        self.returncode = process.exit_code
        self.steps = dict(read_metrics(process.metrics))

    def ok(self) -> Run:
        assert self.returncode == 0, "\n".join(self.log.splitlines()[-60:])
        return self

    def series(self, key: str) -> list[float]:
        return [metrics[key] for step, metrics in sorted(self.steps.items()) if key in metrics]
