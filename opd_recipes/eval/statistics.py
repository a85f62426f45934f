"""How sure the numbers are: bootstrap intervals, and paired comparison of two sets of replies to the same questions.

Groups are drawn, not questions: the two of a pair, the four orders of one question, the questions of one picture rise and
fall together. Only how often each distinct tally is drawn matters, so that a draw is one multinomial sample, whatever
the number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from opd_recipes.eval.benchmarks import Benchmark
from opd_recipes.eval.question import Reply, Scores
from opd_recipes.eval.scores import grouped
from opd_recipes.registry import RecipeError

#: Draws at a time, times distinct tallies: bounds the memory.
CELLS = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A number and between what it lies. None: it does not exist; ``low`` and ``high`` are also None where the draws say
    nothing: fewer than two groups, or all alike."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Comparison:
    """Two sets of replies, ``a`` and ``b``, to the same ``n`` questions. Differences are b - a.

    Attributes:
        a, b: Their scores.
        differences: By number (``overall``, ``<kind>/<category>``, ``extra/<name>``): difference with its interval.
        p: Two-sided bootstrap p-value of the overall difference; None where there is none.
        both, only_a, only_b, neither: Questions that are right in both, in one, in none. Undecided is not right.
        p_mcnemar: Exact two-sided McNemar test (binomial, McNemar 1947) on ``only_a`` and ``only_b``. It takes questions
            as independent, which pairs and cycles are not.
    """

    n: int
    a: Scores
    b: Scores
    differences: dict[str, Interval]
    p: float | None
    both: int
    only_a: int
    only_b: int
    neither: int
    p_mcnemar: float
    level: float = 0.95
    draws: int = 0
    seed: int = 0
    groups: int = field(default=0)

    @property
    def difference(self) -> Interval:
        return self.differences["overall"]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "a": self.a.to_json(), "b": self.b.to_json()}


def intervals(
    benchmark: Benchmark, replies: Sequence[Reply], *, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> dict[str, Interval]:
    """Percentile bootstrap intervals (Efron 1979) of every number of a benchmark.

    Args:
        level: Share of the draws inside.
        draws: Their number.
        seed: The same seed gives the same intervals, whatever the order of the replies.

    Returns:
        By name: ``overall``, ``<kind>/<category>``, ``extra/<name>``.
    """
    names, table = _tallies(benchmark, replies)
    value = benchmark.scoring.values(dict(zip(names, table.sum(axis=0), strict=True)))
    drawn = _draw(benchmark, names, [table], draws, seed, list(value))
    return {name: _interval(value[name], drawn[name][0], level) for name in value}


def compare(
    benchmark: Benchmark,
    a: Sequence[Reply],
    b: Sequence[Reply],
    *,
    level: float = 0.95,
    draws: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Compare two sets of replies to the same questions: the same groups are drawn for both.

    Raises:
        RecipeError: The questions differ, or their answers do; the message says which.
    """
    pairs = _paired(a, b)
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    names, both_tables = _joint_tallies(benchmark, a, b)
    sums = [dict(zip(names, table.sum(axis=0), strict=True)) for table in both_tables]
    first, second = (benchmark.scoring.values(one) for one in sums)
    drawn = _draw(benchmark, names, both_tables, draws, seed, list(first))
    differences = {
        name: _interval(second[name] - first[name], drawn[name][1] - drawn[name][0], level) for name in first
    }
    right = [(x.correct is True, y.correct is True) for x, y in pairs]
    only_a, only_b = right.count((True, False)), right.count((False, True))
    return Comparison(
        n=len(pairs),
        a=benchmark.score(a),
        b=benchmark.score(b),
        differences=differences,
        p=_p_value(drawn["overall"][1] - drawn["overall"][0]),
        both=right.count((True, True)),
        only_a=only_a,
        only_b=only_b,
        neither=right.count((False, False)),
        p_mcnemar=mcnemar(only_a, only_b),
        level=level,
        draws=draws,
        seed=seed,
        groups=len(both_tables[0]),
    )


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value: twice the binomial tail of the rarer kind, at a chance of one half."""
    n, k = only_a + only_b, min(only_a, only_b)
    term = total = 1
    for i in range(k):
        term = term * (n - i) // (i + 1)
        total += term
    return min(1.0, 2 * total / 2**n)


def _paired(a: Sequence[Reply], b: Sequence[Reply]) -> list[tuple[Reply, Reply]]:
    sides = []
    for name, replies in (("first", a), ("second", b)):
        by_id = {reply.question.id: reply for reply in replies}
        if len(by_id) != len(replies):
            raise RecipeError(
                f"the {name} set has {len(replies)} replies to {len(by_id)} questions: some are there twice"
            )
        sides.append(by_id)
    left, right = sides
    if left.keys() != right.keys():
        raise RecipeError(
            "only replies to the same questions can be compared; "
            + "; ".join(_only(n, x.keys() - y.keys()) for n, x, y in (("first", left, right), ("second", right, left)))
        )
    if not left:
        raise RecipeError("there is no reply to compare")
    changed = [name for name in left if left[name].question.answer != right[name].question.answer]
    if changed:
        raise RecipeError(f"question {changed[0]!r} (and {len(changed) - 1} more) has another answer in the second set")
    return [(left[name], right[name]) for name in sorted(left)]


def _only(name: str, ids: set[str]) -> str:
    shown = ", ".join(sorted(ids)[:5]) + (", ..." if len(ids) > 5 else "")
    return f"{len(ids)} are only in the {name} set" + (f": {shown}" if ids else "")


def _tallies(benchmark: Benchmark, replies: Sequence[Reply]) -> tuple[list[str], np.ndarray]:
    """Names of the counts, and the counts: (groups, names)."""
    rows = [benchmark.scoring.tally(group) for group in grouped(replies).values()]
    names = sorted({name for row in rows for name in row})
    return names, np.array([[row.get(name, 0) for name in names] for row in rows], dtype=float).reshape(-1, len(names))


def _joint_tallies(benchmark: Benchmark, a: Sequence[Reply], b: Sequence[Reply]) -> tuple[list[str], list[np.ndarray]]:
    """As :func:`_tallies`, of both sets under the same names and over the same groups."""
    groups_a = grouped(a)
    position = {reply.question.id: name for name, group in groups_a.items() for reply in group}
    groups_b: dict[str, list[Reply]] = {name: [] for name in groups_a}
    for reply in b:  # the first set says which questions belong together
        groups_b[position[reply.question.id]].append(reply)
    rows = [[benchmark.scoring.tally(group) for group in groups.values()] for groups in (groups_a, groups_b)]
    names = sorted({name for side in rows for row in side for name in row})
    return names, [np.array([[row.get(name, 0) for name in names] for row in side], dtype=float) for side in rows]


def _draw(
    benchmark: Benchmark,
    names: Sequence[str],
    tables: Sequence[np.ndarray],
    draws: int,
    seed: int,
    wanted: Sequence[str],
) -> dict[str, list[np.ndarray]]:
    """The wanted numbers of each table in each draw: by name, one array of ``draws`` for each table."""
    joined = np.concatenate(tables, axis=1)
    distinct, counts = np.unique(joined, axis=0, return_counts=True)
    rng = np.random.default_rng(seed)
    parts: dict[str, list[list[np.ndarray]]] = {name: [[] for _ in tables] for name in wanted}
    step = max(1, CELLS // max(1, len(distinct)))
    for start in range(0, draws, step):
        size = min(step, draws - start)
        times = rng.multinomial(counts.sum(), counts / max(1, counts.sum()), size=size)
        for i, sums in enumerate(np.split(times @ distinct, len(tables), axis=1)):
            value = benchmark.scoring.values(dict(zip(names, sums.T, strict=True)))
            for name in wanted:
                parts[name][i].append(np.broadcast_to(np.asarray(value[name], dtype=float), (size,)))
    return {name: [np.concatenate(one) for one in part] for name, part in parts.items()}


def _interval(value: Any, drawn: np.ndarray, level: float) -> Interval:
    value, drawn = float(value), drawn[np.isfinite(drawn)]
    if not np.isfinite(value):
        return Interval(None, None, None)
    if len(drawn) == 0 or drawn.min() == drawn.max():
        return Interval(value, None, None)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def _p_value(differences: np.ndarray) -> float | None:
    """Twice the smaller share of draws on either side of 0, 0 counted on both; at least 2 / (draws + 1)."""
    drawn = differences[np.isfinite(differences)]
    if len(drawn) == 0:
        return None
    below, above = ((drawn <= 0).sum() + 1) / (len(drawn) + 1), ((drawn >= 0).sum() + 1) / (len(drawn) + 1)
    return float(min(1.0, 2 * min(below, above)))
