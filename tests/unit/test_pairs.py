"""``pairs``: every layout becomes the same training rows, every fault has its place, and nothing is half-written."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep import convert, pairs, seen, sources
from data_prep.convert import Job, check_source
from data_prep.images import SourceRoot
from data_prep.layouts import Fields, detect
from data_prep.rows import DataError, read_rows
from data_prep.sources import Place, Source, open_source, split_array
from tests.unit import commands


def png(number: int, size: tuple[int, int] = (8, 6)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (number % 256, number // 256, 7)).save(buffer, format="PNG")
    return buffer.getvalue()


run = partial(commands.run, pairs)
refusal = partial(commands.refusal, pairs)


def rows_of(out: Path, split: str = "train") -> list[dict[str, Any]]:
    return [row for _, row in read_rows(out / f"{split}.parquet")]


def write_images(folder: Path, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(png(number))


def write_jsonl(folder: Path, rows: list[dict[str, Any] | bytes], name: str = "set.jsonl") -> Path:
    """Question-answer rows with an image each; a row updates the sound one, and bytes are written as they are."""
    write_images(folder, len(rows))
    lines = []
    for number, row in enumerate(rows):
        sound = {"question": f"Question {number}?", "answer": f"A{number}", "image": f"{number}.png"}
        whole = row if isinstance(row, bytes) else {k: v for k, v in {**sound, **row}.items() if v is not ...}
        lines.append(whole if isinstance(whole, bytes) else json.dumps(whole).encode())
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return folder / name


# Each layout, written so that all say the same: three rows, of which the last has no answer


def question_answer(folder: Path) -> Path:
    return write_jsonl(folder, [{}, {}, {"answer": ...}])


def llava(folder: Path) -> Path:
    write_images(folder, 3)
    turns = [[{"from": "human", "value": f"<image>Question {n}?"}, {"from": "gpt", "value": f"A{n}"}] for n in range(3)]
    turns[2].pop()
    records = [{"id": str(n), "image": f"{n}.png", "conversations": turns[n]} for n in range(3)]
    (folder / "set.json").write_text(json.dumps(records, indent=1))
    return folder / "set.json"


def messages(folder: Path) -> Path:
    write_images(folder, 3)
    records = []
    for n in range(3):
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"Question {n}?"}]}
        said = {"role": "assistant", "content": [{"type": "text", "text": f"A{n}"}]}
        records.append({"messages": [asked] if n == 2 else [asked, said], "images": [f"{n}.png"]})
    (folder / "set.json").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "set.json"


def verl(folder: Path) -> Path:
    folder.mkdir(parents=True)
    records = [
        {
            "data_source": "set",
            "prompt": [{"role": "user", "content": f"<image>Question {n}?"}],
            "images": [{"bytes": png(n)}],
            "reward_model": None if n == 2 else {"ground_truth": f"A{n}", "style": "rule"},
        }
        for n in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(records), folder / "set.parquet")
    return folder / "set.parquet"


def shards(folder: Path) -> Path:
    folder = folder / "set"
    folder.mkdir(parents=True)
    records = [
        {"question": f"Question {n}?", "answer": None if n == 2 else f"A{n}", "image": {"bytes": png(n), "path": None}}
        for n in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(records[:2]), folder / "train-0.parquet")
    typed = pa.Table.from_pylist(records).slice(2)
    pq.write_table(typed, folder / "train-1.parquet")
    return folder


def saved_dataset(folder: Path) -> Path:
    import datasets

    columns: dict[str, Any] = {"question": [f"Question {n}?" for n in range(3)], "answer": ["A0", "A1", None]}
    columns["image"] = [Image.open(io.BytesIO(png(n))) for n in range(3)]
    datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image()).save_to_disk(folder / "set")
    return folder / "set"


LAYOUTS = {
    question_answer: "JSONL, question-answer",
    llava: "JSON array, conversations",
    messages: "JSONL, conversations",
    verl: "parquet, verl",
    shards: "parquet, question-answer",
    saved_dataset: "saved dataset, question-answer",
}


@pytest.mark.parametrize(("make", "told"), LAYOUTS.items(), ids=[make.__name__ for make in LAYOUTS])
def test_each_layout_is_told_and_gives_the_same_rows(tmp_path, capsys, make, told):
    source = make(tmp_path / "in")
    run("--source", source, "--out", tmp_path / "out")
    printed = capsys.readouterr().out
    assert f"reading {source}: {told} (question: " in printed and "rows with an answer: 2 of 3" in printed
    written = rows_of(tmp_path / "out")
    assert len(written) == 3
    for n, row in enumerate(written):
        answer = None if n == 2 else f"A{n}"
        assert row["data_source"] == "set"
        assert row["prompt"] == [{"role": "user", "content": f"<image>Question {n}?"}]
        assert row["reward_model"] == (answer and {"style": "rule", "ground_truth": answer})
        extra = {"split": "train", "index": n, "question": f"Question {n}?", "answer": answer}
        assert row["extra_info"] == extra and len(row["images"]) == 1
        pixels = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        assert pixels.convert("RGB").getpixel((0, 0)) == (n, 0, 7)


def test_images_are_the_very_bytes_of_the_source(tmp_path):
    run("--source", question_answer(tmp_path / "in"), "--out", tmp_path / "out")
    assert [row["images"][0] for row in rows_of(tmp_path / "out")] == [
        {"bytes": png(n), "path": f"{n}.png"} for n in range(3)
    ]


CONVERSATION = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "First?"},
    {"from": "gpt", "value": "one"},
    {"from": "human", "value": "Second?"},
    {"from": "gpt", "value": "two"},
]


@pytest.mark.parametrize(("turn", "asked", "answer"), [("first", 2, "one"), ("last", 4, "two")])
def test_one_question_of_a_conversation_is_asked(tmp_path, capsys, turn, asked, answer):
    write_images(tmp_path, 1)
    (tmp_path / "set.json").write_text(json.dumps([{"image": "0.png", "conversations": CONVERSATION}]))
    run("--source", tmp_path / "set.json", "--out", tmp_path / "out", "--turn", turn)
    (row,) = rows_of(tmp_path / "out")
    contents = [each["value"] for each in CONVERSATION[:asked]]
    contents[1] = "<image>First?"
    assert [each["content"] for each in row["prompt"]] == contents
    assert row["reward_model"]["ground_truth"] == answer
    assert ("conversations that go on behind the answer: 1" in capsys.readouterr().out) == (turn == "first")


# Fields


def test_fields_are_named_where_several_can_be_meant(tmp_path):
    source = write_jsonl(tmp_path / "in", [{"solution": "S"}] * 2)
    assert "the answer can be in answer or solution; name one with --answer-field" in refusal(
        tmp_path / "out", "--source", source
    )
    run("--source", source, "--out", tmp_path / "out", "--answer-field", "solution")
    assert {row["reward_model"]["ground_truth"] for row in rows_of(tmp_path / "out")} == {"S"}


def test_a_field_may_lie_inside_another(tmp_path):
    rows = [{"answer": ..., "meta": {"final": {"text": "deep"}}}]
    run("--source", write_jsonl(tmp_path / "in", rows), "--out", tmp_path / "out", "--answer-field", "meta.final.text")
    assert rows_of(tmp_path / "out")[0]["reward_model"]["ground_truth"] == "deep"


def test_fields_that_become_no_part_of_a_row_are_told(tmp_path, capsys):
    run("--source", write_jsonl(tmp_path / "in", [{"options": ["x", "y"], "id": 1}]), "--out", tmp_path / "out")
    assert "not used: id, options" in capsys.readouterr().out


UNCLEAR = {
    "no question": ([{"question": ..., "text": "Q"}], [], "the question is in none of question, problem"),
    "no image": ([{"image": ..., "photo": "0.png"}], [], "the image is in none of"),
    "field unknown": ([{}], ["--image-field", "foto"], "--image-field foto: its first rows have no such field"),
    "mixed": ([{}, {"conversations": []}], [], "several layouts (1 rows question-answer, 1 rows conversations)"),
    "all broken": ([b"{", b"{"], [], "its first rows are all broken"),
    "empty": ([b""], [], "it is empty"),
    "text": ([b"hello"], [], "it starts with b'hello"),
}


@pytest.mark.parametrize(("rows", "options", "reason"), UNCLEAR.values(), ids=UNCLEAR)
def test_what_is_not_clear_is_asked(tmp_path, rows, options, reason):
    source = write_jsonl(tmp_path / "in", rows)
    message = refusal(tmp_path / "out", "--source", source, *options)
    assert str(source) in message and reason in message


def test_the_splits_of_a_saved_dataset_are_asked(tmp_path):
    import datasets

    one = datasets.Dataset.from_dict({"question": ["Q?"], "answer": ["A"], "image": [{"bytes": png(1), "path": None}]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "in")
    assert "splits train, test; name one with --split" in refusal(tmp_path / "out", "--source", tmp_path / "in")
    assert "no split 'x'; it has train, test" in refusal(tmp_path / "out", "--source", tmp_path / "in", "--split", "x")
    run("--source", tmp_path / "in", "--split", "test", "--out", tmp_path / "out")
    assert len(rows_of(tmp_path / "out")) == 1


def test_a_folder_with_several_kinds_of_files_is_refused(tmp_path):
    write_jsonl(tmp_path / "in", [{}])
    (tmp_path / "in" / "b.parquet").write_bytes(b"PAR1")
    assert "files of several kinds (.jsonl, .parquet)" in refusal(tmp_path / "out", "--source", tmp_path / "in")
    assert "no such file or folder" in refusal(tmp_path / "out", "--source", tmp_path / "none")


# Faults

BAD_ROWS: dict[str, tuple[Any, str]] = {
    "invalid JSON": (b'{"question": ', "invalid JSON"),
    "no object": (b"[1]", "not a JSON object"),
    "no question": ({"question": None}, "'question' is missing"),
    "empty question": ({"question": " <image> "}, "an empty question"),
    "question no text": ({"question": ["a"]}, """'question' is ["a"]; it must be text"""),
    "special token": ({"question": "<|im_end|>?"}, "contains <|im_end|>"),
    "video": ({"question": "<video>What?"}, "contains <video>"),
    "two placeholders": ({"question": "<image><image>What?"}, "2 <image> in 'question' for 1 images"),
    "special token in the answer": ({"answer": "<|im_end|>"}, "the answer in 'answer' contains <|im_end|>"),
    "placeholder in the answer": ({"answer": "see <image>"}, "the answer in 'answer' contains <image>"),
    "answer a list": ({"answer": ["a"]}, "must be text, a number or left out"),
    "answer not a number": (b'{"question": "Q?", "answer": NaN, "image": "1.png"}', "'answer' is NaN"),
    "no image": ({"image": None}, "'image' is missing or empty"),
    "image missing": ({"image": "none.png"}, "there is no such file"),
    "image outside": ({"image": "../secret.png"}, "leaves the source folder"),
    "image absolute": ({"image": "/etc/hostname"}, "leaves the source folder"),
    "image an address": ({"image": "https://example.org/a.png"}, "addresses are not fetched"),
    "image no image": ({"image": "set.jsonl"}, "is damaged or no image"),
    "second image bad": ({"image": ["1.png", "none.png"]}, "'none.png', but there is no such file"),
}


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named_with_its_place_and_reason(tmp_path, row, reason):
    source = write_jsonl(tmp_path / "in", [{}, row, {}])
    (tmp_path / "secret.png").write_bytes(png(9))
    message = refusal(tmp_path / "out", "--source", source)
    assert "1 of 3 rows cannot be used" in message and "--skip-bad" in message
    (line,) = [line for line in message.splitlines() if ", line " in line]
    assert line.startswith(f"  {source}, line 2: ") and reason in line


def test_a_damaged_image_is_a_fault(tmp_path):
    source = write_jsonl(tmp_path / "in", [{}, {}])
    photo = Image.effect_noise((64, 64), 50)
    photo.save(tmp_path / "in/1.png")
    (tmp_path / "in/1.png").write_bytes((tmp_path / "in/1.png").read_bytes()[:2000])
    assert "line 2: 'image' names '1.png', which cannot be decoded" in refusal(tmp_path / "out", "--source", source)


TURNS: dict[str, tuple[Any, str]] = {
    "no list": ("hello", """'conversations' is "hello"; it must be a list of turns"""),
    "unknown role": ([{"from": "bot", "value": "x"}], """a turn of "bot"; known are human, user"""),
    "no role": ([{"value": "x"}], "a turn of null"),
    "no text": ([{"from": "human", "value": 3}], "the content 3; it must be text"),
    "no turn": (["x"], """the turn "x"; it must have a role and text"""),
    "unknown part": ([{"from": "human", "value": [{"type": "video"}]}], "known are text and image"),
    "answer first": ([{"from": "gpt", "value": "x"}], "does not end with the user's question"),
}


@pytest.mark.parametrize(("turns", "reason"), TURNS.values(), ids=TURNS)
def test_a_bad_conversation_is_named_by_its_row(tmp_path, turns, reason):
    write_images(tmp_path, 1)
    sound = [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": "A"}]
    records = [{"image": "0.png", "conversations": each} for each in (sound, turns)]
    (tmp_path / "set.json").write_text(json.dumps(records))
    message = refusal(tmp_path / "out", "--source", tmp_path / "set.json", "--layout", "conversations")
    assert f"{tmp_path}/set.json, row 1: " in message and reason in message


def test_placeholders_go_in_front_of_the_question_for_all_images(tmp_path):
    run("--source", write_jsonl(tmp_path / "in", [{"image": ["0.png", "0.png"]}]), "--out", tmp_path / "out")
    (row,) = rows_of(tmp_path / "out")
    assert row["prompt"][0]["content"] == "<image><image>Question 0?" and len(row["images"]) == 2


def test_skip_bad_leaves_them_out_and_lists_them(tmp_path, capsys):
    source = write_jsonl(tmp_path / "in", [{}, {"question": "", "image": None}, b"{", {}])
    run("--source", source, "--out", tmp_path / "out", "--skip-bad")
    assert [row["extra_info"]["question"] for row in rows_of(tmp_path / "out")] == ["Question 0?", "Question 3?"]
    rejects = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert [(reject["file"], reject["line"]) for reject in rejects] == [(str(source), 2), (str(source), 3)]
    assert "rows left out: 2" in capsys.readouterr().out


def test_a_row_without_an_answer_is_a_fault_where_answers_are_needed(tmp_path):
    source = write_jsonl(tmp_path / "in", [{}, {"answer": None}])
    assert "line 2: it has no answer" in refusal(tmp_path / "out", "--source", source, "--need-answer")


@pytest.mark.parametrize(("answer", "recipes"), [("A", {"rp_opsd", "opsd"}), (None, {"rp_opsd"})])
def test_the_closing_lines_train_what_the_rows_allow(tmp_path, capsys, answer, recipes):
    run("--source", write_jsonl(tmp_path / "in", [{"answer": answer}, {}]), "--out", tmp_path / "out")
    printed = capsys.readouterr().out
    for recipe in ("rp_opsd", "opsd"):
        command = f"python -m opd_recipes --config-name {recipe} data.train_files={tmp_path}/out/train.parquet"
        assert (command in printed) == (recipe in recipes)


def test_names_of_rows(tmp_path):
    source = write_jsonl(tmp_path / "in", [{"data_source": "own"}, {}])
    run("--source", source, "--out", tmp_path / "a")
    assert [row["data_source"] for row in rows_of(tmp_path / "a")] == ["own", "set"]
    run("--source", source, "--out", tmp_path / "b", "--data-source", "mine")
    assert [row["data_source"] for row in rows_of(tmp_path / "b")] == ["mine", "mine"]


# Where images are


def test_images_lie_in_another_folder_or_at_an_address_that_the_user_names(tmp_path):
    import fsspec

    source = write_jsonl(tmp_path / "in", [{}])
    (tmp_path / "in/0.png").rename(tmp_path / "0.png")
    run("--source", source, "--images", tmp_path, "--out", tmp_path / "a")
    with fsspec.open("memory://pairs/0.png", "wb") as file:
        file.write(png(0))
    run("--source", source, "--images", "memory://pairs", "--out", tmp_path / "b")
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


def test_a_source_at_an_address_has_its_images_beside_it(tmp_path):
    import fsspec

    for name, data in (("set.jsonl", b'{"question": "Q?", "image": "0.png"}\n'), ("0.png", png(0))):
        with fsspec.open(f"memory://beside/{name}", "wb") as file:
            file.write(data)
    run("--source", "memory://beside/set.jsonl", "--out", tmp_path / "out")
    assert rows_of(tmp_path / "out")[0]["images"][0]["bytes"] == png(0)


@pytest.mark.parametrize("make", [llava, verl])
def test_each_kind_of_file_is_read_from_an_address(tmp_path, make):
    import fsspec

    source = make(tmp_path / "in")
    for file in source.parent.iterdir():
        with fsspec.open(f"memory://remote/{file.name}", "wb") as remote:
            remote.write(file.read_bytes())
    run("--source", source, "--out", tmp_path / "a")
    run("--source", f"memory://remote/{source.name}", "--out", tmp_path / "b")
    assert rows_of(tmp_path / "a") == rows_of(tmp_path / "b")


def test_a_row_cannot_name_where_anything_is_written(tmp_path):
    source = write_jsonl(tmp_path / "in", [{"data_source": "../../x", "id": "/tmp/x", "question": "../y"}])
    run("--source", source, "--out", tmp_path / "out")
    assert {file.name for file in tmp_path.iterdir()} == {"in", "out"}
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["train.parquet"]


# Validation rows


@pytest.mark.parametrize("seed", range(3))
def test_no_image_is_on_both_sides_even_under_other_names_and_encodings(tmp_path, seed):
    """Ten pictures, each asked twice: once from a PNG, once from a copy with another compression and name."""
    write_images(tmp_path, 10)
    lines = []
    for n in range(10):
        Image.open(tmp_path / f"{n}.png").save(tmp_path / f"copy{n}.png", compress_level=0)
        lines += [{"question": f"{n}?", "answer": "A", "image": name} for name in (f"{n}.png", f"copy{n}.png")]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    run("--source", tmp_path / "set.jsonl", "--out", out, "--val-fraction", "0.3", "--seed", seed)
    train, val = rows_of(out), rows_of(out, "val")
    assert (len(train), len(val)) == (14, 6)
    assert not {r["extra_info"]["question"] for r in train} & {r["extra_info"]["question"] for r in val}
    assert [r["extra_info"]["index"] for r in val] == list(range(6))


# All or nothing

KILL = """
import argparse, os, signal
from data_prep import {module}, pairs
from data_prep.rows import RowWriter
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{module}.{name} = kill
parser = argparse.ArgumentParser()
pairs.add_arguments(parser)
pairs.run(parser.parse_args({arguments!r}))
"""


@pytest.mark.parametrize(("module", "name"), [("pairs", "write"), ("convert", "write_rejects")])
def test_a_kill_leaves_nothing_half_written(tmp_path, capsys, module, name):
    """Between the passes, and with all rows written but the last file not."""
    out = tmp_path / "out"
    arguments = ["--source", str(write_jsonl(tmp_path / "in", [{}, b"{", {}])), "--out", str(out), "--skip-bad"]
    code = KILL.format(module=module, name=name, arguments=arguments)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGKILL
    visible = [file for file in out.glob("*") if not file.name.startswith(".")] if out.exists() else []
    assert not visible
    hidden = {file.name for file in out.glob(".*")} - {seen.NAME}
    run(*arguments)
    assert len(rows_of(out)) == 2
    assert capsys.readouterr().out.count("was left by a run that was killed; remove it") == len(hidden)


def test_a_run_goes_on_where_a_killed_one_was(tmp_path, monkeypatch, capsys):
    out, source = tmp_path / "out", write_jsonl(tmp_path / "in", [{}, {}, {}, {}])
    arguments = ["--source", str(source), "--out", str(out)]
    code = KILL.format(module="pairs", name="write", arguments=[*arguments, "--limit", "3"])
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGKILL
    with (out / seen.NAME).open("ab") as file:
        file.write(b"torn by the kill")
    decoded: list[str | None] = []
    check = seen.check_decodes
    monkeypatch.setattr(seen, "check_decodes", lambda *a: decoded.append(a[2]) or check(*a))
    run(*arguments)
    assert decoded == ["3.png"] and "going on: 3 images were decoded" in capsys.readouterr().out
    assert [row["images"][0]["bytes"] for row in rows_of(out)] == [png(n) for n in range(4)]
    assert [file.name for file in out.iterdir()] == ["train.parquet"]


def test_a_file_of_the_same_name_is_decoded_again(tmp_path):
    source = write_jsonl(tmp_path / "in", [{}, {"question": ""}])
    assert "1 of 2 rows" in refusal(tmp_path / "out", "--source", source)
    (tmp_path / "in/0.png").write_bytes(b"no image any more")
    assert "2 of 2 rows" in refusal(tmp_path / "out", "--source", source)


@pytest.mark.parametrize("change", ["image", "question", "row gone", "image gone"])
def test_a_source_that_changes_between_the_passes_leaves_nothing(tmp_path, monkeypatch, change):
    source = write_jsonl(tmp_path / "in", [{}, {}, {}])

    def check_then_change(job):
        checked = check_source(job)
        lines = source.read_text().splitlines()
        if change == "image":
            (tmp_path / "in/2.png").write_bytes(png(99))
        elif change == "image gone":
            (tmp_path / "in/2.png").unlink()
        else:
            lines[2:] = [lines[2].replace("Question", "Quiz")] if change == "question" else []
            source.write_text("\n".join(lines))
        return checked

    monkeypatch.setattr(pairs, "check_source", check_then_change)
    message = refusal(tmp_path / "out", "--source", source)
    assert "meanwhile" in message and "run again" in message and str(source) in message


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert.RowWriter, "_flush", full)
    message = refusal(tmp_path / "out", "--source", write_jsonl(tmp_path / "in", [{}]))
    assert "No space left on device" in message and "nothing was written" in message


def test_the_files_have_ordinary_rights(tmp_path):
    run("--source", write_jsonl(tmp_path / "in", [{}]), "--out", tmp_path / "out")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out/train.parquet").stat().st_mode & 0o777 == 0o666 & ~mask


# Memory


class Counted(dict):
    """A record that knows how many of its kind are alive."""

    alive = most = 0

    def __init__(self, **fields: Any):
        super().__init__(fields)
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)

    def __del__(self):
        Counted.alive -= 1


def test_a_long_source_is_never_held_whole(tmp_path):
    def many() -> Iterator[tuple[Place, dict[str, Any]]]:
        for n in range(600):
            yield Place("many", n), Counted(question=f"{n}?", answer="A", image={"bytes": png(n), "path": None})

    job = Job(
        Source("generator", ("many",), ".", many),
        detect([{"question": "Q", "answer": "A", "image": b""}], None, Fields(), False),
        SourceRoot(tmp_path),
    )
    checked = check_source(job)
    assert len(checked) == 600 and not any(row.reasons for row in checked)
    assert convert.write(job, tmp_path / "out", checked, set(), [], "many") == {"train": 600}
    assert Counted.most <= 3 * convert.ROWS_AT_ONCE, "as many as are worked on, not as many as there are"


class Endless(io.RawIOBase):
    """A JSON array that never ends; it counts what was read."""

    def __init__(self) -> None:
        self.taken = 0
        self.start = b"["

    def read(self, size: int = -1) -> bytes:
        start, self.start = self.start, b""
        self.taken += size
        return start + (b'{"a": "]}, [\\"{"}, ' * (size // 20 + 1))[: size - size % 20 - len(start)]


def test_a_json_array_is_read_as_far_as_it_is_needed(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 200)
    file = Endless()
    elements = split_array(file, "endless")  # type: ignore[arg-type]
    assert next(elements).startswith(b'{"a"')
    assert file.taken <= 400


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
def test_a_json_array_is_cut_into_its_elements_at_any_chunk_size(monkeypatch, chunk):
    records = [{"a": '"]},[{\\'}, {"b": [1, {"c": "\\"}]}, "text, [", 3, [], {"é": "\u2028\\\\"}]
    monkeypatch.setattr(sources, "CHUNK", chunk)
    text = "\ufeff \n" + json.dumps(records, ensure_ascii=False, indent=1) + "\n"
    assert [json.loads(item) for item in split_array(io.BytesIO(text.encode()), "f")] == records


BROKEN_ARRAYS = {
    "truncated": (b'[{"a": 1}, {"a"', "ends in the middle of row 1; is the download complete?"),
    "truncated in a string": (b'[{"a": 1}, {"a": "x', "ends in the middle of row 1"),
    "more": (b'[{"a": 1}]\n[{"a": 2}]', "more behind the array's end, after row 0"),
    "too long": (b'[{"a": "' + b"x" * 100 + b'"}]', "row 0: it is longer than"),
}


@pytest.mark.parametrize(("data", "reason"), BROKEN_ARRAYS.values(), ids=BROKEN_ARRAYS)
def test_a_broken_json_array_is_told(monkeypatch, data, reason):
    monkeypatch.setattr(sources, "MAX_RECORD", 50)
    monkeypatch.setattr(sources, "CHUNK", 10)
    with pytest.raises(DataError, match="f.json.*") as told:
        list(split_array(io.BytesIO(data), "f.json"))
    assert reason in str(told.value)


def test_a_broken_element_spoils_no_other(tmp_path):
    write_images(tmp_path, 3)
    record = '{"question": "Q?", "answer": "A", "image": "%d.png"}'
    (tmp_path / "set.json").write_text(f"[{record % 0}, {{broken}}, {record % 2}]")
    found = list(open_source(tmp_path / "set.json").records())
    assert [place.number for place, _ in found] == [0, 1, 2]
    message = refusal(tmp_path / "out", "--source", tmp_path / "set.json")
    assert "1 of 3 rows" in message and "set.json, row 1: invalid JSON" in message


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_RECORD", 1000)
    source = write_jsonl(tmp_path / "in", [{}, {"question": "x" * 2000}])
    assert f"{source}, line 2: it is longer than" in refusal(tmp_path / "out", "--source", source)
