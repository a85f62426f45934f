"""What a user names on the command line of ``opd_recipes eval``, comparing two runs, and a judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.eval_helpers import COLOURS, call, evaluate, lines, of_server, results, right, write_rows
from tests.unit.synthesize_server import FakeServer, Say


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


# What the user can name


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "--benchmarks is missing"),
        (("--benchmarks", "vstars"), "unknown value 'vstars'; known: vstar, "),
        (("--benchmarks", "pope,pope"), "named twice"),
        (("--benchmarks", "pope"), "no local copy of pope (nothing was named)"),
        (("--benchmarks", "pope", "--data", "nowhere"), "no local copy of pope (nowhere/pope)"),
        (("--benchmarks", "pope", "--data", "pope=nowhere"), "no such file or folder"),
        (("--benchmarks", "pope", "--data", "vstar=x"), "vstar is not among --benchmarks"),
        (("--benchmarks", "pope:hard"), "no split 'hard'; known: random, popular, adversarial"),
    ],
)
def test_what_is_named_wrongly_is_told(tmp_path, capsys, options, told):
    assert evaluate(tmp_path / "out", "--score-only", *options) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "either --server URL and --model NAME, or --checkpoint FOLDER"),
        (("--server", "http://h/v1"), "--server needs --model"),
        (("--server", "h", "--model", "m"), "--server 'h'"),
        (("--server", "http://h/v1", "--model", "m", "--api-key-env", "NO_SUCH"), "NO_SUCH"),
        (("--checkpoint", "nowhere"), "no such folder"),
        (("--checkpoint", "x", "--server", "http://h/v1"), "either --server"),
    ],
)
def test_who_answers_must_be_named_once(tmp_path, rows, capsys, options, told):
    assert evaluate(tmp_path / "out", "--benchmarks", "custom", "--data", f"custom={rows}", *options) == 2
    assert told in capsys.readouterr().err


def test_two_models_do_not_meet_in_one_folder(tmp_path, rows, capsys):
    pope = tmp_path / "pope"
    pope.mkdir()
    (tmp_path / "1.png").rename(pope / "1.png")
    line = {"question_id": 1, "image": "1.png", "text": "Is there a dog?", "label": "no"}
    (pope / "coco_pope_random.json").write_text(json.dumps(line) + "\n")
    write_rows(rows, COLOURS)
    with FakeServer(lambda s, p, n: Say("No.") if "dog" in p else right(s, p, n)) as server:
        ask_pope = of_server(rows, server)[4:]
        assert evaluate(tmp_path / "out", "--benchmarks", "pope", "--data", tmp_path, *ask_pope) == 0
        assert evaluate(tmp_path / "out", *of_server(rows, server, "other")) == 2
        assert 'model was "m" and is "other"' in capsys.readouterr().err
        assert evaluate(tmp_path / "out", *of_server(rows, server)) == 0
    table = (tmp_path / "out" / "results.md").read_text()
    assert "| pope |" in table and "| custom |" in table


# Comparing


def compare(*options) -> int:
    return call("compare", *options)


def test_two_folders_are_compared_on_the_same_questions(tmp_path, rows, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    with FakeServer(right) as server:
        evaluate(b, *of_server(rows, server))
    with FakeServer(lambda s, p, n: Say("A")) as server:
        evaluate(a, *of_server(rows, server))
    assert compare(a, b, "--out", tmp_path / "c") == 0
    found = json.loads((tmp_path / "c" / "compare.json").read_text())["custom"]
    # A is right in q0 and q3, B in all four: two discordant pairs, exact p = 2 * (1/2)^2.
    assert (found["both"], found["only_a"], found["only_b"], found["neither"]) == (2, 0, 2, 0)
    assert found["differences"]["overall"]["value"] == 0.5 and found["p_mcnemar"] == 0.5
    assert "| custom | 50.00 | 100.00 | 50.00 |" in (tmp_path / "c" / "compare.md").read_text()


def test_other_questions_are_refused_unless_the_common_ones_are_asked_for(tmp_path, rows, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    with FakeServer(right) as server:
        evaluate(a, *of_server(rows, server), "--limit", 3)
        evaluate(b, *of_server(rows, server))
    assert compare(a, b) == 2
    assert "q3" in capsys.readouterr().err
    assert compare(a, b, "--common") == 0
    assert compare(a, tmp_path) == 2 and "no results" in capsys.readouterr().err


# A judge

#: Reply to "Which colour has N?" with the answer red, what the judge says of it, and what the rules say.
SAID = [
    ("red", True, True),
    ("crimson", True, False),
    ("blue", False, False),
    ("I cannot see it.", None, None),
]


@pytest.fixture
def short(tmp_path) -> Path:
    """The same question with a short answer, as often as there are replies to it."""
    write_rows(tmp_path / "rows.jsonl")
    row = {"question": "Which colour?", "answer": "red", "images": ["0.png"], "kind": "short"}
    path = tmp_path / "short.jsonl"
    path.write_text(
        "".join(json.dumps({**row, "id": f"s{n}", "question": f"Which colour has {n}?"}) + "\n" for n in range(4))
    )
    return path


def model(stage: str, prompt: str, number: int) -> Say:
    return Say(SAID[int(prompt.split("?")[0][-1])][0])


def judge(stage: str, prompt: str, number: int) -> Say:
    """It finds the reply in the data that it is shown."""
    data = json.loads(prompt[prompt.index("{") : prompt.rindex("\n===")])
    return Say(json.dumps({"agrees": next(agrees for reply, agrees, _ in SAID if reply == data["reply"])}))


def judged_by(server: FakeServer):
    return ("--judge-server", server.url, "--judge-model", "j")


def test_a_judge_gives_a_second_score_and_is_paid_once(tmp_path, short, capsys):
    out = tmp_path / "out"
    with FakeServer(model) as server, FakeServer(judge) as court:
        assert evaluate(out, *of_server(short, server), *judged_by(court)) == 0
        assert evaluate(out, *of_server(short, server), *judged_by(court)) == 0
        assert (server.calls, court.calls) == (4, 4) and court.bodies[0]["model"] == "j"
    found = results(out)
    assert found["scores"]["overall"] == 0.25 and found["judge"]["scores"]["overall"] == 0.5
    # Both decide three: they agree on red and blue, not on crimson.
    table = found["judge"]["agreement"]["rules_then_judge"]
    assert (table["right"]["right"], table["wrong"]["right"], table["wrong"]["wrong"]) == (1, 1, 1)
    assert found["judge"]["agreement"]["both_decided"] == 3 and found["judge"]["failed"] == 0
    scored = {line["id"]: line for line in lines(out / "custom" / "scored.jsonl")}
    assert (scored["s1"]["correct"], scored["s1"]["judged"]) == (False, True) and "agrees" in scored["s1"]["judge"]
    assert scored["s3"]["judged"] is None, "what the judge cannot tell stays undecided"
    assert "| custom, with judge j | 50.00 |" in (out / "results.md").read_text()


def test_a_judge_that_fails_leaves_the_rules_verdict_and_is_asked_again(tmp_path, short, capsys):
    out = tmp_path / "out"

    def broken(stage: str, prompt: str, number: int) -> Say:
        return Say(status=400) if "crimson" in prompt else judge(stage, prompt, number)

    with FakeServer(model) as server, FakeServer(broken) as court:
        assert evaluate(out, *of_server(short, server), *judged_by(court)) == 1
    assert results(out)["judge"]["scores"]["overall"] == 0.25 and results(out)["judge"]["failed"] == 1
    assert "1 replies have no verdict of the judge, e.g. on 's1'" in capsys.readouterr().err
    with (out / "custom" / "judge.jsonl").open("ab") as file:
        file.write(b'{"key": "a line that a kill has torn')
    with FakeServer(judge) as court:
        only = ("--benchmarks", "custom", "--data", f"custom={short}", "--score-only")
        assert evaluate(out, *only, *judged_by(court)) == 0
        assert court.calls == 1 and results(out)["judge"]["scores"]["overall"] == 0.5
        assert evaluate(out, *only, *judged_by(court)) == 0 and court.calls == 1


def test_a_judge_that_cannot_be_used_costs_no_score(tmp_path, short, capsys):
    with FakeServer(model) as server, FakeServer(lambda *_: Say(status=404)) as court:
        assert evaluate(tmp_path / "out", *of_server(short, server), *judged_by(court)) == 1
    assert results(tmp_path / "out")["scores"]["overall"] == 0.25 and results(tmp_path / "out")["judge"]["failed"] == 4
    assert "4 replies have no verdict of the judge" in capsys.readouterr().err


def test_choices_that_the_rules_decide_are_not_judged(tmp_path, rows):
    with FakeServer(right) as server, FakeServer(judge) as court:
        assert evaluate(tmp_path / "out", *of_server(rows, server), *judged_by(court)) == 0
        assert court.calls == 0


def test_two_runs_are_compared_by_the_judges_verdicts_where_both_have_them(tmp_path, short, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    with FakeServer(model) as server, FakeServer(judge) as court:
        evaluate(a, *of_server(short, server), *judged_by(court))
        evaluate(b, *of_server(short, server))
        assert compare(a, b, "--judged") == 2 and "no judge was asked" in capsys.readouterr().err
        evaluate(b, *of_server(short, server), *judged_by(court))
    assert compare(a, b, "--judged", "--out", tmp_path / "c") == 0
    found = json.loads((tmp_path / "c" / "compare.json").read_text())["custom"]
    assert (found["both"], found["neither"]) == (2, 2)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--judge-server", "http://h/v1"), "needs both"),
        (("--judge-server", "h", "--judge-model", "j"), "--judge-server 'h'"),
        (("--judge-server", "http://h/v1", "--judge-model", "j", "--judge-api-key-env", "NO_SUCH"), "NO_SUCH"),
    ],
)
def test_a_judge_must_be_named_in_full(tmp_path, capsys, options, told):
    assert evaluate(tmp_path, "--score-only", "--benchmarks", "custom", *options) == 2
    assert told in capsys.readouterr().err
