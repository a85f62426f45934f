"""The regional-to-global gap: the same questions on the full image and on the evidence crop, for each checkpoint.

What training closes (Vision-OPD, arXiv 2605.18740, figure 5). The two views are the recipe's own, the student's and the
teacher's, drawn as training draws them.
"""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opd_recipes.eval import statistics
from opd_recipes.eval.benchmarks import Benchmark
from opd_recipes.eval.compare import shared
from opd_recipes.eval.job import Job
from opd_recipes.eval.question import ImageSource, Question
from opd_recipes.eval.results import measure, read_replies
from opd_recipes.eval.runner import Endpoint, ask
from opd_recipes.eval.server import check_checkpoint
from opd_recipes.images import RowImages
from opd_recipes.registry import RecipeError
from opd_recipes.views import View, ViewError

#: What is measured, and which view of the recipe it is.
VIEWS = {"full": "student", "crop": "teacher"}
_STEP = re.compile(r"step_?(\d+)")


@dataclass(frozen=True)
class Source:
    """A model whose gap is measured.

    Args:
        label: Names its folder and its row.
        step: Training steps, where they are known: the curve's axis.
        folder: In Hugging Face format, or a training checkpoint, which is exported for as long as it is asked; None: a
            running server.
    """

    label: str
    step: int | None = None
    folder: Path | None = None

    @property
    def training(self) -> bool:
        return self.folder is not None and next(self.folder.glob("model_world_size_*_rank_*.pt"), None) is not None


def sources_of(checkpoints: Sequence[str], run: Path | None) -> list[Source]:
    """The models that the command names, in the order of their steps where all have one.

    Args:
        checkpoints: ``FOLDER`` or ``STEP=FOLDER``.
        run: A training run's folder: all of its checkpoints.

    Raises:
        RecipeError: A folder holds no model, the run no checkpoint, or two would have one label.
    """
    found = [_source(text) for text in checkpoints]
    for source in found:
        assert source.folder is not None
        if not source.training:
            check_checkpoint(source.folder)
    found += _run_sources(run) if run else []
    labels = [source.label for source in found]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise RecipeError(
            f"two checkpoints are called {twice[0]}: tell them apart by their steps, --checkpoint STEP=FOLDER"
        )
    if all(source.step is not None for source in found):
        found.sort(key=lambda source: source.step or 0)
    return found


def _source(text: str) -> Source:
    number, equals, rest = text.partition("=")
    if equals and number.isdigit():
        return Source(f"step_{number}", int(number), _actor(Path(rest)))
    folder = Path(text)
    step = next((int(m[1]) for part in reversed(folder.resolve().parts) if (m := _STEP.search(part))), None)
    return Source(folder.resolve().name if step is None else f"step_{step}", step, _actor(folder))


def _actor(folder: Path) -> Path:
    return folder / "actor" if (folder / "actor").is_dir() else folder


def _run_sources(run: Path) -> list[Source]:
    folders = [*run.glob("global_step_*"), *run.glob("checkpoints/global_step_*")]
    found = [source for source in (_source(str(folder)) for folder in folders) if source.training]
    if not found:
        raise RecipeError(
            f"--run {run}: it has no global_step_* with a model, here or in checkpoints/; name the run's folder "
            "(trainer.default_local_dir), and let a run save with trainer.save_freq"
        )
    return found


@contextmanager
def model_folder(source: Source, exports: Path, which: str) -> Iterator[Path | None]:
    """A folder that vLLM can load; a training checkpoint is exported below ``exports``, and removed from there afterwards."""
    if not source.training:
        yield source.folder
        return
    from opd_recipes.export import export

    assert source.folder is not None
    target = exports / source.label
    shutil.rmtree(target, ignore_errors=True)
    print(f"exporting the {which} of {source.folder}", flush=True)
    try:
        export(source.folder, target, which=which)
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)


