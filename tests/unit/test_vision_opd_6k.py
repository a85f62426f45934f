"""The converter of the published Vision-OPD-6K layout: photographs there and back, and every fault with its line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep import vision_opd_6k
from data_prep.__main__ import main
from tests.photos import ORIENTATION, PHOTOS, STUDENT_VIEW, TEACHER_VIEW, make_vision_opd_6k

FIELDS = {"images": "images", "bbox_images": "teacher_images"}


def convert(source: Path, out: Path, *options: str) -> None:
    main(["vision-opd-6k", "--source", str(source), "--out", str(out), *options])


def refusal(source: Path, out: Path, *options: str) -> str:
    """The message of a run that must fail, and leave nothing."""
    with pytest.raises(SystemExit) as stopped:
        convert(source, out, *options)
    assert isinstance(stopped.value.code, str), "a message as exit code is printed, and the process ends with 1"
    assert not out.exists() or not list(out.iterdir())
    return stopped.value.code


def source_rows(source: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (source / "train.jsonl").read_text().splitlines()]


def name_of(entry: str | dict) -> str:
    return entry["path"] if isinstance(entry, dict) else entry


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return make_vision_opd_6k(tmp_path_factory.mktemp("vision_opd_6k"))


@pytest.fixture(scope="module")
def converted(photos, tmp_path_factory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("out")
    convert(photos, out)
    assert [file.name for file in out.iterdir()] == ["train.parquet"]
    return pq.read_table(out / "train.parquet").to_pylist()


def write_source(folder: Path, rows: list[dict[str, Any] | bytes]) -> Path:
    """A source of small images, one for each row; a row updates the sound one, and bytes are written as they are."""
    for field in FIELDS.values():
        (folder / field).mkdir(parents=True)
    lines = []
    for number, row in enumerate(rows, start=1):
        for field in FIELDS.values():
            Image.new("RGB", (40, 30), (number, 0, len(field))).save(folder / field / f"{number}.png")
        sound = {"problem": f"<image>Question {number}?", "answer": "B"}
        sound |= {field: [f"{field}/{number}.png"] for field in FIELDS.values()}
        lines.append(row if isinstance(row, bytes) else json.dumps({**sound, **row}).encode())
    (folder / "train.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return folder


# The photographs


def test_the_set_has_the_variety_that_a_real_one_has(photos):
    images = {n: Image.open(photos / "images" / f"{n:06d}{p.suffix}") for n, p in enumerate(PHOTOS, start=1)}
    crops = [Image.open(photos / "teacher_images" / f"{n:06d}{p.suffix}") for n, p in enumerate(PHOTOS, start=1)]
    assert {image.format for image in images.values()} == {"JPEG", "PNG"}
    assert {image.mode for image in images.values()} == {"RGB", "RGBA", "L", "P"}
    assert images[4].getchannel("A").getextrema() == (0, 255)
    assert [n for n, image in images.items() if image.getexif().get(ORIENTATION) == 6] == [5]
    ratios = [image.width / image.height for image in images.values()]
    assert max(ratios) == 5 and min(ratios) < 1 / 5
    assert min(crop.height for crop in crops) == 32


def test_student_images_have_the_red_box_and_teacher_images_are_the_evidence_at_twice_its_size(photos):
    lossless = [(n, p) for n, p in enumerate(PHOTOS, start=1) if p.suffix == ".png" and p.store.__name__ == "_as_is"]
    assert lossless
    for number, photo in lossless:
        boxed = Image.open(photos / "images" / f"{number:06d}.png")
        crop = Image.open(photos / "teacher_images" / f"{number:06d}.png")
        x0, y0, x1, y1 = photo.box
        assert boxed.getpixel((x0 - 4, (y0 + y1) // 2)) == (255, 0, 0)
        assert boxed.tobytes() == STUDENT_VIEW(photo.load(), photo.box).tobytes()
        assert crop.size == (2 * (x1 - x0), 2 * (y1 - y0))
        assert crop.tobytes() == TEACHER_VIEW(photo.load(), photo.box).tobytes()


def test_the_set_is_the_same_each_time(photos, tmp_path):
    again = make_vision_opd_6k(tmp_path)
    files = sorted(file.relative_to(photos) for file in photos.rglob("*") if file.is_file())
    assert len(files) == 2 * len(PHOTOS) + 1
    assert all((photos / file).read_bytes() == (again / file).read_bytes() for file in files)


# There and back


def test_each_row_arrives_with_its_columns(photos, converted):
    rows = source_rows(photos)
    assert len(converted) == len(rows) == len(PHOTOS)
    for index, (row, given, photo) in enumerate(zip(converted, rows, PHOTOS, strict=True)):
        assert set(row) == {
            *("data_source", "prompt", "images", "bbox_images", "ability", "reward_model", "extra_info"),
        }
        assert (row["data_source"], row["ability"]) == ("vision_opd_6k", "vqa")
        (message,) = row["prompt"]
        assert message["role"] == "user" and message["content"].count("<image>") == 1
        assert message["content"].removeprefix("<image>") == given["problem"].removeprefix("<image>")
        question = given["problem"].removeprefix("<image>").strip()
        assert row["extra_info"] == {"split": "train", "index": index, "question": question, "answer": photo.answer}
        assert row["reward_model"] == (photo.answer and {"style": "rule", "ground_truth": photo.answer})


def test_images_are_the_same_bytes_under_the_same_names(photos, converted):
    for row, given in zip(converted, source_rows(photos), strict=True):
        for column, field in FIELDS.items():
            name = name_of(given[field][0])
            assert row[column] == [{"bytes": (photos / name).read_bytes(), "path": name}]


def test_training_decodes_them_upright_and_to_the_right_size(converted):
    from opd_recipes.images import decode

    for row, photo in zip(converted, PHOTOS, strict=True):
        upright = photo.load()
        image, crop = decode(row["images"][0]), decode(row["bbox_images"][0])
        x0, y0, x1, y1 = photo.box
        assert (image.mode, image.size) == ("RGB", upright.size)
        assert (crop.mode, crop.size) == ("RGB", (2 * (x1 - x0), 2 * (y1 - y0)))


def test_the_training_side_takes_every_row(photos, tmp_path, monkeypatch):
    """Both views of each row, drawn and measured by the dataset that trains."""
    dataset = pytest.importorskip("opd_recipes.dataset")
    from hydra import compose, initialize_config_module
    from transformers import AutoProcessor

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    convert(photos, tmp_path)
    with initialize_config_module("opd_recipes.config", version_base=None):
        config = compose(overrides=["data.max_prompt_length=2000", "+overlay=vision_opd_6k"], config_name="vision_opd")
    processor = AutoProcessor.from_pretrained(Path(vision_opd_6k.__file__).parent / "toy/base", local_files_only=True)
    rows = dataset.TwoViewDataset(
        data_files=[str(tmp_path / "train.parquet")],
        tokenizer=processor.tokenizer,
        processor=processor,
        config=config.data,
    )
    assert len(rows) == len(PHOTOS)
    for row, photo in zip(rows, PHOTOS, strict=True):
        (student,), (teacher,) = (row["opd_images"].render(rows.recipe.views[name]) for name in ("student", "teacher"))
        x0, y0, x1, y1 = photo.box
        assert student.size == photo.load().size and teacher.size == (2 * (x1 - x0), 2 * (y1 - y0))


def test_a_file_has_bounded_row_groups_and_keeps_the_order(tmp_path, monkeypatch):
    monkeypatch.setattr(vision_opd_6k, "ROWS_PER_GROUP", 4)
    convert(write_source(tmp_path / "in", [{}] * 10), tmp_path / "out")
    file = pq.ParquetFile(tmp_path / "out/train.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [4, 4, 2]
    questions = [row["extra_info"]["question"] for row in file.read().to_pylist()]
    assert questions == [f"Question {number}?" for number in range(1, 11)]


def test_limit_takes_the_first_rows_only(tmp_path):
    source = write_source(tmp_path / "in", [{}, {}, b"{broken", {}])
    convert(source, tmp_path / "out", "--limit", "2")
    assert pq.read_table(tmp_path / "out/train.parquet").num_rows == 2


def test_the_closing_line_trains_on_what_was_written(tmp_path, capsys):
    out = tmp_path / "out"
    convert(write_source(tmp_path / "in", [{}] * 4), out, "--val-fraction", "0.25")
    printed = capsys.readouterr().out
    assert f"wrote 3 rows to {out}/train.parquet" in printed and f"1 rows to {out}/val.parquet" in printed
    assert (
        "python -m opd_recipes --config-name vision_opd +overlay=vision_opd_6k "
        f"data.train_files={out}/train.parquet data.val_files={out}/val.parquet actor_rollout_ref.model.path=MODEL"
    ) in printed


@pytest.mark.parametrize(
    ("given", "kept"), [("B", "B"), (" B ", "B"), (3, "3"), (2.5, "2.5"), (None, None), ("", None), ("  ", None)]
)
def test_answers_become_text_or_nothing(tmp_path, given, kept):
    convert(write_source(tmp_path / "in", [{"answer": given}, {}]), tmp_path / "out")
    row, sound = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert row["extra_info"]["answer"] == kept
    assert row["reward_model"] == (kept and {"style": "rule", "ground_truth": kept})
    assert sound["reward_model"]["ground_truth"] == "B"


def test_no_row_needs_an_answer(tmp_path, capsys):
    convert(write_source(tmp_path / "in", [{"answer": None}] * 2), tmp_path / "out")
    table = pq.read_table(tmp_path / "out/train.parquet")
    assert table.column("reward_model").to_pylist() == [None, None]
    assert table.schema.field("reward_model").type.names == ["style", "ground_truth"]
    assert "rows without an answer: 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("problem", "content"),
    [
        ("What?", "<image>What?"),
        ("<image>What?", "<image>What?"),
        ("<image>\nWhat?", "<image>\nWhat?"),
        ("What is <image> here?", "What is <image> here?"),
    ],
)
def test_a_prompt_has_one_placeholder(tmp_path, problem, content):
    convert(write_source(tmp_path / "in", [{"problem": problem}]), tmp_path / "out")
    (row,) = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert row["prompt"] == [{"role": "user", "content": content}]


def test_blank_lines_and_a_byte_order_mark_do_not_matter(tmp_path):
    source = write_source(tmp_path / "in", [{}, {}])
    lines = (source / "train.jsonl").read_bytes().splitlines()
    (source / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n" + lines[1])
    convert(source, tmp_path / "out")
    assert pq.read_table(tmp_path / "out/train.parquet").num_rows == 2


# Validation rows


def test_validation_rows_are_drawn_by_the_seed(tmp_path):
    source = write_source(tmp_path / "in", [{}] * 20)
    draws = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        convert(source, tmp_path / name, "--val-fraction", "0.25", "--seed", seed)
        train, val = (pq.read_table(tmp_path / name / f"{s}.parquet").to_pylist() for s in ("train", "val"))
        assert (len(train), len(val)) == (15, 5)
        assert [row["extra_info"]["index"] for row in val] == list(range(5))
        assert {row["extra_info"]["split"] for row in val} == {"val"}
        questions = [row["extra_info"]["question"] for row in train + val]
        assert len(set(questions)) == 20
        draws.append(questions[15:])
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize("seed", range(4))
def test_no_image_is_in_both_files_and_validation_rows_have_answers(photos, tmp_path, seed):
    convert(photos, tmp_path, "--val-fraction", "0.5", "--seed", str(seed))
    train, val = (pq.read_table(tmp_path / f"{s}.parquet").to_pylist() for s in ("train", "val"))
    assert len(train) + len(val) == len(PHOTOS) and 5 <= len(val) <= 6
    assert not {r["images"][0]["bytes"] for r in train} & {r["images"][0]["bytes"] for r in val}
    assert all(row["reward_model"] for row in val)


def test_a_fraction_that_cannot_be_set_aside_is_refused(tmp_path):
    assert "leave the option out" in refusal(
        write_source(tmp_path / "in", [{"answer": None}] * 3), tmp_path / "out", "--val-fraction", "0.5"
    )


@pytest.mark.parametrize("options", [("--val-fraction", "1"), ("--val-fraction", "-0.1"), ("--limit", "0")])
def test_options_out_of_range_are_refused(tmp_path, options, capsys):
    with pytest.raises(SystemExit) as stopped:
        convert(tmp_path, tmp_path / "out", *options)
    assert stopped.value.code == 2 and options[0] in capsys.readouterr().err


# Faults

BAD_ROWS = {
    "invalid JSON": (b'{"problem": "<image>Que"', "invalid JSON (Expecting ',' delimiter at column 25)"),
    "not UTF-8": (b'{"problem": "\xff"}', "invalid JSON ('utf-8' codec"),
    "half a character": (b'{"problem": "\\ud800"}', "invalid JSON ('utf-8' codec"),
    "no object": (b"[1, 2]", "the line is not a JSON object but [1, 2]"),
    "no problem": ({"problem": None}, "'problem' is missing"),
    "problem is no text": ({"problem": 3}, "'problem' is 3; it must be text"),
    "empty problem": ({"problem": "  "}, "'problem' is empty"),
    "nothing but the placeholder": ({"problem": "<image> \n"}, "'problem' is empty"),
    "two placeholders": ({"problem": "<image><image>What?"}, "'problem' has <image> 2 times"),
    "a video": ({"problem": "<image><video>What?"}, "'problem' contains <video>"),
    "a special token": ({"problem": "<image>What?<|im_end|>"}, "'problem' contains <|im_end|>"),
    "answer is no text": ({"answer": ["A"]}, """'answer' is ["A"]; it must be text"""),
    "no images": ({"images": None}, "'images' is missing or empty"),
    "empty images": ({"images": []}, "'images' is missing or empty"),
    "images is no list": ({"images": "images/1.png"}, "it must be a list of paths"),
    "no teacher images": ({"teacher_images": None}, "'teacher_images' is missing or empty"),
    "counts differ": ({"images": ["images/1.png"] * 2}, "2 in 'images' but 1 in 'teacher_images'"),
    "two images": ({f: [f"{f}/1.png"] * 2 for f in FIELDS.values()}, "2 in 'images'; a row of this set has one image"),
    "bytes": ({"images": [{"bytes": "aGk=", "path": None}]}, "'images' holds an image's bytes"),
    "entry is no path": ({"images": [7]}, "'images' has the entry 7"),
    "no such image": ({"images": ["images/none.png"]}, "'images' names 'images/none.png', but there is no such file"),
    "a folder": ({"teacher_images": ["images"]}, "'teacher_images' names 'images', but there is no such file"),
    "no path at all": ({"images": ["images/\0.png"]}, "which cannot be read"),
    "name too long": ({"images": ["x" * 300]}, "which cannot be read"),
    "out by dots": ({"images": ["images/../../secret.png"]}, "which leaves the source folder"),
    "out by dots in a dict": ({"images": [{"path": "../secret.png"}]}, "which leaves the source folder"),
    "dots that stay": ({"images": ["images/../images/1.png"]}, "which leaves the source folder"),
    "absolute": ({"teacher_images": ["/etc/hostname"]}, "'teacher_images' names '/etc/hostname', which leaves"),
}


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named_with_its_line_and_reason(tmp_path, row, reason):
    source = write_source(tmp_path / "in", [{}, row, {}])
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    message = refusal(source, tmp_path / "out")
    assert "1 of 3 rows cannot be used" in message and "--skip-bad" in message
    (line,) = [line for line in message.splitlines() if ", line " in line]
    assert line.startswith(f"  {source}/train.jsonl, line 2: ") and reason in line


def damage(path: Path, kind: str) -> str:
    """Damage an image file; return the reason that must be given."""
    data = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
        return "cannot be decoded"
    if kind == "flipped":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes(b ^ 0xFF for b in data[middle : middle + 100]) + data[middle + 100 :])
        return "cannot be decoded"
    path.write_bytes(b"" if kind == "empty" else b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    return "is damaged or no image (0 bytes)" if kind == "empty" else "git lfs pull"


@pytest.mark.parametrize("kind", ["truncated", "flipped", "empty", "pointer"])
@pytest.mark.parametrize("name", ["images/000002.png", "teacher_images/000002.png"])
def test_a_damaged_png_is_named(photos, tmp_path, kind, name):
    source = shutil.copytree(photos, tmp_path / "in")
    reason = damage(source / name, kind)
    message = refusal(source, tmp_path / "out")
    assert f"train.jsonl, line 2: '{name.split('/')[0]}' names '{name}', which" in message and reason in message


def test_a_truncated_jpeg_is_named(photos, tmp_path):
    source = shutil.copytree(photos, tmp_path / "in")
    reason = damage(source / "images/000001.jpg", "truncated")
    message = refusal(source, tmp_path / "out")
    assert "line 1: 'images' names 'images/000001.jpg', which " + reason in message


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_link_out_of_the_source_is_refused(tmp_path, linked):
    source = write_source(tmp_path / "in", [{}])
    elsewhere = tmp_path / "elsewhere"
    if linked == "file":
        (source / "images/1.png").rename(elsewhere)
        (source / "images/1.png").symlink_to(elsewhere)
    else:
        (source / "images").rename(elsewhere)
        (source / "images").symlink_to(elsewhere)
    assert "line 1: 'images' names 'images/1.png', a link that leaves the source folder" in refusal(
        source, tmp_path / "out"
    )


def test_links_inside_the_source_and_to_the_source_are_fine(tmp_path):
    source = write_source(tmp_path / "in", [{}])
    (source / "images/1.png").rename(source / "real.png")
    (source / "images/1.png").symlink_to("../real.png")
    (tmp_path / "alias").symlink_to(source)
    convert(tmp_path / "alias", tmp_path / "out")
    assert pq.read_table(tmp_path / "out/train.parquet").num_rows == 1


def test_a_loop_of_links_is_a_fault(tmp_path):
    source = write_source(tmp_path / "in", [{}])
    (source / "images/1.png").unlink()
    (source / "images/1.png").symlink_to("1.png")
    assert "line 1: 'images' names 'images/1.png', which cannot be read" in refusal(source, tmp_path / "out")


def test_all_faults_of_a_row_are_reported_together(tmp_path):
    row = {"problem": "", "answer": {}, "images": None}
    message = refusal(write_source(tmp_path / "in", [row]), tmp_path / "out")
    assert all(reason in message for reason in ("'problem' is empty", "'answer' is {}", "'images' is missing"))
    row = {"images": ["a.png"], "teacher_images": ["b.png"]}
    message = refusal(write_source(tmp_path / "other", [row]), tmp_path / "out")
    assert "'images' names 'a.png'" in message and "'teacher_images' names 'b.png'" in message


def test_the_first_twenty_of_many_faults_are_listed(tmp_path):
    message = refusal(write_source(tmp_path / "in", [{"problem": ""}] * 23 + [{}]), tmp_path / "out")
    assert "23 of 24 rows cannot be used" in message and "... and 3 more" in message
    assert message.count("train.jsonl, line ") == 20 and "line 20:" in message and "line 21:" not in message


@pytest.mark.parametrize(("made", "reason"), [(False, "no such file; --source must be"), (True, "it has no rows")])
def test_a_source_without_rows_is_refused(tmp_path, made, reason):
    source = tmp_path / "in"
    source.mkdir()
    if made:
        (source / "train.jsonl").write_text("\n\n")
    assert f"{source}/train.jsonl: {reason}" in refusal(source, tmp_path / "out")


# Leaving rows out


def test_skip_bad_leaves_them_out_and_lists_them(tmp_path, capsys):
    rows = [{}, {"problem": "", "images": None}, {}, b"{", {}]
    source = write_source(tmp_path / "in", rows)
    convert(source, tmp_path / "out", "--skip-bad")
    kept = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    assert [row["extra_info"]["question"] for row in kept] == ["Question 1?", "Question 3?", "Question 5?"]
    assert [row["extra_info"]["index"] for row in kept] == [0, 1, 2]
    rejects = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    assert [(reject["file"], reject["line"]) for reject in rejects] == [(f"{source}/train.jsonl", n) for n in (2, 4)]
    assert [reason.split(";")[0] for reason in rejects[0]["reasons"]] == [
        "'problem' is empty",
        "'images' is missing or empty",
    ]
    assert "rows left out: 2" in capsys.readouterr().out


def test_skip_bad_without_bad_rows_writes_no_list(tmp_path):
    convert(write_source(tmp_path / "in", [{}]), tmp_path / "out", "--skip-bad")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["train.parquet"]


def test_skip_bad_refuses_to_write_an_empty_set(tmp_path):
    message = refusal(write_source(tmp_path / "in", [{"problem": ""}] * 2), tmp_path / "out", "--skip-bad")
    assert "2 of 2 rows cannot be used" in message and "No row is left" in message


# All or nothing


def test_a_failing_run_keeps_the_files_of_an_earlier_one(tmp_path):
    out = tmp_path / "out"
    convert(write_source(tmp_path / "good", [{}] * 4), out, "--val-fraction", "0.25")
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with pytest.raises(SystemExit):
        convert(write_source(tmp_path / "bad", [{}, {"problem": ""}]), out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_an_image_that_vanishes_meanwhile_leaves_nothing(tmp_path, monkeypatch):
    source = write_source(tmp_path / "in", [{}] * 3)
    check = vision_opd_6k.check_source

    def check_then_lose(*args):
        checked = check(*args)
        (source / "images/3.png").unlink()
        return checked

    monkeypatch.setattr(vision_opd_6k, "check_source", check_then_lose)
    message = refusal(source, tmp_path / "out")
    assert "train.jsonl, line 3 changed meanwhile" in message and "run again" in message


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vision_opd_6k.SplitWriter, "_flush", full)
    message = refusal(write_source(tmp_path / "in", [{}]), tmp_path / "out")
    assert "No space left on device" in message and "nothing was written" in message


def test_files_of_an_earlier_run_are_pointed_out(tmp_path, capsys):
    source = write_source(tmp_path / "in", [{}] * 4)
    convert(source, tmp_path / "out", "--val-fraction", "0.25")
    assert "earlier run" not in capsys.readouterr().out
    convert(source, tmp_path / "out")
    assert f"{tmp_path}/out/val.parquet is of an earlier run" in capsys.readouterr().out


def test_the_files_have_ordinary_rights(tmp_path):
    convert(write_source(tmp_path / "in", [{}]), tmp_path / "out")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "out/train.parquet").stat().st_mode & 0o777 == 0o666 & ~mask
