"""The gap of each checkpoint as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opd_recipes.eval.page import interval, markdown, percent

COLOURS = {"crop": "#d95f02", "full": "#1f5fa8"}
LABELS = {"crop": "evidence crop (the teacher's view)", "full": "full image (the student's view)"}


def text(points: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """gap.md."""
    header = [
        "model",
        "full image",
        "95% interval",
        "crop",
        "95% interval",
        "gap",
        "95% interval",
        "questions",
        "undecided",
        "failed",
    ]
    views = about["views"]
    parts = [
        "# Regional-to-global gap",
        f"{points[0]['full']['metric']} on {about['data']}; full image: `{views['full']}`, crop: `{views['crop']}`. The gap is "
        "crop minus full, in points, on the questions that both views answered; its interval is paired.",
        markdown(header, [_row(point) for point in points]),
    ]
    if closed := about.get("gap_closed"):
        parts.append(
            f"From {points[0]['label']} to {points[-1]['label']} the full image closes {closed:.0%} of the first gap."
        )
    if any(sum(point["failed"].values()) for point in points):
        parts.append("**Incomplete: some questions have no reply.** The same command asks them again.")
    return "\n\n".join(parts) + "\n"


def _row(point: Mapping[str, Any]) -> list[str]:
    full, crop, gap = point["full"], point["crop"], point["gap"]["differences"]["overall"]
    return [
        point["label"],
        percent(full["accuracy"]),
        interval(full),
        percent(crop["accuracy"]),
        interval(crop),
        percent(gap["value"]),
        interval(gap),
        str(point["questions"]),
        f"{full['undecided']} / {crop['undecided']}",
        f"{point['failed']['full']} / {point['failed']['crop']}",
    ]


def gap_closed(points: Sequence[Mapping[str, Any]]) -> float | None:
    """(full last - full first) / (crop first - full first); None where there was no gap, or is one point."""
    first, last = points[0], points[-1]
    before = first["crop"]["accuracy"] - first["full"]["accuracy"]
    return (last["full"]["accuracy"] - first["full"]["accuracy"]) / before if before > 0 and len(points) > 1 else None


def plot(points: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Both accuracies over the training steps with their 95% intervals; over the models, where steps are not known."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    timed = all(point["step"] is not None for point in points)
    places = [point["step"] if timed else number for number, point in enumerate(points)]
    for view, colour in COLOURS.items():
        values = [100 * point[view]["accuracy"] for point in points]
        low, high = ([_bound(point[view], end) for point in points] for end in ("low", "high"))
        around = [[v - b for v, b in zip(values, low, strict=True)], [b - v for v, b in zip(values, high, strict=True)]]
        axes.errorbar(
            places,
            values,
            yerr=around,
            color=colour,
            linewidth=2.5,
            elinewidth=1.2,
            marker="o",
            markersize=4,
            capsize=3,
            label=LABELS[view],
        )
    if timed:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xticks(places, [point["label"] for point in points], rotation=20, ha="right")
    axes.set(xlabel="training step" if timed else "", ylabel="accuracy (%)", ylim=(0, 103), title=title)
    axes.legend(frameon=False, loc="lower right")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bound(view: Mapping[str, Any], end: str) -> float:
    """In percent; the value itself where there is no interval."""
    value = view[end] if view[end] is not None else view["accuracy"]
    return 100 * float(value)
