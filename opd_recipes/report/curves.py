"""Which curves a report has: for each chart its title, unit, scale and series. A metric that a run lacks is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from opd_recipes.report.accuracy import WORDS, accuracies
from opd_recipes.report.checks import split_step
from opd_recipes.report.reading import Run
from opd_recipes.report.words import number, percent

Points = list[tuple[int, float]]

#: Most points of a chart; where more steps are logged, a point is the mean of several.
MOST_POINTS = 200
#: Share of the time below which a part of the step is counted among the others.
SMALL_PART = 0.01


@dataclass(frozen=True)
class Chart:
    """One chart.

    Args:
        title: What it shows.
        unit: Of the values, with words for what is one of them.
        series: Name and points; NaN interrupts a line.
        zero: Whether the scale begins at 0.
        share: Whether values are fractions, written as percent.
        stacked: Whether the series are parts of a whole.
        note: A sentence for who cannot tell from the title what is good.
        bucket: Steps of which a point is the mean.
    """

    title: str
    unit: str
    series: list[tuple[str, Points]]
    zero: bool = True
    share: bool = False
    stacked: bool = False
    note: str = ""
    bucket: int = 1

    @property
    def steps(self) -> list[int]:
        return sorted({step for _, points in self.series for step, _ in points})

    def words(self, value: float) -> str:
        """A value as it is written in the table, the legend and on the axis."""
        return percent(value) if self.share and math.isfinite(value) else number(value)


@dataclass(frozen=True)
class _Spec:
    title: str
    unit: str
    keys: Sequence[tuple[str, str]]
    kind: Literal["zero", "free", "share", "share from zero"] = "zero"
    note: str = ""


_SPECS = (
    _Spec("Loss", "distillation loss", [("loss", "actor/loss"), ("loss", "train/loss")], "free", "It falls."),
    _Spec("Divergence", "nats per token", [("divergence", "opd/divergence")], "zero", "It falls, but not to 0."),
    _Spec(
        "Response length",
        "tokens",
        [("mean", "response_length/mean"), ("longest", "response_length/max")],
        "zero",
        "A length that runs away or goes to 0 is a sign of collapse.",
    ),
    _Spec(
        "Entropy",
        "nats per token, whole vocabulary",
        [("student", "opd/entropy"), ("student", "actor/entropy"), ("teacher", "opd/teacher_entropy")],
        "zero",
        "Steady; a student near 0 has collapsed.",
    ),
    _Spec(
        "Mass on the compared tokens",
        "share of each model's probability",
        [("student", "opd/student_mass"), ("teacher", "opd/teacher_mass")],
        "share",
        "Above 90%.",
    ),
    _Spec(
        "Selected",
        "share",
        [
            ("rollouts", "selection/share"),
            ("teacher tokens", "selection/teacher_token_share"),
            ("tokens with a weight", "opd/margin_selected"),
        ],
        "share from zero",
    ),
    _Spec(
        "Evidence margin",
        "nats, quantiles over the tokens",
        [(f"{q}%", f"opd/margin_p{q}") for q in (5, 25, 50, 75, 95)],
        "free",
        "Both signs: what a token gains when the teacher sees the evidence.",
    ),
    _Spec("Teacher tokens", "tokens read in a step", [("teacher tokens", "opd/teacher_tokens")]),
    _Spec(
        "Importance weight",
        "training engine / vLLM, mean after the cap",
        [("mean weight", "opd/importance_weight")],
        "free",
        "Within 1% of 1.",
    ),
    _Spec(
        "Tokens at the cap",
        "share of tokens",
        [("at the cap", "opd/importance_capped")],
        "share from zero",
        "Below 1%.",
    ),
    _Spec("Reward", "mean score of the rollouts", [("reward", "critic/score/mean")], "free"),
    _Spec(
        "Gradient norm", "before clipping", [("gradient norm", "actor/grad_norm"), ("gradient norm", "train/grad_norm")]
    ),
    _Spec("Learning rate", "per update", [("learning rate", "actor/lr"), ("learning rate", "train/lr")]),
)

#: Words for the parts of a step, in the order in which they are stacked.
PARTS = {
    "gen": "rollouts",
    "old_log_prob": "old log-probs",
    "update_actor": "update",
    "update_weights": "weight sync",
    "save_checkpoint": "checkpoint",
    "testing": "validation",
    "other": "other",
}


def charts_of(run: Run) -> list[Chart]:
    """The charts of a run, those that answer most first."""
    drawn = {spec.title: chart for spec in _SPECS if (chart := _plain(run, spec)) is not None}
    first = [drawn.pop(title) for title in ("Loss", "Divergence") if title in drawn]
    timing = [chart for chart in [_step_time(run)] if chart is not None]
    return [thinned(chart) for chart in (*_accuracy(run), *first, *drawn.values(), *timing)]


def _plain(run: Run, spec: _Spec) -> Chart | None:
    series: dict[str, Points] = {}
    for name, key in spec.keys:
        if name not in series and run.finite(key):
            series[name] = run.series(key)
    if not series or _never_there(spec, series):
        return None
    zero, share = "zero" in spec.kind, "share" in spec.kind
    return Chart(spec.title, spec.unit, list(series.items()), zero, share, note=spec.note)


def _never_there(spec: _Spec, series: dict[str, Points]) -> bool:
    """A share of tokens at the cap that is always 0 says less than its absence."""
    return spec.title == "Tokens at the cap" and not any(value for points in series.values() for _, value in points)


def _accuracy(run: Run) -> list[Chart]:
    charts = []
    for found in accuracies(run):
        lines = [(WORDS.get(view, view), points) for view, points in found.views.items()]
        charts.append(
            Chart(
                f"Accuracy{found.of}",
                "of the validation rows",
                lines,
                zero=False,
                share=True,
                note="Full rises, crop holds.",
            )
        )
        if found.gap:
            gap = [(step, 100 * value) for step, value in found.gap]
            note = "It should shrink because the full image gets better, not because the crop gets worse."
            charts.append(Chart(f"Gap{found.of}", "percentage points, crop less full image", [("gap", gap)], note=note))
    return charts


def _step_time(run: Run) -> Chart | None:
    timed = {step: split_step(values) for step, values in run.metrics.items() if "timing_s/step" in values}
    total = sum(sum(parts.values()) for parts in timed.values())
    if total <= 0:
        return None
    names = dict.fromkeys(name for parts in timed.values() for name in parts)
    sums = {name: sum(parts.get(name, 0.0) for parts in timed.values()) for name in names}
    shown = [name for name in (*PARTS, *(n for n in names if n not in PARTS)) if sums.get(name, 0) > SMALL_PART * total]
    shown = [name for name in shown if name != "other"][:6]
    rows = []
    for step, parts in timed.items():
        rows.append((step, {name: parts.get(name, 0.0) for name in shown}, sum(parts.values())))
    series = [(PARTS.get(name, name), [(step, parts[name]) for step, parts, _ in rows]) for name in shown]
    series.append(("other", [(step, max(0.0, whole - sum(parts.values()))) for step, parts, whole in rows]))
    return Chart("Time of a step", "seconds", series, stacked=True, note="The first step sets everything up.")


def thinned(chart: Chart) -> Chart:
    """At most :data:`MOST_POINTS` points: the means of equally many logged steps each, at the last of them."""
    steps = chart.steps
    bucket = -(-len(steps) // MOST_POINTS)
    if bucket <= 1:
        return chart
    ends = {step: steps[min((i // bucket + 1) * bucket, len(steps)) - 1] for i, step in enumerate(steps)}
    series = [(name, _means(points, ends.__getitem__)) for name, points in chart.series]
    return Chart(**{**chart.__dict__, "series": series, "bucket": bucket})


def _means(points: Points, place: Callable[[int], int]) -> Points:
    groups: dict[int, list[float]] = {}
    for step, value in points:
        groups.setdefault(place(step), []).append(value)
    return [(step, sum(values) / len(values)) for step, values in groups.items()]
