"""``opd_recipes eval agree``: lmms-eval's samples, as its tracker writes them, against our rules on the same replies."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from opd_recipes.eval import commands

#: Reply, whether it is right by our rules (None: undecided), and by lmms-eval 0.7.3's for V*. The answer is A, red.
REPLIES = [
    ("A", True, 1.0),
    ("(A) red", True, 1.0),
    ("B", False, 0.0),
    ("The answer is C.", False, 0.0),
    ("Answer: A", True, 1.0),
    ("I cannot see it.", None, 0.0),
    # Its first pattern is the letter at the start of the reply, here that of "Carefully".
    ("Carefully looked at, the answer is A.", True, 0.0),
    ("A or B, I cannot say.", None, 1.0),
    # Its last resort is the only letter from A to D in the reply.
    ("red", True, 0.0),
]


@pytest.fixture
def data(tmp_path) -> Path:
    """As many questions of V*, in its authors' layout."""
    folder = tmp_path / "vstar"
    folder.mkdir()
    question = {
        "text": "What colour? (A) red (B) blue (C) green (D) pink",
        "category": "direct_attributes",
        "label": "A",
    }
    rows = [{"image": f"direct_attributes/{n}.jpg", "question_id": str(n), **question} for n in range(len(REPLIES))]
    (folder / "test_questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def sample(number: int, reply: str, score: float, target: str = "A") -> dict:
    """A line of lmms-eval 0.7 (loggers/evaluation_tracker.py) for its task vstar_bench."""
    metric = {
        "question_id": str(number),
        "category": "direct_attributes",
        "score": score,
        "prediction": "?",
        "ground_truth": target,
    }
    return {
        "doc_id": number,
        "target": target,
        "filtered_resps": reply,
        "input_media": [{"type": "image"}],
        "token_counts": [{"output_tokens": 1}],
        "doc_hash": "0" * 64,
        "vstar_direct_attributes_acc": metric,
        "vstar_overall_acc": metric,
        "input": "What colour?",
    }


def write(path: Path, samples: list) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in samples))
    return path


def agree(samples: Path, data: Path, *options, benchmark: str = "vstar") -> int:
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser)
    given = ["agree", samples, "--benchmark", benchmark, "--data", data, *options]
    return commands.run(parser.parse_args([str(option) for option in given]))


def test_clear_replies_are_scored_alike_and_where_the_two_differ_is_shown(tmp_path, data):
    samples = [sample(number, reply, score) for number, (reply, _, score) in enumerate(REPLIES)]
    assert agree(write(tmp_path / "s.jsonl", samples), data, "--out", tmp_path / "out") == 0
    found = json.loads((tmp_path / "out" / "agree.json").read_text())
    assert (found["both_right"], found["both_wrong"], found["only_ours"], found["only_theirs"]) == (3, 2, 2, 0)
    assert found["undecided"] == {"theirs_right": 1, "theirs_wrong": 1} and found["unverified"] == 0
    # Of seven decided: 5/7 agree; by chance (5/7 * 3/7 + 2/7 * 4/7) = 23/49; kappa = (35 - 23) / (49 - 23) = 6/13.
    assert found["agreement"] == pytest.approx(5 / 7) and found["kappa"] == pytest.approx(6 / 13)
    assert found["accuracy"] == {"ours": 5 / 9, "theirs": 4 / 9}
    differing = {one["reply"]: one["ours"]["correct"] for one in found["differing"]}
    assert differing == {reply: ours for reply, ours, theirs in REPLIES if ours is not bool(theirs)}
    assert "Carefully looked at" in (tmp_path / "out" / "agree.md").read_text()


@pytest.mark.parametrize(
    ("metric", "theirs"),
    [
        ({"pope_accuracy": {"score": 1.0, "prediction": "a"}}, 1.0),
        ({"cv_bench_acc": {"gt_content": "A", "pred_parsed": "B", "is_correct": False}}, 0.0),
        ({"average": {"index": 0, "gpt_score": 1}}, 1.0),
        ({"mme_realworld_score": {"pred_answer": "a", "answer": "A"}}, 1.0),
        ({"mme_realworld_score": {"pred_answer": "", "answer": "A"}}, 0.0),
        ({"exact_match": 0.0}, 0.0),
    ],
)
def test_the_verdict_is_found_in_each_tasks_metric(tmp_path, data, metric, theirs):
    line = {"doc_id": 0, "target": "(A)", "filtered_resps": [["A"]], "input": "", **metric}
    assert agree(write(tmp_path / "s.jsonl", [line]), data, "--out", tmp_path) == 0
    assert json.loads((tmp_path / "agree.json").read_text())["accuracy"]["theirs"] == theirs


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([sample(0, "B", 1.0, target="B")], "the answer is 'b'"),
        ([sample(99, "A", 1.0)], "the data has 9 questions"),
        ([sample(0, "A", 1.0), sample(0, "A", 1.0)], "line 2: doc_id 0 is no number, or is there twice"),
        ([{"doc_id": 0, "target": "A", "filtered_resps": ["A"]}], "no metric has a verdict"),
        (
            [{"doc_id": 0, "target": "A", "filtered_resps": [[-1.0, True]], "acc": 1.0}],
            "expected one reply that is text",
        ),
        ([["no", "object"]], "no sample of lmms-eval"),
        ([], "has no sample"),
    ],
)
def test_a_file_that_does_not_belong_to_the_data_is_refused(tmp_path, data, capsys, lines, told):
    assert agree(write(tmp_path / "s.jsonl", lines), data) == 2
    assert told in capsys.readouterr().err


def test_what_is_not_there_is_told(tmp_path, data, capsys):
    assert agree(tmp_path / "none.jsonl", data) == 2 and "--log_samples" in capsys.readouterr().err
    assert agree(tmp_path / "none.jsonl", data, benchmark="vstars") == 2 and "unknown value" in capsys.readouterr().err


def test_samples_without_an_answer_are_counted_as_unverified(tmp_path, data, capsys):
    line = {"doc_id": 0, "target": "", "filtered_resps": ["A"], "average": {"score": 1.0}}
    assert agree(write(tmp_path / "s.jsonl", [line]), data) == 0
    assert "1 samples have no answer" in capsys.readouterr().out


def test_lmms_evals_own_rules_say_what_is_written_here_of_them():
    """Where it is installed; it need not be."""
    theirs = pytest.importorskip("lmms_eval.tasks.vstar_bench.utils", exc_type=ImportError)
    question = {"text": "", "question_id": "0", "category": "direct_attributes", "label": "A"}
    for reply, _, score in REPLIES:
        assert theirs.vstar_process_results(question, [reply])["vstar_overall_acc"]["score"] == score, reply
