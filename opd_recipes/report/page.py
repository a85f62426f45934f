"""From a run's folder to one HTML file that loads nothing.

Whatever comes from a run (names, texts, tokens, pictures) reaches the page as escaped text, as JSON in a data block that no
browser runs, or as a picture encoded here. The page's policy admits its own style and script by their hashes and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from opd_recipes.registry import RecipeError
from opd_recipes.report import palette
from opd_recipes.report.accuracy import WORDS, accuracies
from opd_recipes.report.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Drawing, draw
from opd_recipes.report.checks import Alert, alerts_of
from opd_recipes.report.curves import charts_of
from opd_recipes.report.picture import SIDE, Picture, pictures_of
from opd_recipes.report.reading import TRACES, Run, read_run
from opd_recipes.report.settings import Settings, settings_of
from opd_recipes.report.traces import ROLLOUTS, TOKENS, Traces, all_facts, read_traces
from opd_recipes.report.words import number, percent, points, printable


@dataclass(frozen=True)
class Fact:
    """A number at the top of the page."""

    name: str
    value: str
    more: str = ""


@dataclass(frozen=True)
class Report:
    """All that a page says.

    Args:
        run: What was read.
        facts: The numbers at the top.
        alerts: Warnings.
        drawings: Charts.
        settings: Differences to the paper's recipe.
        traces: Rollouts; None where none were traced.
        pictures: Of each rollout.
        written: When.
    """

    run: Run
    facts: list[Fact]
    alerts: list[Alert]
    drawings: list[Drawing]
    settings: Settings
    traces: Traces | None
    pictures: list[list[Picture]]
    written: datetime = field(default_factory=lambda: datetime.now(UTC))


def build(folder: Path, metrics: Sequence[Path] = (), rollouts: int = ROLLOUTS) -> Report:
    """Read and judge a run.

    Args:
        folder: Of the run.
        metrics: Metrics files that are elsewhere, the oldest first.
        rollouts: Most traced rollouts.

    Raises:
        RecipeError: It cannot be read.
    """
    run = read_run(folder, metrics)
    span = min(run.metrics), max(run.metrics)
    traced = (folder / TRACES).is_dir()
    traces = read_traces(folder / TRACES, rollouts) if traced else None
    return Report(
        run=run,
        facts=list(_facts(run)),
        alerts=alerts_of(run),
        drawings=[draw(chart, span) for chart in charts_of(run)],
        settings=settings_of(run),
        traces=traces if traces and traces.total else None,
        pictures=[pictures_of(rollout, traces) for rollout in traces.rollouts] if traces else [],
    )


def _facts(run: Run):
    for found in accuracies(run):
        for view, series in found.views.items():
            (_, before), (_, after) = series[0], series[-1]
            change = (
                f"{points(after - before)} since step {series[0][0]}" if len(series) > 1 else f"at step {series[0][0]}"
            )
            name = f"Accuracy{found.of}, {WORDS.get(view, view)}"
            yield Fact(name, f"{percent(before)} → {percent(after)}" if len(series) > 1 else percent(after), change)
        if gap := found.gap:
            closed = "" if found.closed is None else f"{found.closed:.0%} closed by the student"
            shown = f"{100 * gap[-1][1]:.1f} points"
            yield Fact(f"Gap{found.of}", f"{100 * gap[0][1]:.1f} → {shown}" if len(gap) > 1 else shown, closed)
    for name, key, unit in (
        ("Divergence", "opd/divergence", "nats per token"),
        ("Teacher tokens", "opd/teacher_tokens", "mean of a step"),
        ("Time of a step", "timing_s/step", "median, without the first"),
    ):
        values = [value for _, value in run.finite(key)]
        if not values:
            continue
        if name == "Divergence":
            yield Fact(
                name, f"{number(values[0])} → {number(values[-1])}" if len(values) > 1 else number(values[0]), unit
            )
        elif name == "Teacher tokens":
            yield Fact(name, number(sum(values) / len(values)), unit)
        else:
            rest = sorted(values[1:] or values)
            yield Fact(name, f"{number(rest[len(rest) // 2])} s", unit if len(values) > 1 else "of the first one")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("opd_recipes.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "percent": percent, "printable": printable}
    return environment


@cache
def _asset(name: str) -> str:
    return (files("opd_recipes.report") / "templates" / name).read_text(encoding="utf-8")


def render(report: Report, refresh: float | None = None) -> str:
    """The HTML of a page.

    Args:
        refresh: Seconds after which the page loads itself again; None: never.
    """
    style, script = palette.css() + _asset("page.css"), _asset("page.js")
    return (
        _environment()
        .get_template("page.html")
        .render(
            report=report,
            run=report.run,
            refresh=refresh,
            policy=policy(style, script),
            style=Markup(style),
            script=Markup(script),
            data=data_block({"tokens": all_facts(report.traces.rollouts) if report.traces else []}),
            frame={
                "width": WIDTH,
                "height": HEIGHT,
                "left": LEFT,
                "right": WIDTH - RIGHT,
                "top": TOP,
                "bottom": HEIGHT - BOTTOM,
            },
            heat=palette.HEAT,
            side=SIDE,
            most_tokens=TOKENS,
        )
    )


def policy(style: str, script: str) -> str:
    """The Content-Security-Policy: nothing is loaded; this style and this script alone are used."""

    def digest(source: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; img-src data:; style-src {digest(style)}; script-src {digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


def data_block(data: Any) -> Markup:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def write(report: Report, out: Path, refresh: float | None = None) -> int:
    """Write a page in one go, so that nobody reads half of it; its size in bytes.

    Raises:
        RecipeError: It cannot be written there, or would take the place of something that is no page.
    """
    content = render(report, refresh).encode("utf-8", "replace")
    unfinished = out.with_name(f"{out.name}.new")
    try:
        if out.exists() and not out.read_bytes()[:100].lower().startswith(b"<!doctype html"):
            raise RecipeError(f"{out} exists and is no HTML page; name another file with --out")
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(content)
        unfinished.replace(out)
    except OSError as error:
        raise RecipeError(
            f"{out} cannot be written: {error.strerror or error}; name another file with --out"
        ) from error
    return len(content)
