"""``opd_recipes demo``: the real training loop on the toy data, with a progress line, a picture and a closing line."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from opd_recipes.curve import Point, accuracy_curve, gap_closed, plot, read_metrics, record, summary
from opd_recipes.runs import BASE, Process, ProgressLine, end_on_signal, make_data, recall, remember

#: What the log says when a stage has begun, and what to tell the person who waits. In order.
STAGES = [
    ("", "starting Ray"),
    ("Started a local Ray instance", "loading verl in the trainer process"),
    ("checking rows", "checking the data set"),
    ("worker group kwargs", "loading student and teacher"),
    ("reward loop manager initialized", "starting the vLLM server"),
    ("all initialize finished", "starting the rollout workers"),
    ("(TwoViewAgentLoopWorker pid=", "measuring the base model on both views"),
]
STEPS = 80
TEST_EVERY = 20
#: Validation scenes that the report shows before and after training.
TRACED = 12
#: Scenes for training, which are seen several times and answered anew each time, and for validation.
SCENES, VALIDATION_SCENES = 3072, 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for data, logs and results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each seed")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of each run")
    parser.add_argument("--publish", type=Path, help="also write vision_opd_toy.json and .png to this folder")
    parser.add_argument("overrides", nargs="*", help="more configuration overrides, e.g. opd.teacher.rate=0.05")


def run(args: argparse.Namespace) -> int:
    return run_demo(args.out, args.seeds, args.steps, args.publish, args.overrides)


def run_demo(out: Path, seeds: Sequence[int], steps: int, publish: Path | None, overrides: Sequence[str]) -> int:
    """Train one run for each seed; return the exit code. A seed that has finished with the same arguments is not run again.

    Args:
        out: Folder for data, logs, metrics and results.
        publish: Where to write ``vision_opd_toy.json`` and ``.png`` as well.
        overrides: More Hydra overrides.
    """
    data = make_data(out / "data", SCENES, VALIDATION_SCENES)
    runs = []
    for seed in seeds:
        folder = (out / f"seed{seed}").resolve()
        command = training_command(data, folder, seed, steps, overrides)
        if past := recall(folder, command[1:]):
            print(f"seed {seed}: finished before, see {folder}")
            runs.append(past)
            continue
        began = time.time()
        points = train(command, folder, steps, f"seed {seed}: " if len(seeds) > 1 else "")
        if points is None:
            return 1
        minutes = (time.time() - began) / 60
        shown = "opd_recipes demo" + (f" --steps {steps}" if steps != STEPS else "") + f" --seeds {seed}"
        shown += "".join(f" {shlex.quote(o)}" for o in overrides)
        runs.append(record(points, seed=seed, command=shown, steps=steps, minutes=round(minutes, 1)))
        remember(folder, command[1:], runs[-1])
        print(summary(points, minutes), flush=True)
    for folder in filter(None, [out, publish]):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "vision_opd_toy.json").write_text(json.dumps(runs, indent=1) + "\n")
        plot(runs, folder / "vision_opd_toy.png", "Vision-OPD, tiny model, toy data: no labels used in training")
        print(f"results: {folder / 'vision_opd_toy.json'}  picture: {folder / 'vision_opd_toy.png'}")
    page = report(out / f"seed{seeds[-1]}")
    if page is not None:
        print(f"report: {page}  (curves, warnings, and what each token of {TRACED} answers was worth before and after)")
    if any(run["crop_after"] < run["crop_before"] - 0.05 for run in runs):
        print("note: the crop accuracy fell by more than 5 points; a gap that closes this way does not count")
    return 0


def report(folder: Path) -> Path | None:
    """Write a run's report; a run that was remembered may have lost its files, which is no failure of the demo."""
    from opd_recipes.registry import RecipeError
    from opd_recipes.report.page import build, write

    page = folder / "report.html"
    try:
        write(build(folder), page)
    except RecipeError as error:
        print(f"no report: {error}", file=sys.stderr)
        return None
    return page


def training_command(data: Path, folder: Path, seed: int, steps: int, overrides: Sequence[str]) -> list[str]:
    """The command that trains: the same one that a person would type."""
    return [
        sys.executable,
        *("-m", "opd_recipes", "--config-name", "vision_opd", "+overlay=[cpu,toy]"),
        "opd.teacher.rate=0.02",  # its steps are small: 128 rollouts where the paper has 768
        f"actor_rollout_ref.model.path={BASE}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        f"data.seed={seed}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={TEST_EVERY}",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"opd.trace={{rows: {TRACED}, folder: {folder}/traces}}",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
        f"hydra.run.dir={folder}/hydra",
        *overrides,
    ]


def train(command: Sequence[str], folder: Path, steps: int, prefix: str = "") -> list[Point] | None:
    """Run a training command with a progress line; return its curve, or None after saying what went wrong."""
    process = Process(command, folder)
    print(f"{prefix}training; the whole log is in {process.log}", flush=True)
    line = ProgressLine(prefix)
    end_on_signal()
    try:
        while process.exit_code is None:
            text = status(process.log, process.metrics, steps)
            line.show(text, stage="" if text.startswith("step") else text)
            time.sleep(1)
    finally:
        process.end()
    line.end()
    points = accuracy_curve(process.metrics)
    if process.exit_code != 0 or not points or points[-1].step < steps:
        failed = f"training failed (exit code {process.exit_code}); the whole log is in {process.log}"
        print(f"{process.tail()}\n\n{failed}", file=sys.stderr)
        return None
    return points


def status(log: Path, metrics: Path, steps: int) -> str:
    """What the run is doing, in a few words."""
    entries = list(read_metrics(metrics))
    points = accuracy_curve(metrics)
    if not entries:
        text = log.read_text(errors="replace")
        return next(words for mark, words in reversed(STAGES) if mark in text) + " ..."
    step, last = entries[-1]
    accuracy = f", full {points[-1].full:.0%}, crop {points[-1].crop:.0%} at step {points[-1].step}" if points else ""
    divergence = f", divergence {last['opd/divergence']:.3f}" if "opd/divergence" in last else ""
    closed = f", {gap_closed(points[0], points[-1]):.0%} of the gap closed" if len(points) > 1 else ""
    return f"step {step}/{steps}{divergence}{accuracy}{closed}"
