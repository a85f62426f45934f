"""The command: write the page once, or again whenever the run has written something."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from opd_recipes.registry import RecipeError
from opd_recipes.report.traces import ROLLOUTS

#: The page's name in the run's folder.
NAME = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="folder of the run: metrics, Hydra's folder, traces"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"the HTML file to write (default: RUN_DIR/{NAME})")
    parser.add_argument(
        "--watch",
        type=_seconds,
        metavar="SECONDS",
        help="write again when the run has written something, looking every so many seconds, until it has ended or Ctrl-C; "
        "the page then refreshes itself",
    )
    parser.add_argument(
        "--metrics",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="metrics files of verl's file logger, the oldest first, where they are not in RUN_DIR",
    )
    parser.add_argument(
        "--rollouts", type=_count, default=ROLLOUTS, help="most traced rollouts shown (default: %(default)s)"
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text}: give 0.1 to 86400 seconds")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 500:
        raise argparse.ArgumentTypeError(f"{text}: give 0 to 500 rollouts")
    return value


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; return the exit code."""
    out = args.out or args.run_dir / NAME
    try:
        if args.watch is None:
            _write(args, out, None)
        else:
            _watch(args, out)
    except RecipeError as error:
        print(f"opd_recipes report: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; the last page is {out}")
    return 0


def _write(args: argparse.Namespace, out: Path, refresh: float | None) -> bool:
    """Write the page; whether the run has logged its last step.

    Raises:
        RecipeError: The run cannot be read, or the page cannot be written.
    """
    from opd_recipes.report.page import build, write

    report = build(args.run_dir, args.metrics, args.rollouts)
    finished = report.run.finished
    size = write(report, out, None if finished else refresh)
    print(f"{out}: step {report.run.last_step}, {len(report.alerts)} warnings, {size / 1e6:.1f} MB", flush=True)
    return finished


def _watch(args: argparse.Namespace, out: Path) -> None:
    from opd_recipes.report.reading import NothingYet

    seen: list[tuple[str, int, int]] | None = None
    waiting = False
    while True:
        files = state(args.run_dir, args.metrics)
        if files != seen:
            seen = files
            try:
                if _write(args, out, args.watch):
                    return
            except NothingYet as error:
                if not waiting:
                    print(f"waiting: {error}", flush=True)
                waiting = True
        time.sleep(args.watch)


def state(folder: Path, metrics: Sequence[Path] = ()) -> list[tuple[str, int, int]]:
    """Name, size and time of every file with content that a page is made of: when it changes, so does the page."""
    patterns = ("*.jsonl", "*/*.jsonl", "hydra/.hydra/*.yaml", ".hydra/*.yaml")
    files = {file for pattern in patterns for file in folder.glob(pattern)} | set(metrics)
    found = []
    for file in sorted(files):
        try:
            status = file.stat()
        except OSError:
            continue
        if status.st_size and file.suffix == ".jsonl" or file.suffix == ".yaml":
            found.append((str(file), status.st_size, status.st_mtime_ns))
    return found
