"""``opd_recipes study``: every variant with every seed, measured on the same two views; what is finished is not run again.

A run is the real training command, in a process of its own. The study's folder remembers each finished run with its
arguments, so the study can be stopped at any time and goes on where it was. Runs that are published already (``study.json`` in
the folder given by ``--publish``, with the same command) are taken from there, so another machine can go on, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd_recipes.curve import Point, gap_closed, read_metrics
from opd_recipes.runs import Process, ProgressLine, end_on_signal, make_data, recall, remember
from opd_recipes.study_report import publish
from opd_recipes.study_variants import BASE_MODEL, DEFAULT_OUT, Files, Variant, commands, named, shown

STEPS = 40
SEEDS = (0, 1, 2)
#: Scenes of the data set.
TRAIN, VAL = 3072, 256
#: A run that takes longer has hung: it is ended and counted as failed.
LIMIT_MINUTES = 30
#: Seconds between two looks at what runs.
POLL_SECONDS = 1.0
#: What a run's result and its row in the results have in common.
KEPT = ("minutes", "date", "teacher_tokens", "update_seconds", "step_seconds")
DATA_SOURCE = "toy"
VIEWS = ("full", "crop")


@dataclass
class Run:
    """One variant with one seed: its commands, which run one after another."""

    variant: Variant
    seed: int
    steps: int
    folder: Path
    commands: list[list[str]]
    process: Process | None = None
    stage: int = 0
    began: float = 0.0
    failure: str = ""
    result: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.variant.name if self.variant is BASE_MODEL else f"{self.variant.name} seed {self.seed}"

    @property
    def command(self) -> str:
        """What a person would type, whatever the machine's paths are."""
        return " && ".join(shown(command, self.folder.parent) for command in self.commands)

    @property
    def arguments(self) -> list[list[str]]:
        """What a finished run must agree in to stand for this one."""
        return [command[1:] for command in self.commands]

    def start(self) -> None:
        # Two runs on one machine must not meet: see backends/side_by_side.py.
        apart = {
            "VERL_USE_EXTERNAL_MODULES": "opd_recipes.backends.side_by_side",
            "OPD_RUN_ID": f"{os.getpid()}-{self.folder.name}",
        }
        self.began = self.began or time.time()
        self.process = Process(self.commands[self.stage], self.folder, apart, name=f"{self.stage}_")

    def advance(self) -> bool:
        """Look after the process; True when the run is over, well or not."""
        assert self.process is not None
        if self.process.minutes > LIMIT_MINUTES:
            self.process.end()
            self.failure = f"ended after {LIMIT_MINUTES} minutes"
        elif (code := self.process.exit_code) is None:
            return False
        elif code != 0:
            self.failure = f"exit code {code}"
        elif self.stage + 1 < len(self.commands):
            self.stage += 1
            self.start()
            return False
        else:
            self.result = self._measured()
            if self.result is None:
                self.failure = "it ended without measuring both views"
        if self.failure:
            print(
                f"\n{self.process.tail()}\n\n{self.name}: {self.failure}; the log is {self.process.log}",
                file=sys.stderr,
            )
        else:
            remember(self.folder, self.arguments, self.result)
        return True

    def _measured(self) -> dict[str, Any] | None:
        entries = [entry for stage in range(len(self.commands)) for entry in read_metrics(self._metrics(stage))]
        accuracy = next(filter(None, (_accuracy(metrics) for _, metrics in reversed(entries))), None)
        if accuracy is None:
            return None
        return {
            "after": accuracy,
            "minutes": round((time.time() - self.began) / 60, 1),
            "date": datetime.date.today().isoformat(),
            "teacher_tokens": _mean(entries, "opd/teacher_tokens"),
            "update_seconds": _mean(entries, "timing_s/update_actor"),
            "step_seconds": _mean(entries, "timing_s/step"),
        }

    def _metrics(self, stage: int) -> Path:
        return self.folder / f"{stage}_metrics.jsonl"

    @property
    def status(self) -> str:
        step = max((step for step, _ in read_metrics(self._metrics(self.stage))), default=None)
        return f"{self.name} " + ("starting" if step is None else f"step {step}/{self.steps}")


def _result(row: dict[str, Any], when: str) -> dict[str, Any]:
    """A run's result from its published row; ``before`` gives the base model's."""
    return {key: row[key] for key in KEPT} | {"after": {view: row[f"{view}_{when}"] for view in VIEWS}}


def _accuracy(metrics: dict[str, Any]) -> dict[str, float] | None:
    keys = {view: f"val-core/{DATA_SOURCE}@{view}/acc/mean@1" for view in VIEWS}
    return {view: metrics[key] for view, key in keys.items()} if set(keys.values()) <= metrics.keys() else None


def _mean(entries: Sequence[tuple[int, dict[str, Any]]], key: str) -> float | None:
    """Mean of a metric over the steps; the first step, in which everything is set up, does not count."""
    values = [metrics[key] for step, metrics in entries if key in metrics and step > 1]
    return round(sum(values) / len(values), 3) if values else None


