"""The study's results as a file of runs, a table and a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

#: Colours that colour-blind readers tell apart (Okabe and Ito), for the groups in their order.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
NOTE = (
    "Tiny model, toy data (see [vision_opd](../vision_opd.md#the-toy-run)): what the methods do to one gap between two views, "
    "and whether controls stay where they should. It says nothing about real models' scores."
)


def publish(rows: Sequence[Row], planned: int, folder: Path) -> None:
    """Write ``study.json``, ``study.md`` and ``study.png``.

    Args:
        rows: Finished runs, at least one.
        planned: Runs that the study has when it is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.json").write_text(json.dumps(list(rows), indent=1) + "\n")
    (folder / "study.md").write_text(table(rows, planned))
    plot(rows, planned, folder / "study.png")


def by_variant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Runs of each variant, in the order of their first appearance within the groups' order."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: groups.index(row["group"])):
        found.setdefault(row["variant"], []).append(row)
    return found


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean and, for several values, their standard deviation."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def table(rows: Sequence[Row], planned: int) -> str:
    first = rows[0]
    steps, dates = sorted({row["steps"] for row in rows}), sorted({row["date"] for row in rows})
    lines = [
        "# Study: every recipe, comparator and control on the toy data",
        "",
        NOTE,
        "",
        f"{len(rows)} of {planned} runs are finished. Training steps: {', '.join(map(str, steps))}; "
        f"dates: {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. "
        f"The base model reads {100 * first['full_before']:.1f}% of the full images and {100 * first['crop_before']:.1f}% of "
        "the crops. Accuracy in percent after training, mean and standard deviation over n seeds; `gap closed` is (full after "
        "- full before) / (crop before - full before); teacher tokens and seconds are of one step.",
        "",
        "| | full | crop | gap closed | n | teacher tokens | update s | step s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    group = None
    for variant, runs in by_variant(rows).items():
        if runs[0]["group"] != group:
            group = runs[0]["group"]
            lines.append(f"| **{group}** | | | | | | | |")
        cells = [
            f"`{variant}`",
            *(spread([100 * run[key] for run in runs]) for key in ("full_after", "crop_after", "gap_closed")),
            str(len(runs)),
            _logged(runs, "teacher_tokens", 0),
            _logged(runs, "update_seconds", 2),
            _logged(runs, "step_seconds", 2),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "![Accuracy on the full image after training](study.png)",
        "",
        "The command of each run is in study.json.",
    ]
    return "\n".join(lines) + "\n"


def _logged(runs: Sequence[Row], key: str, digits: int) -> str:
    values = [run[key] for run in runs if run[key] is not None]
    return f"{statistics.mean(values):.{digits}f}" if values else ""


def plot(rows: Sequence[Row], planned: int, path: Path) -> None:
    """Full-image accuracy after training: a small dot for each seed, a large one for the mean, one colour for each group."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    variants = by_variant(rows)
    groups = list(dict.fromkeys(runs[0]["group"] for runs in variants.values()))
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.27 * (len(variants) + len(groups))), layout="constrained")
    place, labels = 0.0, []
    for group in groups:
        colour = COLOURS[groups.index(group) % len(COLOURS)]
        axes.annotate(group, (1.01, place), xycoords=("axes fraction", "data"), color=colour, va="center")
        for name, runs in ((n, r) for n, r in variants.items() if r[0]["group"] == group):
            values = [100 * run["full_after"] for run in runs]
            axes.plot(values, [place] * len(values), "o", markersize=4, color=colour, alpha=0.45)
            axes.plot([statistics.mean(values)], [place], "D", markersize=8, color=colour)
            labels.append((place, name))
            place += 1
        place += 0.8
    before = {name: 100 * rows[0][f"{name}_before"] for name in ("full", "crop")}
    for name, value in before.items():
        axes.axvline(value, color="0.4", linestyle=":" if name == "full" else "--", linewidth=1)
        above = ("data", "axes fraction")
        axes.annotate(f"base, {name}", (value, 1.0), xycoords=above, ha="center", va="bottom", color="0.3", fontsize=8)
    axes.set(xlabel="accuracy on the full image after training (%)", ylim=(place - 1.2, -0.7))
    axes.set_yticks([place for place, _ in labels], [name for _, name in labels])
    axes.set_title(f"Toy data, tiny model: seeds and their mean ({len(rows)} of {planned} runs)", fontsize=10, pad=16)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
