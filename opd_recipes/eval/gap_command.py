"""``opd_recipes gap``: accuracy on the full image and on the evidence crop, checkpoint by checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.configuration import compose_config
from data_prep.synthesize.driver import write_whole
from opd_recipes.eval import arguments, gap, gap_page
from opd_recipes.eval.benchmarks import BENCHMARKS
from opd_recipes.eval.commands import guarded
from opd_recipes.eval.job import Job
from opd_recipes.eval.question import Question
from opd_recipes.eval.server import checkpoint_digest
from opd_recipes.eval.store import Store
from opd_recipes.recipe import Recipe
from opd_recipes.registry import RecipeError
from opd_recipes.views import View

EXAMPLES = """examples:
  opd_recipes gap --data val.parquet --checkpoint 0=Qwen3.5-4B exports/step_200 exports/step_400 --out results/gap
  opd_recipes gap --data val.parquet --checkpoint 0=Qwen3.5-4B --run runs/vision_opd --out results/gap
  opd_recipes gap --benchmark zoombench --data zoombench --server http://localhost:8000/v1 --model m --out results/gap

The same command again asks only what has no reply yet.
Exit code: 0 all answered, 1 some questions failed, 2 it could not run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        required=True,
        metavar="PATH",
        help="questions with evidence boxes: rows as for training, with answers",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="folder for replies, gap.json, gap.md and gap.png")
    add(
        "--benchmark",
        choices=[*BENCHMARKS],
        metavar="NAME",
        default="custom",
        help=f"what --data is a copy of, and how it is scored: {', '.join(BENCHMARKS)} (default: your own rows)",
    )
    add("--split", help="only this split of the benchmark")
    add(
        "--config-name",
        default="vision_opd",
        help="recipe whose student and teacher views are shown (default: %(default)s)",
    )
    add("--overlay", help="overlays of the recipe, e.g. toy")
    serve = parser.add_argument_group("checkpoints, for each of which vllm serve is started and stopped")
    serve.add_argument(
        "--checkpoint",
        nargs="+",
        default=[],
        metavar="[STEP=]FOLDER",
        help="models in Hugging Face format, or training checkpoints",
    )
    serve.add_argument(
        "--run",
        dest="run_folder",
        type=Path,
        metavar="DIR",
        help="a training run: all of its checkpoints; each is exported while it is asked",
    )
    serve.add_argument(
        "--which",
        choices=("student", "teacher"),
        default="student",
        help="of training checkpoints (default: %(default)s)",
    )
    arguments.add_serving(serve)
    arguments.add_server(parser)
    arguments.add_asking(parser)


def run(args: argparse.Namespace) -> int:
    return guarded("gap", lambda: measure(args))


def measure(args: argparse.Namespace) -> int:
    """Measure every model, write the results after each, and return the exit code.

    Raises:
        RecipeError, DataError, ViewError, OSError: It cannot run; replies that came before are kept.
    """
    sources = _sources(args)
    views = recipe_views(args.config_name, args.overlay)
    points: list[gap.Point] = []
    for source in sources:
        endpoint = arguments.endpoint_of(args, args.out / source.label / "vllm_serve.log", source.folder)
        make_job = partial(_job, args, views, endpoint.model, _weights(source, args.which))
        exports = args.out / "exports"
        points.append(gap.measure_point(source, BENCHMARKS[args.benchmark], make_job, endpoint, exports, args.which))
        _write(args, views, [point.result for point in points])
        if points[-1].stopped:
            break
    print((args.out / "gap.md").read_text())
    return _conclude(points, len(sources))


def _conclude(points: list[gap.Point], wanted: int) -> int:
    for point in points:
        if point.stopped:
            print(f"opd_recipes gap: {point.source.label}: stopped: {point.stopped}", file=sys.stderr)
        if point.failed:
            print(
                f"opd_recipes gap: {point.source.label}: {point.failed} questions have no reply and are in no score; "
                "run the same command again to ask them",
                file=sys.stderr,
            )
    return 0 if len(points) == wanted and not any(point.failed for point in points) else 1


def recipe_views(config_name: str, overlay: str | None) -> dict[str, View]:
    """The views ``full`` and ``crop`` of a recipe.

    Raises:
        DataError, RecipeError: The recipe does not compose, or its views cannot be asked.
    """
    config = compose_config(config_name, overlay, [])
    if "opd" not in config:
        raise RecipeError(f"--config-name {config_name}: it has no views; name a recipe, e.g. vision_opd")
    trained = Recipe.load(config.opd).views
    views = {name: trained[view] for name, view in gap.VIEWS.items()}
    gap.check_views(views)
    return views


def _sources(args: argparse.Namespace) -> list[gap.Source]:
    if args.server:
        if args.checkpoint or args.run_folder:
            raise RecipeError("name who answers: either --server URL and --model NAME, or --checkpoint and --run")
        return [gap.Source(label=(args.model or "").replace("/", "_"))]
    if not args.checkpoint and not args.run_folder:
        raise RecipeError("name who answers: --checkpoint FOLDER ..., --run DIR, or --server URL and --model NAME")
    return gap.sources_of(args.checkpoint, args.run_folder)


def _weights(source: gap.Source, which: str) -> str | None:
    if source.folder is None:
        return None
    digest = checkpoint_digest(source.folder)
    return f"{which} of {digest}" if source.training else digest


def _job(
    args: argparse.Namespace, views: dict[str, View], model: str, weights: str | None, source: gap.Source, name: str
) -> Job:
    benchmark = BENCHMARKS[args.benchmark]
    settings = replace(arguments.settings_of(args, model, weights, benchmark.max_tokens), view=views[name].spec)
    return Job(
        benchmark=benchmark,
        load=partial(_load, args, views[name], name),
        settings=settings,
        store=Store(args.out / source.label / name),
        label=f"{source.label}, {name}",
        data=str(args.data),
        split=args.split,
        limit=args.limit,
    )


def _load(args: argparse.Namespace, view: View, name: str, images: bool) -> Iterator[Question]:
    return gap.viewed(iter(BENCHMARKS[args.benchmark].load(args.data, args.split, images=images)), view, name)


def _write(args: argparse.Namespace, views: dict[str, View], points: list[dict[str, Any]]) -> None:
    about: dict[str, Any] = {
        "data": str(args.data),
        "benchmark": args.benchmark,
        "recipe": args.config_name,
        "overlay": args.overlay,
        "views": {name: view.spec for name, view in views.items()},
        "gap_closed": gap_page.gap_closed(points),
    }
    write_whole(args.out / "gap.json", json.dumps({**about, "points": points}, indent=1) + "\n")
    write_whole(args.out / "gap.md", gap_page.text(points, about))
    gap_page.plot(points, args.out / "gap.png", f"Accuracy on {args.data.name}, full image and crop")
