"""The whole of ``synthesize`` against a real HTTP server: rows, numbers, resume after a kill, and rows that mean harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.synthesize.pipeline import STAGES
from opd_recipes.images import ImageRoot, decode
from tests.unit.synthesize_server import (
    SQUARES,
    FakeServer,
    Say,
    arguments,
    draw_image,
    good_answer,
    images_of,
    prompt_of,
    run,
)

#: What one sound image costs: a list, 3 boxes, 3 times questions, 9 verdicts, 9 times 8 answers.
CALLS_PER_IMAGE = 1 + 3 + 3 + 9 + 72
MAIN = "import argparse, data_prep.synthesize as s; p = argparse.ArgumentParser(); s.add_arguments(p); s.run(p.parse_args())"


@pytest.fixture
def images(tmp_path) -> Path:
    for number in range(2):
        draw_image(tmp_path / "images" / f"{number}.png", tint=number)
    return tmp_path / "images"


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def rows(out: Path, split: str = "train") -> list[dict]:
    return pq.read_table(out / f"{split}.parquet").to_pylist()


def rejects(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]


def report(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


def check_sums(out: Path) -> None:
    """Nothing is lost between the stages, and each rejected item has its line."""
    told = report(out)
    stages, order = told["stages"], [stage for stage in STAGES if stage in told["stages"]]
    for row in stages.values():
        assert row["in"] == row["out"] + row["rejected"] + row["unfinished"]
    for before, after in (("images", "lists"), ("objects", "boxes"), ("boxes", "questions"), ("written", "validated")):
        assert stages[before]["out"] == stages.get(after, {"in": 0})["in"]
    assert stages[order[-1]]["out"] == told["kept"] or order[-1] in ("images", "lists")
    kinds = Counter(reject["stage"] for reject in rejects(out))
    assert kinds == Counter({stage: row["rejected"] for stage, row in stages.items() if row["rejected"]})


# Rows


def test_a_sound_folder_becomes_rows_with_box_question_and_majority_answer(images, out):
    with FakeServer() as server:
        run(server.url, images, out)
        assert server.calls == 2 * CALLS_PER_IMAGE and max(server.requests.values()) == 1
    kept = rows(out)
    assert len(kept) == 2 * 3 * 3 and rejects(out) == []
    first = kept[0]
    assert first["bbox"] == [20, 20, 50, 40]
    assert first["images"] == [{"bytes": (images / "0.png").read_bytes(), "path": "0.png"}]
    asked = "What is the colour of the red square?"
    suffix = "\nLook inside the red box. Answer with a single word or a short phrase."
    assert first["prompt"] == [{"role": "user", "content": f"<image>{asked}{suffix}"}]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "red"}
    assert first["extra_info"] == {"split": "train", "index": 0, "question": asked, "answer": "red"}
    assert [row["bbox"] for row in kept[::3]] == 2 * [list(box) for box in SQUARES.values()]
    assert [row["extra_info"]["index"] for row in kept] == list(range(18))


def test_rows_name_their_images_where_this_is_wanted(images, out, tmp_path, capsys):
    with FakeServer() as server:
        run(server.url, images, out)
        run(server.url, images, tmp_path / "named", "--name-images")
    root = ImageRoot.of(tmp_path / "named/train.parquet", str(images))
    for held, named in zip(rows(out), rows(tmp_path / "named"), strict=True):
        assert named == {**held, "images": [{"bytes": None, "path": held["images"][0]["path"]}]}
        assert decode(named["images"][0], root).tobytes() == decode(held["images"][0]).tobytes()
    assert f"train with data.image_root={images}" in capsys.readouterr().out


def test_the_order_of_rows_does_not_depend_on_the_order_of_replies(images, out, tmp_path):
    def some_slow(stage, prompt, number):
        return Say(good_answer(stage, prompt), wait=0.05) if number % 3 == 0 else None

    options = ["--answers", "1"]
    with FakeServer(some_slow) as server:
        run(server.url, images, out, "--concurrency", "7", *options)
        run(server.url, images, tmp_path / "again", "--concurrency", "1", "--images-at-once", "1", *options)
    assert rows(out) == rows(tmp_path / "again")


def test_the_model_sees_the_crop_enlarged_twice_and_the_whole_image_within_max_side(images, out):
    with FakeServer() as server:
        run(server.url, images, out, "--limit", "1", "--max-side", "100")
        shown = {prompt_of(body): images_of(body) for body in server.bodies}
    by_stage = {
        stage: next(v for k, v in shown.items() if phrase in k)
        for stage, phrase in (
            ("lists", "List the objects"),
            ("questions", "red square\n\nWrite"),
            ("validated", "detail shows: red square"),
        )
    }
    assert [image.size for image in by_stage["lists"]] == [(100, 50)]
    assert [image.size for image in by_stage["questions"]] == [(60, 40)]
    assert [image.size for image in by_stage["validated"]] == [(60, 40), (100, 50)]
    assert by_stage["questions"][0].convert("RGB").getpixel((30, 20)) == (255, 0, 0)
    assert rows(out)[0]["bbox"] == [20, 20, 50, 40], "thousandths do not depend on the size that was sent"


def test_boxes_in_pixels_of_the_sent_image_are_scaled_back_and_exif_rotation_is_undone(tmp_path, out):
    path = tmp_path / "images" / "turned.jpg"
    upright = Image.open(draw_image(tmp_path / "upright.png"))
    exif = Image.Exif()
    exif[274] = 6  # the stored image must be turned by 90 degrees clockwise to be upright
    path.parent.mkdir()
    upright.rotate(90, expand=True).save(path, quality=95, subsampling=0, exif=exif)

    def in_pixels(stage, prompt, number):
        if stage == "boxes" and "red square" in prompt:
            return Say(json.dumps({"bbox_2d": [10, 10, 25, 20]}))
        return Say("[]") if stage == "boxes" else None

    with FakeServer(in_pixels) as server:
        run(server.url, path.parent, out, "--max-side", "100", "--box-convention", "pixels")
        crops = [images_of(body)[0] for body in server.bodies if "red square\n\nWrite" in prompt_of(body)]
    assert rows(out)[0]["bbox"] == [20, 20, 50, 40]
    red, green, blue = crops[0].convert("RGB").getpixel((30, 20))
    assert red > 240 and green < 20 and blue < 20


def test_sampling_is_as_published_and_samples_have_different_seeds(images, out):
    with FakeServer() as server:
        run(server.url, images, out, "--limit", "1", "--seed", "5")
        bodies = server.bodies
    asked = [body for body in bodies if "different questions" in prompt_of(body)]
    assert {(body["temperature"], body["top_p"]) for body in asked} == {(0.9, 0.8)}
    lists = [body for body in bodies if "List the objects" in prompt_of(body)]
    assert [(body["temperature"], body["top_p"]) for body in lists] == [(0.0, 1.0)]
    answers = [body for body in bodies if prompt_of(body).startswith("What is the colour of the red square?")]
    assert sorted(body["seed"] for body in answers) == list(range(5, 13))


def test_multiple_choice_rows_have_the_letter_of_the_answer(images, out):
    with FakeServer() as server:
        run(server.url, images, out, "--multiple-choice", "--limit", "1")
    kept = rows(out)
    letters = set()
    for row in kept:
        content, truth = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
        assert f"\n{truth}. {row['extra_info']['answer']}\n" in content + "\n"
        assert [line[:2] for line in content.splitlines()[1:5]] == ["A.", "B.", "C.", "D."]
        assert content.endswith("Answer with the letter of the option.")
        letters.add(truth)
    assert len(kept) == 9 and len(letters) > 1
    check_sums(out)


@pytest.mark.parametrize(("right", "kept"), [(1, 9), (2, 0)])
def test_the_hard_filter_drops_what_the_small_model_answers_twice_of_four_times(images, out, right, kept):
    """Its first ``right`` samples of each question are right."""
    asked: Counter[str] = Counter()

    def small(stage, prompt, number):
        if stage != "hard":
            return None
        asked[prompt] += 1
        color = next(name for name in SQUARES if name in prompt).split()[0]
        return Say(json.dumps({"answer": color if asked[prompt] <= right else "pink"}))

    with FakeServer() as server, FakeServer(small) as second:
        options = ["--limit", "1", "--hard-model", "small", "--hard-url", second.url]
        if kept:
            run(server.url, images, out, *options)
            assert len(rows(out)) == kept
        else:
            with pytest.raises(SystemExit, match="no question is kept"):
                run(server.url, images, out, *options)
            assert {r["reasons"][0].split(":")[0] for r in rejects(out)} == {"too easy"}
        assert second.calls == 9 * 4 and all(len(images_of(body)) == 1 for body in second.bodies)
        assert images_of(second.bodies[0])[0].size == (200, 100)
    check_sums(out)


def test_a_share_of_the_images_becomes_val_and_no_image_is_on_both_sides(tmp_path, out):
    for number in range(6):
        draw_image(tmp_path / "images" / f"{number}.png", tint=number)
    with FakeServer() as server:
        run(server.url, tmp_path / "images", out, "--val-fraction", "0.5", "--answers", "1", "--questions", "3")
    train, val = ({row["images"][0]["path"] for row in rows(out, split)} for split in ("train", "val"))
    assert train and val and not train & val and len(train | val) == 6


# Rejects


HOSTILE = {
    "broken JSON": ("lists", Say('["a", "b"'), "broken"),
    "two objects": ("lists", Say('["red square", "green square"]'), "2 objects that appear once"),
    "refusal": ("lists", Say("I'm sorry, I cannot help with that."), "refused"),
    "truncated": ("lists", Say('["red square", "gre', finish="length"), "cut off"),
    "filtered": ("lists", Say("", finish="content_filter"), "content filter"),
    "empty": ("lists", Say(""), "empty"),
    "wrong content type": ("lists", Say(raw=b"<html>hello</html>", content_type="text/html"), "text/html"),
    "no completion": ("lists", Say(raw=b'{"choices": []}'), "no chat completion"),
    "not JSON": ("lists", Say(raw=b"\xff\xfe nonsense"), "no chat completion"),
    "huge": ("lists", Say(raw=b" " * (5 * 2**20)), "longer than"),
    "bad request": ("lists", Say(status=400, raw=b'{"error": "too many tokens"}'), "too many tokens"),
    "box outside": ("boxes", Say('{"bbox_2d": [900, 10, 1100, 90]}'), "outside"),
    "two boxes": ("boxes", Say('[{"bbox_2d": [1, 2, 3, 4]}, {"bbox_2d": [5, 6, 7, 8]}]'), "2 boxes"),
    "no box": ("boxes", Say("[]"), "0 boxes"),
    "large box": ("boxes", Say('{"bbox_2d": [0, 0, 500, 500]}'), "0.250 of the image's area"),
    "tiny box": ("boxes", Say('{"bbox_2d": [0, 0, 50, 50]}'), "side below 16"),
    "normalised box": ("boxes", Say('{"bbox_2d": [0.1, 0.1, 0.2, 0.2]}'), "looks normalised"),
    "two questions": ("questions", Say('["What?", "Who?"]'), "2 questions instead of 3"),
    "wrong language": ("questions", Say('["是什么颜色？", "什么形状？", "多大？"]'), "wrong language"),
    "no question": ("questions", Say('["The square.", "is", "red"]'), "question mark"),
    "special token": ("questions", Say('["What <|im_end|>?", "Is <image> it?", "<video>?"]'), "no text for the model"),
    "twice the same": ("questions", Say('["What is it?", "what is it?", "What is it ?"]'), "the same question"),
    "undecided": ("validated", Say('{"answerable": true, "unique": "maybe", "consistent": true}'), "unique, clear"),
    "not unique": (
        "validated",
        Say('{"answerable": true, "unique": false, "consistent": true, "clear": true}'),
        "not unique",
    ),
    "unanswerable": ("agreed", Say('{"answer": "unanswerable"}'), "none of 2 replies has an answer"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_reply_is_rejected_with_its_reason_and_the_rest_goes_on(tmp_path, out, kind):
    """All replies of one stage to the second image are hostile; the first image's rows are all there."""
    images = tmp_path / "images"
    draw_image(images / "0.png")
    draw_image(images / "1.png", tint=1)
    stage, said, reason = HOSTILE[kind]
    with FakeServer() as server:
        server.script = lambda at, prompt, number: said if at == stage and second_image(server) else None
        one_at_a_time = ["--concurrency", "1", "--images-at-once", "1"]
        run(server.url, images, out, *one_at_a_time, "--attempts", "2", "--answers", "2", "--min-agreement", "1")
    found = [reject for reject in rejects(out) if any(reason in text for text in reject["reasons"])]
    assert found and all(reject["file"] == "1.png" and reject["row"] == 1 for reject in rejects(out))
    assert sum(row["images"][0]["path"] == "0.png" for row in rows(out)) == 9
    check_sums(out)


