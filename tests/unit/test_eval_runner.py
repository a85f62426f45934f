"""``opd_recipes eval`` against a local server that misbehaves: what is asked, kept, refused, retried and counted."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from opd_recipes.eval.asking import data_url
from opd_recipes.eval.question import ImageSource
from opd_recipes.eval.runner import _covered
from tests.unit.eval_helpers import COLOURS, evaluate, lines, of_server, results, right, write_rows
from tests.unit.synthesize_server import FakeServer, Say, images_of, prompt_of


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


# What is asked


def test_every_request_is_greedy_and_has_the_seed_the_limit_and_the_thinking_switch(tmp_path, rows):
    with FakeServer(right) as server:
        assert evaluate(tmp_path / "out", *of_server(rows, server), "--seed", 7, "--max-tokens", 50) == 0
    assert len(server.bodies) == 4
    for body in server.bodies:
        assert (body["model"], body["temperature"], body["top_p"], body["seed"], body["max_tokens"]) == (
            "m",
            0,
            1,
            7,
            50,
        )
        assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_thinking_is_asked_for_and_gets_a_longer_limit_unless_one_is_given(tmp_path, rows):
    with FakeServer(right) as server:
        evaluate(tmp_path / "a", *of_server(rows, server), "--thinking")
        evaluate(tmp_path / "b", *of_server(rows, server), "--thinking", "--max-tokens", 9)
    assert all(body["chat_template_kwargs"] == {"enable_thinking": True} for body in server.bodies)
    assert [body["max_tokens"] for body in server.bodies] == [16384] * 4 + [9] * 4


def test_more_fields_can_be_sent_and_ours_left_out(tmp_path, rows):
    extra = '{"chat_template_kwargs": null, "top_k": 1}'
    with FakeServer(right) as server:
        evaluate(tmp_path / "out", *of_server(rows, server), "--extra-body", extra)
    assert all("chat_template_kwargs" not in body and body["top_k"] == 1 for body in server.bodies)


def test_images_come_before_the_text_and_keep_their_pixels(tmp_path, rows):
    with FakeServer(right) as server:
        evaluate(tmp_path / "out", *of_server(rows, server), "--concurrency", 1)
    for number, body in enumerate(server.bodies):
        (image,) = images_of(body)
        assert image.getpixel((3, 3)) == Image.new("RGB", (1, 1), COLOURS[number]).getpixel((0, 0))
        assert prompt_of(body).startswith(f"Which colour has {number}?") and "(D) pink" in prompt_of(body)


def encoded(kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    picture = Image.new("RGB", (6, 4), "red")
    picture.putpixel((0, 0), (0, 0, 255))
    picture.save(buffer, format=kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_png_or_jpeg_is_sent_as_the_file_it_is(kind):
    head, _, body = data_url(ImageSource(encoded(kind))).partition(",")
    assert head == f"data:image/{kind.lower()};base64" and base64.b64decode(body) == encoded(kind)


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "WEBP"])
def test_other_formats_become_png_without_a_changed_pixel(kind):
    lossless = {"lossless": True} if kind == "WEBP" else {}
    head, _, body = data_url(ImageSource(encoded(kind, **lossless))).partition(",")
    sent = Image.open(io.BytesIO(base64.b64decode(body)))
    assert head == "data:image/png;base64" and sent.format == "PNG"
    assert sent.getpixel((0, 0)) == (0, 0, 255) and sent.getpixel((5, 3)) == (255, 0, 0)


def test_a_turned_photograph_is_sent_upright():
    turned = Image.Exif()
    turned[0x0112] = 6  # to be turned by 90 degrees
    _, _, body = data_url(ImageSource(encoded("JPEG", exif=turned))).partition(",")
    sent = Image.open(io.BytesIO(base64.b64decode(body)))
    assert sent.format == "PNG" and sent.size == (4, 6)


# What comes out


def test_results_have_scores_intervals_tokens_and_every_reply_with_its_rule(tmp_path, rows):
    def script(stage, prompt, number):
        said = right(stage, prompt, number)
        return Say("I am not sure.", usage={"prompt_tokens": 5, "completion_tokens": 2}) if "has 3" in prompt else said

    out = tmp_path / "out"
    with FakeServer(script) as server:
        assert evaluate(out, *of_server(rows, server)) == 0
    found = results(out)
    assert found["scores"]["overall"] == 0.75 and found["scores"]["undecided"] == 1 and found["failed"] == 0
    assert found["scores"]["categories"]["half"]["second"] == {"value": 0.5, "n": 2, "undecided": 1}
    assert found["intervals"]["overall"]["low"] < 0.75 < found["intervals"]["overall"]["high"]
    assert (found["spent"]["prompt_tokens"], found["spent"]["completion_tokens"]) == (305, 32)
    assert sum(found["undecided_reasons"].values()) == 1 and found["truncated"] == 0
    scored = {line["id"]: line for line in lines(out / "custom" / "scored.jsonl")}
    assert [scored[f"q{i}"]["correct"] for i in range(4)] == [True, True, True, None]
    assert scored["q1"]["value"] == "B" and scored["q1"]["rule"] and scored["q1"]["why"] and scored["q1"]["reply"]
    page = (out / "results.md").read_text()
    assert "| custom | 75.00 |" in page and "305 / 32" in page


def test_a_reply_that_was_cut_off_is_counted(tmp_path, rows):
    with FakeServer(lambda *_: Say("The picture shows", finish="length")) as server:
        evaluate(tmp_path / "out", *of_server(rows, server))
    assert results(tmp_path / "out")["truncated"] == 4 and results(tmp_path / "out")["scores"]["undecided"] == 4


def test_a_thought_that_was_cut_off_is_undecided_even_where_the_template_opened_it(tmp_path, rows):
    with FakeServer(lambda *_: Say("The answer is A? Let me look again", finish="length")) as server:
        evaluate(tmp_path / "out", *of_server(rows, server), "--thinking")
    assert results(tmp_path / "out")["scores"]["undecided"] == 4


# Failures


HOSTILE = {
    "500": Say(status=500),
    "broken JSON": Say(raw=b'{"choices": [{"mess'),
    "no choices": Say(raw=b'{"choices": []}'),
    "timeout": Say("late", wait=2.5),
    "reset": Say(reset=True),
    "refused": Say(status=400, raw=b"too long"),
}


@pytest.mark.parametrize("trouble", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_question_that_fails_is_in_no_score_and_is_asked_again_by_the_next_run(tmp_path, rows, capsys, trouble):
    out = tmp_path / "out"

    def script(stage, prompt, number):
        return trouble if "has 1" in prompt else right(stage, prompt, number)

    with FakeServer(script) as server:
        assert evaluate(out, *of_server(rows, server), "--timeout", 1) == 1
    found = results(out)
    assert (found["failed"], found["scores"]["n"], found["scores"]["overall"]) == (1, 3, 1.0)
    assert "custom is incomplete: 1 of 4 questions have no reply" in (out / "results.md").read_text()
    assert "'q1'" in capsys.readouterr().err
    (failure,) = lines(out / "custom" / "failures.jsonl")
    assert failure["id"] == "q1" and failure["reason"]

    with FakeServer(right) as server:
        assert evaluate(out, *of_server(rows, server)) == 0
    assert server.calls == 1 and "has 1" in prompt_of(server.bodies[0])
    assert results(out)["failed"] == 0 and results(out)["scores"]["n"] == 4
    assert not (out / "custom" / "failures.jsonl").exists()


def test_passing_trouble_is_retried_within_the_run(tmp_path, rows):
    with FakeServer(lambda s, p, number: Say(status=503) if number == 0 else right(s, p, number)) as server:
        assert evaluate(tmp_path / "out", *of_server(rows, server)) == 0
    assert server.calls == 5 and results(tmp_path / "out")["scores"]["overall"] == 1.0


def test_an_unknown_model_stops_the_run_and_the_rest_counts_as_not_asked(tmp_path, rows, capsys):
    with FakeServer(lambda *_: Say(status=404)) as server:
        assert evaluate(tmp_path / "out", *of_server(rows, server), "--concurrency", 1) == 1
    assert server.calls == 1 and results(tmp_path / "out")["failures"]["not asked"] == 3
    assert "--server" in capsys.readouterr().err


def test_an_image_that_is_none_is_a_failure_with_its_reason(tmp_path, rows):
    (tmp_path / "2.png").write_bytes(b"no image")
    with FakeServer(right) as server:
        assert evaluate(tmp_path / "out", *of_server(rows, server)) == 1
    (reason,) = results(tmp_path / "out")["failures"]
    assert "cannot be read as an image" in reason and server.calls == 3


# Going on


def test_a_run_goes_on_after_a_kill_in_the_middle_of_a_line(tmp_path, rows):
    out = tmp_path / "out"
    with FakeServer(right) as server:
        evaluate(out, *of_server(rows, server), "--concurrency", 1)
        replies = out / "custom" / "replies.jsonl"
        whole = replies.read_bytes()
        second = whole.index(b"\n") + 1
        replies.write_bytes(whole[: second + 40])
        assert evaluate(out, *of_server(rows, server)) == 0
    assert server.calls == 4 + 3 and [line["key"] for line in lines(replies)][0] == "q0"
    assert results(out)["scores"] | {"n": 4} == results(out)["scores"]


def test_a_finished_run_asks_nothing_and_scoring_alone_needs_no_server(tmp_path, rows):
    out = tmp_path / "out"
    with FakeServer(right) as server:
        evaluate(out, *of_server(rows, server))
        evaluate(out, *of_server(rows, server))
        assert server.calls == 4
    for path in (out / "results.json", out / "custom" / "scored.jsonl"):
        path.unlink()
    assert evaluate(out, "--benchmarks", "custom", "--data", f"custom={rows}", "--score-only") == 0
    assert results(out)["scores"]["overall"] == 1.0


def test_scoring_alone_counts_what_was_never_asked(tmp_path, rows):
    only = ("--benchmarks", "custom", "--data", f"custom={rows}")
    with FakeServer(right) as server:
        assert evaluate(tmp_path / "out", *of_server(rows, server), "--limit", 3) == 0
    assert evaluate(tmp_path / "out", *only, "--score-only") == 1
    assert results(tmp_path / "out")["failures"] == {"not asked": 1}
    assert evaluate(tmp_path / "out", *only, "--score-only", "--limit", 2) == 0
    assert results(tmp_path / "out")["scores"]["n"] == 2 and results(tmp_path / "out")["limit"] == 2


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (("--model", "other"), 'model was "m" and is "other"'),
        (("--seed", 1), "seed was 0 and is 1"),
        (("--max-tokens", 3), "max_tokens was 1024 and is 3"),
        (("--thinking", "--max-tokens", 1024), "thinking was false and is true"),
        (("--extra-body", '{"top_k": 1}'), 'extra was {} and is {"top_k": 1}'),
    ],
)
def test_other_settings_are_refused_with_what_differs_and_the_remedy(tmp_path, rows, capsys, changed, told):
    out = tmp_path / "out"
    with FakeServer(right) as server:
        evaluate(out, *of_server(rows, server))
        before = (out / "results.json").read_bytes()
        assert evaluate(out, *of_server(rows, server), *changed) == 2
        assert server.calls == 4
    error = capsys.readouterr().err
    assert told in error and f"Name another --out, or remove {out / 'custom'}" in error
    assert (out / "results.json").read_bytes() == before


def test_a_changed_question_or_picture_is_refused(tmp_path, rows, capsys):
    out, text = tmp_path / "out", rows.read_text()
    with FakeServer(right) as server:
        evaluate(out, *of_server(rows, server), "--limit", 3)
        rows.write_text(text.replace("Which colour has 1", "What colour has 1"))
        assert evaluate(out, *of_server(rows, server)) == 2
        assert "question 'q1', which has a reply, has another text now" in capsys.readouterr().err
        rows.write_text(text)
        Image.new("RGB", (8, 8), "pink").save(tmp_path / "0.png")
        assert evaluate(out, *of_server(rows, server)) == 2
        assert "question 'q0', which has a reply, has other images now" in capsys.readouterr().err
        write_rows(rows, COLOURS[:2])
        assert evaluate(out, *of_server(rows, server)) == 2
        assert "question 'q2', which has a reply, is not in the data any more" in capsys.readouterr().err
        assert server.calls == 3


def test_a_damaged_line_is_told_with_its_number(tmp_path, rows, capsys):
    out = tmp_path / "out"
    with FakeServer(right) as server:
        evaluate(out, *of_server(rows, server), "--limit", 2)
        replies = out / "custom" / "replies.jsonl"
        replies.write_bytes(b"nonsense\n" + replies.read_bytes())
        assert evaluate(out, *of_server(rows, server)) == 2
    assert "line 1 is damaged" in capsys.readouterr().err


def test_time_counts_once_where_requests_overlap():
    assert _covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.5)]) == 4.0 and _covered([]) == 0.0
