"""Traced rollouts: what training wrote into a run's ``traces`` folder, the first and the last look at each row together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from opd_recipes.registry import RecipeError
from opd_recipes.report.palette import heat_level
from opd_recipes.report.words import token

#: Rollouts on a page unless another number is asked for, and tokens shown of each response.
ROLLOUTS, TOKENS = 24, 400
#: Alternatives shown for a token.
ALTERNATIVES = 5
#: Score from which an answer is right.
RIGHT = 0.5


@dataclass(frozen=True)
class Token:
    """One response token.

    Args:
        text: With its white space visible.
        breaks: Whether a line ends behind it.
        divergence: Nats; None where it was not written or not finite.
        heat: 0 to 5.
        facts: What the page shows of it on demand, as plain JSON values.
    """

    text: str
    breaks: bool
    divergence: float | None
    heat: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class Look:
    """A row's rollout at one step.

    Args:
        step: Training step.
        response: The whole text.
        tokens: At most :data:`TOKENS` of them.
        more_tokens: How many are not shown.
        right: Verdict; None: not scored.
        mean: Mean divergence of all its tokens, in nats; None without any.
    """

    step: int
    response: str
    tokens: list[Token]
    more_tokens: int
    right: bool | None
    mean: float | None


@dataclass(frozen=True)
class Rollout:
    """A traced row.

    Args:
        name: Its id.
        question, reference: Texts; the reference is None where the row has none.
        images: File name by view (``student``, ``teacher``, ``negative``), relative to the traces folder.
        box: Evidence in pixels of the original, whose size is ``original``; None where the row has none.
        before, after: The first look and the last; ``after`` is None where there is only one.
    """

    name: str
    question: str
    reference: str | None
    images: dict[str, str]
    box: tuple[float, float, float, float] | None
    original: tuple[float, float] | None
    before: Look
    after: Look | None

    @property
    def last(self) -> Look:
        return self.after or self.before

    @property
    def changed(self) -> bool:
        """Whether the verdict of the two looks differs."""
        return self.after is not None and self.before.right is not self.after.right


@dataclass(frozen=True)
class Traces:
    """Args:
    folder: With the files of the traces.
    rollouts: Those that the page shows.
    total: How many there are.
    odd_lines: Lines that could not be read.
    """

    folder: Path
    rollouts: list[Rollout]
    total: int
    odd_lines: int


@dataclass(frozen=True)
class _Place:
    """Where a row of the traces stands, and what decides whether it is shown."""

    name: str
    step: int
    right: bool | None
    file: Path
    offset: int


def read_traces(folder: Path, most: int = ROLLOUTS) -> Traces:
    """Read ``step_*.jsonl``. Where there are more rollouts than ``most``, those with another verdict come first."""
    first: dict[str, _Place] = {}
    last: dict[str, _Place] = {}
    odd = 0
    for file in sorted(folder.glob("step_*.jsonl")):
        status = file.stat()
        places, bad = _index(file, status.st_size, status.st_mtime_ns)
        odd += bad
        for place in places:
            if place.name not in first or place.step < first[place.name].step:
                first[place.name] = place
            if place.name not in last or place.step >= last[place.name].step:
                last[place.name] = place
    names = sorted(first, key=lambda name: not _changes(first[name], last[name]))[: max(0, most)]
    rollouts = [_rollout(_read(first[name]), _read(last[name])) for name in names]
    return Traces(folder, rollouts, len(first), odd)


@cache  # traces of a long run are gigabytes: a watched run's finished files are gone through once
def _index(file: Path, size: int, modified: int) -> tuple[list[_Place], int]:
    """Places of a file's rows, and how many lines are none; one that is still being written is neither."""
    places, odd, offset = [], 0, 0
    with file.open("rb") as lines:
        for line in lines:
            raw = _row(line)
            if raw is not None:
                places.append(_Place(str(raw["id"]), raw["step"], _right(raw), file, offset))
            elif line.endswith(b"\n"):
                odd += 1
            offset += len(line)
    return places, odd