@dataclass
class Study:
    """All runs that are asked for; those finished before already have their result."""

    runs: list[Run]
    base: Run
    jobs: int
    failed: list[Run] = field(default_factory=list)

    @classmethod
    def plan(
        cls,
        out: Path,
        seeds: Sequence[int],
        only: Sequence[str],
        steps: int,
        jobs: int,
        extra: Sequence[str] = (),
        published: Sequence[dict[str, Any]] = (),
    ) -> Study:
        """Lay out the runs.

        Args:
            published: Rows of an earlier ``study.json``; they stand for runs with the same seed, steps and command.

        Raises:
            ValueError: An unknown variant.
        """
        known = {(row["seed"], row["steps"], row["command"]): row for row in published}
        files = Files(out / "data")
        # Seeds are the outer loop, so that a study that is stopped has all variants once.
        wanted = [(BASE_MODEL, 0), *((variant, seed) for seed in seeds for variant in named(only))]
        runs = []
        for variant, seed in wanted:
            folder = out / (variant.name if variant is BASE_MODEL else f"{variant.name}-{seed}")
            run = Run(variant, seed, steps, folder, commands(variant, seed, steps, folder, files, extra))
            row = known.get((seed, steps, run.command))
            run.result = recall(folder, run.arguments) or (row and _result(row, "after"))
            runs.append(run)
        if published and runs[0].result is None:
            runs[0].result = _result(published[0], "before")
        return cls(runs[1:], runs[0], jobs)

    def execute(self) -> None:
        """Run what is not finished, ``jobs`` at a time. Ended by a signal or an error, it ends what runs."""
        waiting = [run for run in (self.base, *self.runs) if run.result is None]
        running: list[Run] = []
        line = ProgressLine()
        end_on_signal()
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    running.append(waiting.pop(0))
                    running[-1].start()
                over = [run for run in running if run.advance()]
                running = [run for run in running if run not in over]
                self.failed += [run for run in over if run.failure]
                line.show(self.progress(running), stage=f"{len(waiting)} {len(running)}")
                time.sleep(POLL_SECONDS)
        finally:
            for run in running:
                if run.process is not None:
                    run.process.end()
            line.end()

    def progress(self, running: Sequence[Run]) -> str:
        done = [run.result["minutes"] for run in (self.base, *self.runs) if run.result is not None]
        total = len(self.runs) + 1
        left = total - len(done) - len(self.failed)
        # A run that is under way counts half.
        remaining = max(left - len(running) / 2, 0) * sum(done) / len(done) / self.jobs if done else None
        time_left = "" if remaining is None else f", about {_duration(remaining)} left"
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{len(done)} of {total} runs{failed}{time_left}; " + "; ".join(run.status for run in running)

    def results(self) -> list[dict[str, Any]]:
        """The finished runs, as they stand in ``study.json``; none before the base model is measured."""
        if self.base.result is None:
            return []
        before = self.base.result["after"]
        rows = []
        for run in self.runs:
            if run.result is None:
                continue
            after = run.result["after"]
            first, last = Point(0, before["full"], before["crop"]), Point(run.steps, after["full"], after["crop"])
            rows.append(
                {
                    "variant": run.variant.name,
                    "group": run.variant.group,
                    "recipe": run.variant.recipe,
                    "seed": run.seed,
                    "steps": run.steps,
                    "full_before": first.full,
                    "full_after": last.full,
                    "crop_before": first.crop,
                    "crop_after": last.crop,
                    "gap_closed": gap_closed(first, last),
                    **{key: run.result[key] for key in KEPT},
                    "command": run.command,
                }
            )
        return rows


def _duration(minutes: float) -> str:
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def make_files(out: Path) -> None:
    """The toy data, and what verl's own trainers read: the same rows with one view drawn."""
    folder = make_data(out / "data", TRAIN, VAL)
    files = Files(folder)
    wanted = [
        (files.train, files.train_full, "full", None),
        (files.val, files.val_full, "full", "full"),
        (files.val, files.val_crop, "crop", "crop"),
    ]
    for source, target, view, tag in wanted:
        if not target.exists():
            command = [sys.executable, "-m", "data_prep", "render", "--data", str(source), "--out", str(target)]
            command += ["--view", view, "--overlay", "toy,study", *(("--tag", tag) if tag else ())]
            subprocess.run(command, check=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for data, logs and results")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(SEEDS), help="one run of each variant for each seed"
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these variants only")
    parser.add_argument("--publish", type=Path, help="also write study.json, study.md and study.png to this folder")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time; each needs about 9 GB")


def run(args: argparse.Namespace) -> int:
    return run_study(args.out, args.seeds, args.only, args.publish, args.steps, args.jobs)


def run_study(
    out: Path,
    seeds: Sequence[int] = SEEDS,
    only: Sequence[str] = (),
    publish_to: Path | None = None,
    steps: int = STEPS,
    jobs: int = 1,
    extra: Sequence[str] = (),
) -> int:
    """Run the study, or what is left of it, and write its results; return the exit code.

    Args:
        out: Folder for data, logs and results.
        only: Names of variants; none: all.
        publish_to: Another folder for ``study.json``, ``study.md`` and ``study.png``.
        jobs: Runs at the same time; each needs about 9 GB and more than one core.
        extra: Overrides of every training command.
    """
    out = out.resolve()
    try:
        file = publish_to / "study.json" if publish_to else None
        published = json.loads(file.read_text()) if file and file.exists() else []
        study = Study.plan(out, seeds, only, steps, jobs, extra, published)
    except ValueError as error:
        print(f"opd_recipes study: {error}", file=sys.stderr)
        return 2
    try:
        make_files(out)
        study.execute()
    finally:
        # What is finished is written even where the study is stopped.
        if rows := study.results():
            for folder in filter(None, (out, publish_to)):
                publish(rows, len(study.runs), folder)
            print(f"{len(rows)} of {len(study.runs)} runs; results: {(publish_to or out) / 'study.md'}")
    for run in study.failed:
        print(f"failed: {run.name} ({run.failure}); the log is in {run.folder}", file=sys.stderr)
    return 1 if study.failed else 0