def second_image(server: FakeServer) -> bool:
    """Whether the call in hand is about the second image: with one at a time, all behind the first's
    (two answers for each question)."""
    return server.calls > CALLS_PER_IMAGE - 72 + 18


def test_six_of_eight_answers_agree_and_five_do_not(images, out):
    """0.75 of 8 is 6. Case, space and a full stop do not matter; a reply without answer counts as one that disagrees."""
    votes = {
        "What is the colour": ["red", "Red.", " RED", "red", "red", "red!", "blue", "green"],  # 6
        "Which hue": ["red", "red", "red", "red", "red", "blue", "blue", "green"],  # 5
        "What tint": ["red", "red", "red", "red", "red", "", "unanswerable", "blue"],  # 5
    }
    asked: Counter[str] = Counter()

    def vote(stage, prompt, number):
        if stage != "agreed":
            return Say("[]") if stage == "boxes" and "red" not in prompt else None
        key = next(key for key in votes if prompt.startswith(key))
        asked[key] += 1
        return Say(json.dumps({"answer": votes[key][asked[key] - 1]}))

    with FakeServer(vote) as server:
        run(server.url, images, out, "--limit", "1", "--concurrency", "1")
    (kept,) = rows(out)
    assert kept["reward_model"]["ground_truth"] == "red" and "What is the colour" in kept["prompt"][0]["content"]
    reasons = {r["question"][:9]: r["reasons"][0] for r in rejects(out) if r["stage"] == "agreed"}
    assert reasons["Which hue"].startswith("5 of 8 answers agree") and "2 without an answer" in reasons["What tint"]


