"""Intervals and paired comparisons, against closed forms, scipy where it is installed, and coverage on synthetic data."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from opd_recipes.eval.benchmarks import BENCHMARKS, Reply
from opd_recipes.eval.statistics import Interval, compare, intervals, mcnemar
from opd_recipes.registry import RecipeError
from tests.unit.eval_fixtures import reply

CUSTOM = BENCHMARKS["custom"]


def questions(verdicts: Sequence[bool | None], size: int = 1) -> list[Reply]:
    """Each ``size`` neighbours are one group."""
    return [reply(v, id=str(i), group=f"g{i // size}", size="all") for i, v in enumerate(verdicts)]


def test_the_interval_of_an_accuracy_is_that_of_a_binomial_share():
    got = intervals(CUSTOM, questions([True] * 60 + [False] * 40), draws=40_000)["overall"]
    assert got.value == 0.6
    # Quantiles of Binomial(100, 0.6) / 100, from its exact distribution.
    probability = np.array([_binomial(100, k, 0.6) for k in range(101)]).cumsum()
    low, high = (np.searchsorted(probability, q) / 100 for q in (0.025, 0.975))
    assert (got.low, got.high) == (pytest.approx(low, abs=0.011), pytest.approx(high, abs=0.011))


def _binomial(n: int, k: int, p: float) -> float:
    from math import comb

    return comb(n, k) * p**k * (1 - p) ** (n - k)


def test_groups_are_drawn_not_questions():
    """Ten groups of ten alike questions are ten facts: the interval is sqrt(10) times as wide as for a hundred."""
    verdicts = [True] * 50 + [False] * 50
    alone, together = (intervals(CUSTOM, questions(verdicts, size))["overall"] for size in (1, 10))
    assert alone.value == together.value == 0.5
    assert (together.high - together.low) / (alone.high - alone.low) == pytest.approx(np.sqrt(10), rel=0.1)


def test_draws_depend_on_the_seed_alone_not_on_the_order_of_replies():
    replies = questions([True, False, True, True, False, True], 2)
    first = intervals(CUSTOM, replies, draws=500, seed=3)
    assert intervals(CUSTOM, replies[::-1], draws=500, seed=3) == first
    assert intervals(CUSTOM, replies, draws=500, seed=4) != first


def test_every_number_of_a_benchmark_has_an_interval():
    replies = [
        reply(i % 3 > 0, id=f"{s}{a}{i}", kind="yes_no", answer=a, value="yes", split=s)
        for s in ("random", "popular")
        for a in ("yes", "no")
        for i in range(9)
    ]
    got = intervals(BENCHMARKS["pope"], replies, draws=200)
    scores = BENCHMARKS["pope"].score(replies)
    assert got["overall"].value == pytest.approx(scores.overall)
    assert got["split/popular"].value == pytest.approx(scores.categories["split"]["popular"].value)
    assert {name for name in got if name.startswith("extra/")} == {f"extra/{name}" for name in scores.extra}
    assert all(i.low <= i.value <= i.high for name, i in got.items() if i.low is not None and "undecided" not in name)


def test_where_draws_say_nothing_there_is_no_interval_rather_than_one_without_width():
    assert intervals(CUSTOM, questions([True] * 5))["overall"] == Interval(1.0, None, None)
    assert intervals(CUSTOM, questions([True, False], size=2))["overall"] == Interval(0.5, None, None)
    missing = intervals(BENCHMARKS["cv-bench"], [reply(True, id="1", source="COCO", type="2D")])
    assert missing["overall"] == Interval(None, None, None)
    json.dumps({name: vars(interval) for name, interval in missing.items()}, allow_nan=False)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """400 experiments of 30 pairs that are right with probability 0.7, both or none: 95% of the intervals should hold it."""
    rng, held = np.random.default_rng(0), 0
    for experiment in range(400):
        right = np.repeat(rng.random(30) < 0.7, 2)
        got = intervals(CUSTOM, questions([bool(v) for v in right], 2), draws=400, seed=experiment)["overall"]
        held += got.low is not None and got.low <= 0.7 <= got.high
    assert 0.90 <= held / 400 <= 0.98


# Comparison


def both(pairs: Sequence[tuple[bool | None, bool | None]], size: int = 1) -> tuple[list[Reply], list[Reply]]:
    return questions([a for a, _ in pairs], size), questions([b for _, b in pairs], size)


TEN = [(True, True)] * 4 + [(True, False)] + [(False, True)] * 3 + [(False, None), (None, False)]


def test_a_comparison_counts_the_four_cases_and_tests_those_that_differ():
    got = compare(CUSTOM, *both(TEN))
    assert (got.both, got.only_a, got.only_b, got.neither) == (4, 1, 3, 2)
    assert (got.a.overall, got.b.overall, got.difference.value) == (0.5, 0.7, pytest.approx(0.2))
    assert got.p_mcnemar == pytest.approx(2 * (1 + 4) / 16), "2 (C(4,0) + C(4,1)) / 2^4"
    assert (got.a.undecided, got.b.undecided, got.n, got.groups) == (1, 1, 10, 10)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"), [(0, 0, 1.0), (0, 5, 2 / 32), (3, 3, 1.0), (1, 8, 2 * 10 / 512), (8, 1, 2 * 10 / 512)]
)
def test_mcnemar_is_exact(only_a, only_b, p):
    assert mcnemar(only_a, only_b) == pytest.approx(p)


@pytest.mark.parametrize(("only_a", "only_b"), [(2, 9), (40, 70), (480, 560), (5000, 5100), (900, 1200)])
def test_mcnemar_agrees_with_scipy_also_for_many_questions(only_a, only_b):
    stats = pytest.importorskip("scipy.stats")
    assert mcnemar(only_a, only_b) == pytest.approx(stats.binomtest(only_a, only_a + only_b, 0.5).pvalue, rel=1e-6)


def test_the_difference_is_paired_so_that_what_both_have_in_common_does_not_widen_it():
    """b is a with 20 questions more right, of 400 half of which are hard: sd sqrt(0.05 * 0.95 / 400) = 0.0109."""
    verdicts = [(i % 2 == 0, i % 2 == 0 or i < 40) for i in range(400)]
    got = compare(CUSTOM, *both(verdicts), draws=20_000).difference
    assert got.value == pytest.approx(0.05)
    assert (got.high - got.low) / (2 * 1.96) == pytest.approx(0.0109, rel=0.05)
    alone = intervals(CUSTOM, both(verdicts)[0])["overall"]
    assert alone.high - alone.low > 2 * (got.high - got.low)


def test_a_comparison_draws_the_same_groups_for_both():
    got = compare(CUSTOM, *both([(True, True), (False, False)] * 20, 2))
    assert got.difference == Interval(0.0, None, None), "no draw can make them differ"
    assert got.p == 1.0


def test_the_bootstrap_p_value_is_small_where_all_draws_agree_and_large_where_they_do_not():
    clear = compare(CUSTOM, *both([(False, True)] * 30 + [(True, True)] * 30), draws=2000)
    assert clear.p == pytest.approx(2 / 2001)
    assert clear.difference.low > 0
    even = compare(CUSTOM, *both([(False, True)] * 10 + [(True, False)] * 10), draws=2000)
    assert even.p > 0.9 and even.difference.low < 0 < even.difference.high


def test_two_models_of_the_same_skill_are_told_apart_about_as_often_as_chance_has_it():
    rng, found = np.random.default_rng(1), 0
    for experiment in range(200):
        pairs = [(bool(a), bool(b)) for a, b in rng.random((60, 2)) < 0.6]
        found += compare(CUSTOM, *both(pairs), draws=400, seed=experiment).p < 0.05
    assert found / 200 <= 0.10


def test_categories_are_compared_as_well_and_the_result_is_json():
    first = [reply(v, id=f"{t}{i}", task=t) for t in ("x", "y") for i, v in enumerate([True, False, False, True])]
    second = [reply(v, id=f"{t}{i}", task=t) for t in ("x", "y") for i, v in enumerate([True, t == "x", False, True])]
    got = compare(BENCHMARKS["vstar"], first, second)
    assert got.differences["task/x"].value == 0.25 and got.differences["task/y"].value == 0.0
    told = json.loads(json.dumps(got.to_json(), allow_nan=False))
    assert told["differences"]["task/x"]["value"] == 0.25 and told["a"]["overall"] == 0.5


def test_the_order_of_the_replies_does_not_matter_only_their_ids():
    a, b = both(TEN)
    assert compare(CUSTOM, a, b[::-1], draws=200) == compare(CUSTOM, a, b, draws=200)


def test_other_questions_are_refused_and_named():
    a, b = both(TEN)
    with pytest.raises(RecipeError, match="2 are only in the first set: 8, 9; 0 are only in the second set"):
        compare(CUSTOM, a, b[:-2])


def test_a_question_whose_answer_changed_or_that_is_there_twice_is_refused():
    a, b = both(TEN)
    with pytest.raises(RecipeError, match="question '0' .and 0 more. has another answer"):
        compare(CUSTOM, a, [reply(True, id="0", group="g0", size="all", answer="B"), *b[1:]])
    with pytest.raises(RecipeError, match="the second set has 11 replies to 10 questions"):
        compare(CUSTOM, a, [*b, b[0]])


def test_a_large_benchmark_takes_a_second_not_a_minute():
    """25,000 questions in 60 categories, as MME-RealWorld has them."""
    import time

    rng = np.random.default_rng(0)
    replies = [
        reply(bool(v), id=str(i), task=("Perception", "Reasoning")[i % 2], category=f"c{i % 60}")
        for i, v in enumerate(rng.random(25_000) < 0.5)
    ]
    started = time.process_time()
    intervals(BENCHMARKS["mme-realworld-en"], replies, draws=10_000)
    assert time.process_time() - started < 10
