"""From a run's metrics file to the accuracy curve of both views: numbers, JSON, and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Point:
    """Validation accuracy after ``step`` training steps, as fractions: of the student's view and of the teacher's."""

    step: int
    full: float
    crop: float


def read_metrics(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of verl's ``file`` logger: (step, metrics). A line that is still being written is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        yield entry["step"], entry["data"]


def accuracy_curve(path: Path, data_source: str = "toy") -> list[Point]:
    """The validations of a run, in order."""
    points = []
    for step, metrics in read_metrics(path):
        full = metrics.get(f"val-core/{data_source}@student/acc/mean@1")
        crop = metrics.get(f"val-core/{data_source}@teacher/acc/mean@1")
        if full is not None and crop is not None:
            points.append(Point(step, full, crop))
    return points


def gap_closed(first: Point, last: Point) -> float:
    """(full after - full before) / (crop before - full before)."""
    return (last.full - first.full) / (first.crop - first.full)


def summary(points: Sequence[Point], minutes: float) -> str:
    """One line for a person."""
    first, last = points[0], points[-1]
    before, after = (round(100 * (p.crop - p.full)) for p in (first, last))
    return (
        f"full {first.full:.0%} -> {last.full:.0%}, crop {first.crop:.0%} -> {last.crop:.0%}, "
        f"gap {before} -> {after} points ({gap_closed(first, last):.0%} of it closed by the student), "
        f"{last.step} steps, {minutes:.0f} min"
    )


def record(points: Sequence[Point], **fields: Any) -> dict[str, Any]:
    """A run as it stands in the results file; ``fields`` are seed, command and the like."""
    first, last = points[0], points[-1]
    return {
        **fields,
        "full_before": first.full,
        "full_after": last.full,
        "crop_before": first.crop,
        "crop_after": last.crop,
        "gap_closed": gap_closed(first, last),
        "curve": [{"step": p.step, "full": p.full, "crop": p.crop} for p in points],
    }


def plot(runs: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the curves of ``runs`` (see :func:`record`): thin lines for runs, a thick one for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    names = {"crop": ("evidence crop (what the teacher sees)", "#d95f02", 8), "full": ("full image", "#1f5fa8", -20)}
    for view, (label, color, above) in names.items():
        steps = [point["step"] for point in runs[0]["curve"]]
        values = [[100 * point[view] for point in run["curve"]] for run in runs]
        if len(runs) > 1:
            for line in values:
                axes.plot(steps[: len(line)], line, color=color, alpha=0.3, linewidth=1)
        mean = [sum(column) / len(column) for column in zip(*values, strict=False)]
        axes.plot(steps[: len(mean)], mean, color=color, linewidth=2.5, marker="o", markersize=4)
        end = (steps[len(mean) - 1], mean[-1])
        axes.annotate(label, end, xytext=(0, above), textcoords="offset points", color=color, ha="right")
    axes.set(xlabel="training step", ylabel="accuracy on held-out scenes (%)", ylim=(0, 103), title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