def test_two_names_of_one_box_and_names_listed_twice_are_rejected(images, out):
    listed = ["red square", "scarlet tile, a red square", "green square", "blue square", "tree", "Tree"]
    with FakeServer(lambda stage, prompt, number: Say(json.dumps(listed)) if stage == "lists" else None) as server:
        run(server.url, images, out, "--limit", "1")
    reasons = [(r["object"], r["reasons"][0]) for r in rejects(out)]
    assert [name for name, _ in reasons] == ["tree", "Tree", "scarlet tile, a red square"]
    assert "one object under two names" in reasons[2][1]
    assert report(out)["stages"]["objects"] == {"in": 6, "out": 4, "rejected": 2, "unfinished": 0}
    check_sums(out)


def test_damaged_foreign_and_repeated_images_are_rejected_and_links_do_not_lead_out(tmp_path, out):
    images = tmp_path / "images"
    draw_image(images / "a.png")
    Image.open(images / "a.png").save(images / "b.png", compress_level=0)  # another file, the same picture
    (images / "c.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    (images / "d.jpg").write_bytes(draw_image(tmp_path / "whole.jpg").read_bytes()[:900])
    (images / "e.png").symlink_to(draw_image(tmp_path / "secret.png", tint=9))
    (images / "notes.txt").write_text("no image")
    with FakeServer() as server:
        run(server.url, images, out)
        assert server.calls == CALLS_PER_IMAGE
    told = {r["file"]: r["reasons"][0] for r in rejects(out)}
    assert "same picture as a.png" in told["b.png"] and "damaged or none of" in told["c.jpg"]
    assert "cannot be read" in told["d.jpg"] and "link that leaves" in told["e.png"] and len(told) == 4
    check_sums(out)


# Rows that mean harm


def test_an_object_that_looks_like_a_field_or_a_path_stays_text(images, out):
    names = ["{question}", "../../x.png", "{answer} {0.__class__}"]
    boxes = iter(SQUARES.values())

    def script(stage, prompt, number):
        if stage == "lists":
            return Say(json.dumps(names))
        if stage == "boxes":
            x0, y0, x1, y1 = next(boxes)
            return Say(json.dumps([5 * x0, 10 * y0, 5 * x1, 10 * y1]))
        return None

    with FakeServer(script) as server:
        run(server.url, images, out, "--limit", "1", "--concurrency", "1")
        verdicts = [prompt_of(body) for body in server.bodies if "Judge" in prompt_of(body)]
    assert verdicts[0].startswith(
        "The first image is a detail cut out of the second image. The detail shows: {question}\n"
    )
    assert any("{answer} {0.__class__}" in prompt for prompt in verdicts)
    assert sorted(path.name for path in out.iterdir()) == [
        "ledger.jsonl",
        "rejects.jsonl",
        "report.json",
        "train.parquet",
    ]


def test_a_file_whose_name_is_a_path_or_a_prompt_is_only_a_name(tmp_path, out):
    images = tmp_path / "images"
    names = ["%2e%2e%2f..%2fx.png", "{question}.png", "a\nb.png", "..png", "$(touch pwned).png"]
    for number, name in enumerate(names):
        draw_image(images / name, tint=number)
    before = sorted(tmp_path.iterdir())
    with FakeServer() as server:
        run(server.url, images, out, "--answers", "1", "--min-agreement", "1")
        assert not any("x.png" in prompt_of(body) for body in server.bodies)
    assert {row["images"][0]["path"] for row in rows(out)} == set(names) - {"..png"}, (
        "a name with a dot first is hidden"
    )
    assert sorted(tmp_path.iterdir()) == sorted([*before, out])


def test_the_key_is_sent_to_its_server_only_and_is_written_nowhere(images, out, monkeypatch, capsys):
    monkeypatch.setenv("VLM_KEY", "s3cret-key")

    def refuse(stage, prompt, number):
        return Say(status=400, raw=b"no such thing for s3cret-key") if stage == "validated" and number == 0 else None

    with FakeServer(refuse) as server, FakeServer() as second:
        options = ["--api-key-env", "VLM_KEY", "--hard-model", "small", "--hard-url", second.url]
        run(server.url, images, out, "--limit", "1", *options)
        assert {headers["Authorization"] for headers in server.headers} == {"Bearer s3cret-key"}
        assert second.calls and not any("Authorization" in headers for headers in second.headers)
    assert any("for ***" in reject["reasons"][0] for reject in rejects(out))
    written = b"".join(path.read_bytes() for path in out.iterdir())
    assert b"s3cret" not in written and "s3cret" not in "".join(capsys.readouterr())


# Money


def test_the_report_adds_up_and_has_the_cost(images, out):
    with FakeServer() as server:
        run(server.url, images, out, "--price-in", "2", "--price-out", "30")
    told = report(out)
    calls = 2 * CALLS_PER_IMAGE
    assert told["stages"] == {
        "images": {"in": 2, "out": 2, "rejected": 0, "unfinished": 0},
        "lists": {"in": 2, "out": 2, "rejected": 0, "unfinished": 0},
        **{s: {"in": 6, "out": 6, "rejected": 0, "unfinished": 0} for s in ("objects", "boxes", "questions")},
        **{s: {"in": 18, "out": 18, "rejected": 0, "unfinished": 0} for s in ("written", "validated", "agreed")},
    }
    assert (told["kept"], told["complete"], told["total"]["asked"], told["total"]["recorded"]) == (18, True, calls, 0)
    assert (told["total"]["prompt_tokens"], told["total"]["completion_tokens"]) == (100 * calls, 10 * calls)
    assert told["total"]["cost"] == pytest.approx(calls * (100 * 2 + 10 * 30) / 1e6)
    assert sum(one["asked"] for one in told["calls"].values()) == calls
    check_sums(out)


def test_replies_without_a_count_of_tokens_are_told(images, out, capsys):
    def silent(stage, prompt, number):
        return Say('["red square", "green square", "blue square"]', usage=None) if stage == "lists" else None

    with FakeServer(silent) as server:
        run(server.url, images, out)
    assert report(out)["total"]["uncounted"] == 2 and report(out)["total"]["cost"] is None
    assert "2 replies came without a count of tokens" in capsys.readouterr().out


def test_started_again_it_asks_nothing_and_writes_the_same(images, out):
    with FakeServer() as server:
        run(server.url, images, out)
        first, asked = rows(out), server.calls
        run(server.url, images, out)
        assert server.calls == asked and rows(out) == first
    told = report(out)["total"]
    assert (told["asked"], told["recorded"], told["prompt_tokens"]) == (0, asked, 100 * asked)


def test_a_changed_prompt_asks_again_only_what_depends_on_it(images, out, tmp_path, capsys):
    with FakeServer() as server:
        run(server.url, images, out)
        with pytest.raises(SystemExit) as ended:
            run(server.url, images, out, "--write-prompts", str(tmp_path / "prompts"))
        assert ended.value.code == 0
        edited = tmp_path / "prompts" / "validate.txt"
        edited.write_text(edited.read_text() + "\nBe very strict.")
        before = server.calls
        run(server.url, images, out, "--prompts", str(tmp_path / "prompts"))
        assert server.calls - before == 18, "the verdicts; the answers depend on the question only"
        run(server.url, images, out, "--answers", "9")
        assert server.calls - before == 18 + 18, "a ninth answer for each"


def test_more_tokens_ask_again_only_what_was_cut_off(images, out):
    room = {"enough": False}

    def script(stage, prompt, number):
        short = stage == "questions" and "green" in prompt and not room["enough"]
        return Say('["What', finish="length") if short else None

    with FakeServer(script) as server:
        run(server.url, images, out, "--max-tokens", "50")
        before = server.calls
        run(server.url, images, out, "--max-tokens", "50")
        assert server.calls == before and len(rejects(out)) == 2
        room["enough"] = True
        run(server.url, images, out, "--max-tokens", "500")
        assert server.calls - before == 2 * (1 + 3 + 24), "the questions, and what follows them"
    assert len(rows(out)) == 18 and rejects(out) == []


@pytest.mark.parametrize(("how", "after"), [(signal.SIGKILL, 3), (signal.SIGKILL, 60), (signal.SIGINT, 30)])
def test_stopped_at_any_time_it_goes_on_without_repeating_a_recorded_call(tmp_path, out, how, after):
    for number in range(3):
        draw_image(tmp_path / "images" / f"{number}.png", tint=number)
    concurrency, needed = 4, 3 * (CALLS_PER_IMAGE - 9 * 6)
    with FakeServer(delay=0.01) as server:
        command = [sys.executable, "-c", MAIN, *arguments(server.url, tmp_path / "images", out)]
        command += ["--concurrency", str(concurrency), "--answers", "2", "--min-agreement", "1"]
        with (tmp_path / "log.txt").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
            deadline = time.monotonic() + 120
            while server.calls < after and time.monotonic() < deadline:
                time.sleep(0.005)
            process.send_signal(how)
            process.wait()
        assert after <= server.calls < needed, (tmp_path / "log.txt").read_text()
        assert not (out / "train.parquet").exists()
        assert process.returncode in (-signal.SIGKILL, 1)
        assert ("run the same command again" in (tmp_path / "log.txt").read_text()) == (how == signal.SIGINT)
        recorded = sum(
            1 for line in (out / "ledger.jsonl").read_bytes().splitlines(keepends=True) if line.endswith(b"\n")
        )
        asked = server.calls
        assert asked - concurrency <= recorded <= asked
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        # Only those can come twice that were on their way when the process died.
        repeated = sum(number - 1 for number in server.requests.values())
        assert repeated == asked - recorded and server.calls == needed + repeated
    assert len(rows(out)) == 27 and report(out)["total"]["recorded"] == recorded
    assert sorted(path.name for path in out.iterdir()) == [
        "ledger.jsonl",
        "rejects.jsonl",
        "report.json",
        "train.parquet",
    ]


def test_calls_that_were_given_up_leave_their_items_for_the_next_run(images, out, capsys):
    broken = {"now": True}

    def script(stage, prompt, number):
        failing = broken["now"] and stage == "validated" and "green square" in prompt
        return Say(status=503, raw=b"busy") if failing else None

    with FakeServer(script) as server:
        with pytest.raises(SystemExit) as ended:
            run(server.url, images, out, "--attempts", "1")
        assert "6 items are unfinished" in ended.value.code and "503" in ended.value.code
        assert len(rows(out)) == 12 and report(out)["complete"] is False and rejects(out) == []
        check_sums(out)
        broken["now"] = False
        before = server.calls
        run(server.url, images, out, "--attempts", "1")
        assert server.calls - before == 6 * 9, "6 verdicts and 8 answers behind each"
    assert len(rows(out)) == 18 and report(out)["complete"] is True


def test_a_server_that_cannot_work_stops_the_run_and_keeps_what_was_paid(images, out):
    def script(stage, prompt, number):
        return Say(status=401, raw=b"bad key") if stage == "agreed" and number == 5 else None

    with FakeServer(script) as server:
        with pytest.raises(SystemExit, match="401.*--api-key-env"):
            run(server.url, images, out, "--concurrency", "2")
        asked = server.calls
        assert asked < CALLS_PER_IMAGE and [path.name for path in out.iterdir()] == ["ledger.jsonl"]
        run(server.url, images, out)
        assert server.calls == 2 * CALLS_PER_IMAGE + 1 and max(server.requests.values()) == 2


def test_two_runs_into_one_folder_are_refused(images, out):
    from data_prep.synthesize.ledger import Ledger

    with FakeServer() as server, Ledger(out / "ledger.jsonl"), pytest.raises(SystemExit, match="another run"):
        run(server.url, images, out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "ftp://x/v1"], "http://localhost"),
        (["--url", "http://me:pw@host/v1"], "--api-key-env"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "not set"),
        (["--images", "/no/such/folder"], "no such folder"),
        (["--min-objects", "20"], "below --min-objects"),
        (["--hard-url", "http://x/v1"], "need --hard-model"),
        (["--prompts", "/no/such/folder"], "--write-prompts"),
        (["--suffix", "<image> again"], "special token"),
    ],
)
def test_options_that_cannot_work_are_refused_before_any_call(images, out, options, message):
    with FakeServer() as server:
        with pytest.raises(SystemExit) as ended:
            run(server.url, images, out, *options)
        assert message in ended.value.code and server.calls == 0
    assert not out.exists()


@pytest.mark.parametrize(
    "options",
    [["--extra-body", '{"model": "x"}'], ["--extra-body", "[1]"], ["--min-agreement", "0.5"], ["--top-p", "0"]],
)
def test_values_out_of_range_are_refused_by_the_parser(images, out, options, capsys):
    with pytest.raises(SystemExit) as ended:
        run("http://localhost:1/v1", images, out, *options)
    assert ended.value.code == 2 and "error: argument" in capsys.readouterr().err


def test_more_fields_of_a_request_are_sent(images, out):
    with FakeServer() as server:
        body = '{"chat_template_kwargs": {"enable_thinking": false}}'
        run(server.url, images, out, "--limit", "1", "--extra-body", body)
        assert all(sent["chat_template_kwargs"] == {"enable_thinking": False} for sent in server.bodies)