def viewed(questions: Iterator[Question], view: View, name: str) -> Iterator[Question]:
    """The questions as they are asked of one view. Images are drawn where there are any.

    Raises:
        RecipeError: A question has no box, which the view needs, or the view cannot be drawn.
    """
    for question in questions:
        if view.needs_box and question.bbox is None:
            kinds = ", ".join(map(str, view.kinds))
            raise RecipeError(
                f"question {question.id!r} has no box, which the recipe's {VIEWS[name]} view ({kinds}) needs; add the column "
                "bbox ([x0, y0, x1, y1] in pixels), or leave the row out"
            )
        yield replace(question, images=_drawn(question, view)) if question.images else question


def _drawn(question: Question, view: View) -> tuple[ImageSource, ...]:
    row = RowImages([{"bytes": image.read(), "path": image.name} for image in question.images], question.bbox)
    try:
        return tuple(ImageSource(_png(image), question.id) for image in row.render(view))
    except ViewError as error:
        raise RecipeError(f"question {question.id!r}: {error}; mend or remove it") from error


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def check_views(views: Mapping[str, View]) -> None:
    """Check that a question of a benchmark can give the views.

    Raises:
        RecipeError: They cannot be drawn from an image and a box, or do not differ.
    """
    for name, view in views.items():
        if view.provided:
            raise RecipeError(
                f"the recipe's {VIEWS[name]} view starts from ready-made images (provided), which questions do not have; "
                "name a recipe that draws from a box, e.g. --config-name vision_opd without --overlay"
            )
    if views["full"].spec == views["crop"].spec:
        raise RecipeError("the recipe's two views are the same, so there is no gap; name another --config-name")


@dataclass(frozen=True)
class Point:
    """A measured model; ``result`` is its entry in gap.json."""

    source: Source
    result: dict[str, Any]
    failed: int
    stopped: str | None


def measure_point(
    source: Source,
    benchmark: Benchmark,
    make_job: Callable[[Source, str], Job],
    endpoint: Endpoint,
    exports: Path,
    which: str,
) -> Point:
    """Ask both views what has no reply yet, and score them.

    Args:
        make_job: The job of a source and a view's name.
        endpoint: Who answers, its checkpoint still that of ``source``.
        exports: Folder for what is exported.
        which: ``student`` or ``teacher`` of a training checkpoint.
    """
    jobs = {name: make_job(source, name) for name in VIEWS}
    for job in jobs.values():
        job.prepare()
    stopped = None
    if any(job.wanted for job in jobs.values()):
        with model_folder(source, exports, which) as folder:
            stopped = ask(list(jobs.values()), replace(endpoint, checkpoint=folder))
    replies = {name: read_replies(job) for name, job in jobs.items()}
    full, crop = shared(replies["full"], replies["crop"])
    if not full:
        why = stopped or next(
            (reason for job in jobs.values() for reason in job.failures.values()), "nothing was asked"
        )
        raise RecipeError(f"{source.label}: no question has a reply in both views: {why}")
    views = {name: measure(job, replies[name]) for name, job in jobs.items()}
    if any(view["scores"]["overall"] is None for view in views.values()):
        raise RecipeError(
            f"{source.label}: {benchmark.title}'s score ({views['full']['scores']['metric']}) does not exist on these "
            "questions, as a mean lacks one of its parts; leave out --limit or --split"
        )
    result = {
        "label": source.label,
        "step": source.step,
        "checkpoint": str(source.folder) if source.folder else None,
        "questions": len(jobs["full"].questions),
        "failed": {name: len(job.failures) for name, job in jobs.items()},
        **{name: _summary(view) for name, view in views.items()},
        "gap": statistics.compare(benchmark, full, crop).to_json(),
    }
    return Point(source, result, sum(len(job.failures) for job in jobs.values()), stopped)


def _summary(view: Mapping[str, Any]) -> dict[str, Any]:
    interval = view["intervals"].get("overall") or {}
    scores = view["scores"]
    return {
        "accuracy": scores["overall"],
        "low": interval.get("low"),
        "high": interval.get("high"),
        "undecided": scores["undecided"],
        "truncated": view["truncated"],
        "metric": scores["metric"],
        "spent": view["spent"],
    }
