"""Each benchmark's numbers, from verdicts, by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from opd_recipes.eval import extraction
from opd_recipes.eval.benchmarks import BENCHMARKS, Question, Reply, Scores
from opd_recipes.eval.extraction import Extracted
from tests.unit.eval_fixtures import reply


def score(name: str, replies: Sequence[Reply]) -> Scores:
    return BENCHMARKS[name].score(replies)


def several(verdicts: str, **where: str) -> list[Reply]:
    """``+`` right, ``-`` wrong, ``?`` undecided."""
    return [reply({"+": True, "-": False, "?": None}[v], id=f"{where}{i}", **where) for i, v in enumerate(verdicts)]


def test_vstar_is_the_accuracy_over_all_questions_and_per_task():
    scores = score("vstar", several("++-", task="direct_attributes") + several("+-----?", task="relative_position"))
    assert scores.overall == 3 / 10, "not the mean of the two tasks"
    assert scores.categories["task"]["direct_attributes"].value == 2 / 3
    assert scores.categories["task"]["relative_position"].value == 1 / 7
    assert scores.categories["task"]["relative_position"].n == 7


def test_undecided_counts_as_wrong_and_is_counted_on_its_own():
    scores = score("vstar", several("+???", task="direct_attributes"))
    assert (scores.overall, scores.n, scores.undecided) == (1 / 4, 4, 3)
    assert scores.categories["task"]["direct_attributes"].undecided == 3


def hrbench(verdicts: dict[str, str], task: str = "single") -> list[Reply]:
    """One question for each entry, with a verdict for each order of its options."""
    return [
        reply(v == "+", id=f"{task}{name}{cycle}", group=f"{task}{name}", task=task, cycle=str(cycle))
        for name, row in verdicts.items()
        for cycle, v in enumerate(row)
    ]


def test_hrbench_averages_the_four_orders_and_tells_what_is_right_in_all_of_them():
    scores = score("hrbench-4k", hrbench({"p": "++++", "q": "+--+"}) + hrbench({"r": "-+--"}, "cross"))
    assert scores.overall == pytest.approx((2 / 3 + 2 / 3 + 1 / 3 + 2 / 3) / 4)
    assert scores.categories["task"]["single"].value == 6 / 8
    assert scores.categories["task"]["cross"].value == 1 / 4
    assert scores.categories["cycle"]["2"].value == 1 / 3
    assert scores.extra == {"right in all four orders": 1 / 3}


def test_hrbench_orders_weigh_the_same_when_some_are_missing_and_incomplete_questions_are_not_all_right():
    scores = score("hrbench-4k", hrbench({"p": "++++", "q": "-"}))
    assert scores.overall == pytest.approx((1 / 2 + 1 + 1 + 1) / 4)
    assert scores.extra == {"right in all four orders": 1.0}, "of the one question that was asked in all four"


def test_mme_realworld_is_the_accuracy_over_all_with_the_mean_of_both_tasks_beside_it():
    perception = [
        reply(True, id="1", task="Perception", domain="Perception/Monitoring", value="E", answer="E"),
        reply(False, id="2", task="Perception", domain="Perception/Monitoring", value="E"),
        reply(True, id="3", task="Perception", domain="Perception/Remote Sensing", value="A"),
    ]
    scores = score(
        "mme-realworld-lite", [*perception, reply(None, id="4", task="Reasoning", domain="Reasoning/Monitoring")]
    )
    assert scores.overall == 2 / 4
    assert scores.categories["domain"]["Perception/Monitoring"].value == 1 / 2
    assert scores.extra == {"mean of Perception and Reasoning": (2 / 3 + 0) / 2, "answered E (not in the image)": 2 / 4}


def mmvp(*pairs: str, first: int = 1) -> list[Reply]:
    return [
        reply(
            v == "+", id=f"{number}{i}", group=f"pair {number}", answer="AB"[i], value="AB"[i] if v == "+" else "BA"[i]
        )
        for number, pair in enumerate(pairs, first)
        for i, v in enumerate(pair)
    ]


def test_mmvp_scores_pairs_not_questions():
    scores = score("mmvp", mmvp("++", "+-", "-+", "++"))
    assert scores.overall == 2 / 4, "per question it would be 6/8"
    assert scores.extra["accuracy per question"] == 6 / 8


def test_half_a_pair_is_no_pair():
    assert score("mmvp", mmvp("++", "+")).overall == 1.0
    assert math.isnan(score("mmvp", mmvp("+")).overall)


def test_mmvp_tells_what_the_reported_corrections_of_its_key_change():
    scores = score("mmvp", mmvp("--", "++", first=50))
    assert scores.overall == 1 / 2
    assert scores.extra["pairs right with the reported corrections"] == 1.0, "pair 50 has its answers exchanged"
    assert score("mmvp", mmvp("++", first=140)).extra["pairs right with the reported corrections"] == 0.0


def cv_bench(**verdicts: str) -> list[Reply]:
    kinds = {"ADE20K": "2D", "COCO": "2D", "Omni3D": "3D"}
    return [r for source, v in verdicts.items() for r in several(v, source=source, type=kinds[source])]


def test_cv_bench_is_the_mean_of_two_means():
    scores = score("cv-bench", cv_bench(ADE20K="+---", COCO="+-", Omni3D="+++-"))
    assert scores.categories["type"]["2D"].value == (1 / 4 + 1 / 2) / 2
    assert scores.categories["type"]["3D"].value == 3 / 4
    assert scores.overall == ((1 / 4 + 1 / 2) / 2 + 3 / 4) / 2
    assert scores.extra["accuracy over all questions"] == 5 / 10


def test_a_mean_without_one_of_its_parts_is_no_number_rather_than_another_one():
    scores = score("cv-bench", cv_bench(ADE20K="+", COCO="+"))
    assert math.isnan(scores.overall) and scores.categories["type"]["2D"].value == 1.0
    assert scores.to_json()["overall"] is None
    assert "NaN" not in json.dumps(scores.to_json())


SIX = [
    "coarse perception",
    "fine-grained perception",
    "instance reasoning",
    "logical reasoning",
    "science & technology",
]


def test_mmstar_is_the_accuracy_over_all_with_the_mean_of_the_six_beside_it():
    replies = [r for name in SIX for r in several("+", category=name)] + several("+---", category="math")
    scores = score("mmstar", replies)
    assert scores.overall == 6 / 9
    assert scores.extra == {"mean of the six core capabilities": pytest.approx((5 + 1 / 4) / 6)}


def test_visualprobe_is_told_by_difficulty():
    verdicts = {"easy": "+", "medium": "+-", "hard": "----"}
    scores = score("visualprobe", [r for name, v in verdicts.items() for r in several(v, difficulty=name)])
    assert scores.overall == 2 / 7
    assert scores.extra == {"mean of easy, medium and hard": (1 + 1 / 2 + 0) / 3}


def pope(answer: str, said: str | None, n: int = 1, split: str = "random") -> list[Reply]:
    right = None if said is None else said == answer
    return [
        reply(right, id=f"{split}{answer}{said}{i}", kind="yes_no", answer=answer, value=said, split=split)
        for i in range(n)
    ]


def test_pope_is_the_f1_of_yes_with_precision_recall_and_yes_ratio():
    replies = pope("yes", "yes", 6) + pope("yes", "no", 2) + pope("no", "yes", 3) + pope("no", "no", 5)
    scores = score("pope", replies)
    assert scores.overall == pytest.approx(2 * (6 / 9) * (6 / 8) / (6 / 9 + 6 / 8))
    assert scores.extra["accuracy"] == 11 / 16
    assert scores.extra["precision"] == 6 / 9
    assert scores.extra["recall"] == 6 / 8
    assert scores.extra["yes-ratio"] == 9 / 16
    assert scores.extra["undecided"] == 0


def test_pope_is_told_by_split_and_overall_over_all_of_them_together():
    replies = pope("yes", "yes", 2) + pope("no", "yes", 1, "popular") + pope("yes", "yes", 1, "popular")
    scores = score("pope", replies)
    assert scores.categories["split"]["random"].value == 1.0
    assert scores.categories["split"]["popular"].value == pytest.approx(2 / 3)
    assert scores.overall == pytest.approx(2 * 3 / (4 + 3))
    assert scores.extra["popular: precision"] == 1 / 2
    assert "adversarial: precision" not in scores.extra


def test_an_undecided_reply_is_no_yes_it_lowers_recall_and_accuracy_and_is_shown():
    scores = score("pope", pope("yes", "yes", 3) + pope("yes", None, 1) + pope("no", None, 1) + pope("no", "no", 3))
    assert scores.undecided == 2
    assert scores.extra["recall"] == 3 / 4
    assert scores.extra["precision"] == 1.0
    assert scores.extra["accuracy"] == 6 / 8
    assert scores.extra["undecided"] == 2 / 8
    assert scores.overall == pytest.approx(6 / 7)


def test_nothing_asked_is_no_number():
    for name, benchmark in BENCHMARKS.items():
        scores = benchmark.score([]).to_json()
        assert (name, scores["overall"], scores["n"]) == (name, None, 0)


# Reading a reply


def test_a_reply_is_read_by_the_rules_of_its_kind(monkeypatch):
    """Which rules those are is told in the extraction's own tests."""
    asked = []

    def rules(kind):
        def extract(text, *options, **how):
            asked.append((kind, options, how))
            return Extracted(text, "rule", "")

        return extract

    for kind in ("choice", "yes_no", "number", "short"):
        monkeypatch.setattr(extraction, kind, rules(kind))
    monkeypatch.setattr(extraction, "matches_number", lambda *numbers: numbers == ("3", "4", 0.5))
    monkeypatch.setattr(extraction, "matches_text", lambda value, answers: value in answers)
    read = BENCHMARKS["custom"].read
    options = {"A": "red", "B": "blue"}
    assert read(Question("1", (), "?", "choice", ("B",), options), "B", truncated=True).correct is True
    assert read(Question("2", (), "?", "yes_no", ("yes",)), "no").correct is False
    assert read(Question("3", (), "?", "number", ("4",), tolerance=0.5), "3").correct is True
    assert read(Question("4", (), "?", "short", ("STOP",)), "GO", thinking_opened=True).correct is False
    assert [(kind, o) for kind, o, _ in asked] == [
        ("choice", (options,)),
        ("yes_no", ()),
        ("number", ()),
        ("short", ()),
    ]
    assert asked[0][2]["truncated"] and not asked[1][2]["truncated"] and asked[3][2]["thinking_opened"]


def test_a_reply_without_a_readable_answer_is_undecided_never_wrong_nor_guessed(monkeypatch):
    monkeypatch.setattr(extraction, "choice", lambda *_, **__: Extracted(None, "refusal", "I cannot see"))
    read = BENCHMARKS["custom"].read(Question("1", (), "?", "choice", ("A",), {"A": "x", "B": "y"}), "I cannot see")
    assert (read.correct, read.extracted.rule, read.text) == (None, "refusal", "I cannot see")
