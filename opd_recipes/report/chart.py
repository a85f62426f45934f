"""Geometry of a chart: scales, ticks and paths in the units of an SVG's view box."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

from opd_recipes.report.curves import Chart

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 36
#: Points up to which each is marked on its line.
MARKED = 40


@dataclass(frozen=True)
class Tick:
    """Args: place: In the view box. label: As it is written."""

    place: float
    label: str


@dataclass(frozen=True)
class Line:
    """One series as it is drawn.

    Args:
        name: Of the series.
        number: From 1: its colour and dash.
        paths: SVG path data, one for each part without a gap.
        dots: Places of points that are marked.
        last: Its last value, in words.
    """

    name: str
    number: int
    paths: list[str]
    dots: list[tuple[float, float]]
    last: str


@dataclass(frozen=True)
class Drawing:
    """A chart, laid out.

    Args:
        chart: What is drawn.
        x, y: Ticks.
        lines: Lines, or where parts are stacked their areas.
        places: x of each step, for the cursor.
        rows: Cells of the table: a step and its values in words.
        text: A description for who does not see the picture.
    """

    chart: Chart
    x: list[Tick]
    y: list[Tick]
    lines: list[Line]
    places: list[float]
    rows: list[tuple[int, list[str]]]
    text: str


def draw(chart: Chart, span: tuple[int, int]) -> Drawing:
    """Lay out a chart that has at least one finite value.

    Args:
        span: First and last step of the run: all its charts have the same axis.
    """
    steps = chart.steps
    columns = [dict(points) for _, points in chart.series]
    low, high = _range(chart, steps, columns)
    ticks = nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    across = Scale(*span, LEFT, WIDTH - RIGHT)
    up = Scale(low, high, HEIGHT - BOTTOM, TOP)
    lines = _stack(chart, steps, columns, across, up) if chart.stacked else _lines(chart, across, up)
    rows = [(step, [chart.words(c[step]) if step in c else "" for c in columns]) for step in steps]
    whole = [tick for tick in nice_ticks(*span) if tick == int(tick) and span[0] <= tick <= span[1]]
    return Drawing(
        chart,
        [Tick(across(tick), f"{int(tick)}") for tick in whole or span[:1]],
        [Tick(up(tick), tick_words(tick, ticks[1] - ticks[0], chart.share)) for tick in ticks],
        lines,
        [across(step) for step in steps],
        rows,
        describe(chart),
    )


class Scale:
    """A linear map from values to places; a single value lies in the middle."""

    def __init__(self, low: float, high: float, start: float, end: float):
        self.low, self.high, self.start, self.end = low, high, start, end

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return (self.start + self.end) / 2
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def _range(chart: Chart, steps: list[int], columns: list[dict[int, float]]) -> tuple[float, float]:
    if chart.stacked:
        return 0.0, max(sum(_finite(column.get(step)) for column in columns) for step in steps)
    values = [value for column in columns for value in column.values() if math.isfinite(value)]
    low, high = min(values), max(values)
    return (min(low, 0.0), max(high, 0.0)) if chart.zero else (low, high)


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that reach from at most ``low`` to at least ``high``."""
    if not high > low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / max(1, count - 1)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_words(value: float, step: float, share: bool) -> str:
    """A tick's value, with as many decimals as tell it from its neighbours at a distance of ``step``."""
    if share:
        value, step = 100 * value, 100 * step
    decimals = next((places for places in range(5) if math.isclose(round(step, places), step)), 5)
    text = f"{value:,.{decimals}f}" if decimals <= 4 else f"{value:g}"
    return f"{text}%" if share else text


def _lines(chart: Chart, across: Scale, up: Scale) -> list[Line]:
    drawn = []
    for place, (name, points) in enumerate(chart.series, start=1):
        parts = [list(group) for finite, group in groupby(points, lambda p: math.isfinite(p[1])) if finite]
        placed = [[(across(step), up(value)) for step, value in part] for part in parts]
        paths = ["M" + "L".join(f"{x:g} {y:g}" for x, y in part) for part in placed if len(part) > 1]
        few = len(points) <= MARKED
        dots = [dot for part in placed if few or len(part) == 1 for dot in part]
        drawn.append(Line(name, place, paths, dots, chart.words(points[-1][1])))
    return drawn


def _stack(chart: Chart, steps: list[int], columns: list[dict[int, float]], across: Scale, up: Scale) -> list[Line]:
    """A bar for each step, of the parts on top of each other."""
    gap = min((b - a for a, b in zip(steps, steps[1:], strict=False)), default=1)
    width = max(1.0, 0.8 * (WIDTH - LEFT - RIGHT) * gap / max(gap, across.high - across.low + gap))
    across.start, across.end = (
        LEFT + width / 2,
        WIDTH - RIGHT - width / 2,
    )  # cursor and ticks: in the middle of the bars
    bottoms = dict.fromkeys(steps, 0.0)
    drawn = []
    for place, ((name, _), column) in enumerate(zip(chart.series, columns, strict=True), start=1):
        bars = []
        for step in steps:
            value, foot = _finite(column.get(step)), bottoms[step]
            bottoms[step] = foot + value
            if value > 0:
                left, top, down = across(step) - width / 2, up(foot + value), up(foot)
                bars.append(f"M{left:.1f} {down:g}V{top:g}h{width:.1f}V{down:g}z")
        drawn.append(
            Line(name, place, ["".join(bars)] if bars else [], [], chart.words(_finite(column.get(steps[-1]))))
        )
    return drawn


def describe(chart: Chart) -> str:
    """Each series' first, last, least and greatest value, in a sentence."""
    said = []
    for name, points in chart.series:
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        if not finite:
            continue
        (first, start), (last, end) = finite[0], finite[-1]
        values = [value for _, value in finite]
        between = f"between {chart.words(min(values))} and {chart.words(max(values))}"
        said.append(f"{name}: {chart.words(start)} at step {first}, {chart.words(end)} at step {last}, {between}")
        if missing := len(points) - len(finite):
            said[-1] += f", not finite at {missing} steps"
    return f"{chart.title}, {chart.unit}. " + "; ".join(said) + "."