def _read(place: _Place) -> dict[str, Any]:
    with place.file.open("rb") as lines:
        lines.seek(place.offset)
        raw = _row(lines.readline())
    if raw is None:
        raise RecipeError(f"{place.file} has changed while it was read; run the command again")
    return raw


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        raw = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    fits = isinstance(raw, dict) and "id" in raw and isinstance(raw.get("step"), int)
    return raw if fits and isinstance(raw.get("tokens"), list) else None


def _changes(first: _Place, last: _Place) -> bool:
    return first.step != last.step and first.right is not last.right


def _right(raw: dict[str, Any]) -> bool | None:
    score = finite(raw.get("score"))
    return None if score is None else score >= RIGHT


def _rollout(first: dict[str, Any], last: dict[str, Any]) -> Rollout:
    images = {view: last.get(f"{view}_image") for view in ("student", "teacher", "negative")}
    reference = last.get("reference")
    return Rollout(
        name=str(last["id"]),
        question=str(last.get("question", "")),
        reference=None if reference is None else str(reference),
        images={view: name for view, name in images.items() if isinstance(name, str) and name},
        box=_numbers(last.get("bbox"), 4),  # type: ignore[arg-type]
        original=_numbers(last.get("original_size"), 2),  # type: ignore[arg-type]
        before=_look(first),
        after=_look(last) if last["step"] != first["step"] else None,
    )


def _numbers(value: Any, count: int) -> tuple[float, ...] | None:
    numbers = [finite(x) for x in value] if isinstance(value, list) else []
    return tuple(x for x in numbers if x is not None) if len(numbers) == count and None not in numbers else None


def _look(raw: dict[str, Any]) -> Look:
    rows = [row for row in raw["tokens"] if isinstance(row, dict)]
    known = [nats for nats in (finite(row.get("divergence")) for row in rows) if nats is not None]
    return Look(
        step=raw["step"],
        response=str(raw.get("response", "")),
        tokens=[_token(row) for row in rows[:TOKENS]],
        more_tokens=max(0, len(rows) - TOKENS),
        right=_right(raw),
        mean=sum(known) / len(known) if known else None,
    )


def _token(row: dict[str, Any]) -> Token:
    nats = finite(row.get("divergence"))
    text = str(row.get("text", ""))
    facts = {
        "id": row.get("id") if isinstance(row.get("id"), int) else None,
        "divergence": _short(nats),
        "weight": _short(finite(row.get("weight"))),
        "entropy": _short(finite(row.get("entropy"))),
        "student": _probability(row.get("student_logp")),
        "teacher": _probability(row.get("teacher_logp")),
        "students": alternatives(row.get("student_top")),
        "teachers": alternatives(row.get("teacher_top")),
    }
    return Token(token(text), text.endswith("\n"), nats, heat_level(nats), facts)


def _probability(log_probability: Any) -> float | None:
    value = finite(log_probability)
    return None if value is None else _short(math.exp(min(value, 0.0)))


def alternatives(pairs: Any) -> list[tuple[str, float]]:
    """(visible text, probability) of the likeliest tokens, descending; what has another form is left out."""
    found = []
    for pair in pairs if isinstance(pairs, list) else []:
        if isinstance(pair, list) and len(pair) == 2 and (value := finite(pair[1])) is not None:
            found.append((token(pair[0]), float(f"{value:.4g}")))
    return sorted(found, key=lambda pair: -pair[1])[:ALTERNATIVES]


def finite(value: Any) -> float | None:
    """The number that a JSON value is, if it is one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _short(value: float | None) -> float | None:
    """To four significant digits: the page holds many of them."""
    return None if value is None else float(f"{value:.4g}")


def all_facts(rollouts: Iterable[Rollout]) -> list[list[Sequence[dict[str, Any]]]]:
    """Facts of the tokens of each look of each rollout, in the order of the page."""
    return [[[t.facts for t in look.tokens] for look in (r.before, r.after) if look is not None] for r in rollouts]
