"""``opd_recipes eval``: ask benchmarks' questions, score the replies, compare two runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from types import ModuleType

from data_prep.rows import DataError
from data_prep.synthesize.driver import write_whole
from opd_recipes.eval import agree, arguments, compare, page
from opd_recipes.eval.benchmarks import BENCHMARKS
from opd_recipes.eval.job import Job
from opd_recipes.eval.judging import judged
from opd_recipes.eval.question import Question
from opd_recipes.eval.results import folder_of, measure, read_replies, read_results
from opd_recipes.eval.runner import Endpoint, ask
from opd_recipes.eval.server import checkpoint_digest
from opd_recipes.eval.store import Store
from opd_recipes.registry import RecipeError
from opd_recipes.runs import end_on_signal
from opd_recipes.view_steps import ViewError

#: What must be the same in all benchmarks of one folder, so that its table is of one model.
SHARED = ("model", "weights", "thinking", "seed")
#: Commands behind ``eval``.
ACTIONS: dict[str, ModuleType] = {"compare": compare, "agree": agree}
EXAMPLES = """examples:
  opd_recipes eval --benchmarks vstar,pope --data benchmarks --checkpoint exports/step_400 --out results/step_400
  opd_recipes eval --benchmarks custom --data custom=val.parquet --server http://localhost:8000/v1 --model m --out results/m
  opd_recipes eval --benchmarks vstar,pope --data benchmarks --out results/step_400 --score-only
  opd_recipes eval compare results/base results/step_400

The same command again asks only what has no reply yet.
Exit code: 0 all answered, 1 some questions failed, 2 it could not run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "--benchmarks", metavar="NAMES", help=f"NAME or NAME:SPLIT, with commas between; known: {', '.join(BENCHMARKS)}"
    )
    add(
        "--data",
        action="append",
        default=[],
        metavar="DIR",
        help="folder with a local copy of each benchmark under its name, or NAME=PATH for one benchmark; may be repeated",
    )
    add("--out", type=Path, metavar="DIR", help="folder for replies and results; one for each model")
    add("--score-only", action="store_true", help="ask nothing: score the replies that are there anew")
    serve = parser.add_argument_group("a checkpoint, for which vllm serve is started and stopped")
    serve.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="model in Hugging Face format")
    arguments.add_serving(serve)
    arguments.add_server(parser)
    arguments.add_asking(parser)
    arguments.add_judge(parser)
    actions = parser.add_subparsers(dest="action", metavar="compare | agree", title="other commands")
    for name, module in ACTIONS.items():
        module.add_arguments(actions.add_parser(name, help=module.SUMMARY, description=module.SUMMARY))


def run(args: argparse.Namespace) -> int:
    if args.action:
        return guarded(f"eval {args.action}", lambda: ACTIONS[args.action].run(args))
    return guarded("eval", lambda: evaluate(args))


def guarded(command: str, work: Callable[[], int]) -> int:
    """The exit code of ``work``; what the user can mend is told without a traceback."""
    end_on_signal()
    try:
        return work()
    except (RecipeError, DataError, ViewError, OSError) as error:
        print(f"opd_recipes {command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            f"\nopd_recipes {command}: stopped; what was answered is kept: run the same command again to go on",
            file=sys.stderr,
        )
        return 130


def evaluate(args: argparse.Namespace) -> int:
    """Ask and score; return the exit code.

    Raises:
        RecipeError, DataError, OSError: It cannot run; replies that came before are kept.
    """
    if args.out is None:
        raise RecipeError("--out is missing: the folder for replies and results")
    judge = arguments.judge_of(args)
    endpoint = None if args.score_only else arguments.endpoint_of(args, args.out / "vllm_serve.log", args.checkpoint)
    if endpoint:
        endpoint.check()
    jobs = _jobs(args, endpoint)
    for job in jobs:
        job.prepare()
        print(f"{job.label}: {len(job.questions)} questions, {len(job.questions) - len(job.wanted)} have a reply")
    stopped = ask(jobs, endpoint) if endpoint else None
    unjudged: dict[str, dict[str, str]] = {}
    for job in jobs:
        replies = read_replies(job)
        verdicts = judged(job.store.folder, replies, judge) if judge else None
        measure(job, replies, verdicts)
        unjudged |= {job.label: verdicts.failed} if verdicts and verdicts.failed else {}
    return _conclude(args.out, jobs, stopped, unjudged)


def _conclude(out: Path, jobs: list[Job], stopped: str | None, unjudged: dict[str, dict[str, str]]) -> int:
    results = read_results(out)
    write_whole(out / "results.json", json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    write_whole(out / "results.md", page.page(results))
    print(f"\n{page.overview(results)}\nresults: {out / 'results.md'}")
    if stopped:
        print(f"opd_recipes eval: stopped: {stopped}", file=sys.stderr)
    failed = {job.label: job.failures for job in jobs if job.failures}
    for name, failures in failed.items():
        question, reason = next(iter(failures.items()))
        print(
            f"opd_recipes eval: {name}: {len(failures)} questions have no reply and are in no score, "
            f"e.g. {question!r}: {reason}. Run the same command again to ask them",
            file=sys.stderr,
        )
    for name, failures in unjudged.items():
        question, reason = next(iter(failures.items()))
        print(
            f"opd_recipes eval: {name}: {len(failures)} replies have no verdict of the judge, e.g. on {question!r}: {reason}. "
            "Run the same command again to ask for them",
            file=sys.stderr,
        )
    return 1 if failed or unjudged else 0


def _jobs(args: argparse.Namespace, endpoint: Endpoint | None) -> list[Job]:
    parts = benchmark_parts(args.benchmarks)
    paths = _data_paths(args.data, {name for name, _ in parts})
    weights = checkpoint_digest(endpoint.checkpoint) if endpoint and endpoint.checkpoint else None
    jobs = []
    for name, split in parts:
        benchmark = BENCHMARKS[name]
        label = f"{name}:{split}" if split else name
        settings = arguments.settings_of(args, endpoint.model, weights, benchmark.max_tokens) if endpoint else None
        job = Job(
            benchmark=benchmark,
            load=partial(_load, name, paths[name], split),
            settings=settings,
            store=Store(folder_of(args.out, label)),
            label=label,
            data=str(paths[name]),
            split=split,
            limit=args.limit,
        )
        if settings:
            for folder in sorted(path.parent for path in args.out.glob("*/settings.json")):
                Store(folder).agree(job.fingerprint, SHARED)
        jobs.append(job)
    return jobs


def _load(name: str, path: Path, split: str | None, images: bool) -> Iterator[Question]:
    return BENCHMARKS[name].load(path, split, images=images)


def benchmark_parts(given: str | None) -> list[tuple[str, str | None]]:
    """Benchmarks and splits (None: all) of a comma-separated list of ``NAME`` and ``NAME:SPLIT``.

    Raises:
        RecipeError: One is unknown or named twice, or there is none.
    """
    names = [name.strip() for name in (given or "").split(",") if name.strip()]
    if not names:
        raise RecipeError(f"--benchmarks is missing: name at least one; known: {', '.join(BENCHMARKS)}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise RecipeError(f"--benchmarks: {twice[0]} is named twice")
    parts = [(name.partition(":")[0], name.partition(":")[2] or None) for name in names]
    for name, split in parts:
        if name not in BENCHMARKS:
            raise RecipeError(f"--benchmarks: unknown value {name!r}; known: {', '.join(BENCHMARKS)}")
        splits = BENCHMARKS[name].splits
        if split is not None and split not in splits:
            raise RecipeError(f"--benchmarks: {name} has no split {split!r}; known: {', '.join(splits) or 'none'}")
    return parts


def _data_paths(given: Sequence[str], names: Set[str]) -> dict[str, Path]:
    """Where each benchmark lies.

    Raises:
        RecipeError: Nowhere, or in two places.
    """
    folders, paths = [], {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in BENCHMARKS:
            folders.append(Path(text))
        elif name not in names:
            raise RecipeError(f"--data {text}: {name} is not among --benchmarks")
        elif not Path(value).exists():
            raise RecipeError(f"--data {text}: no such file or folder")
        else:
            paths[name] = Path(value)
    return {name: paths.get(name) or _copy(name, folders) for name in names}


def _copy(name: str, folders: Sequence[Path]) -> Path:
    found = [folder / name for folder in folders if (folder / name).exists()]
    if len(found) == 1:
        return found[0]
    tried = ", ".join(str(folder / name) for folder in folders) or "nothing was named"
    problem = "several folders have a copy" if found else "there is no local copy"
    raise RecipeError(
        f"--data: {problem} of {name} ({tried}); name it with --data {name}=PATH. Its layout: {BENCHMARKS[name].layout}"
    )
