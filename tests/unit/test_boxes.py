"""``boxes``: each convention by hand-computed pixels, no guess where two fit, and boxes that turn with their images."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw, ImageOps

from data_prep import boxes
from data_prep.images import ORIENTATION
from data_prep.rows import read_rows
from tests.unit import commands

SIZE = (400, 200)

run = partial(commands.run, boxes)
refusal = partial(commands.refusal, boxes)


def boxes_of(out: Path) -> list[list[float]]:
    return [row["bbox"] for _, row in read_rows(out / "train.parquet")]


def write(folder: Path, *values: Any, size: tuple[int, int] = SIZE, orientation: int = 1) -> Path:
    """A row with its own image for each box; ``...`` is a row without the field."""
    folder.mkdir()
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    lines = []
    for number, value in enumerate(values):
        Image.new("RGB", size, (number, 0, 0)).save(folder / f"{number}.png", exif=exif)
        row = {"question": "Q?", "answer": "A", "image": f"{number}.png", "box": value}
        lines.append(json.dumps({k: v for k, v in row.items() if v is not ...}))
    (folder / "set.jsonl").write_text("\n".join(lines))
    return folder / "set.jsonl"


# Conventions. The image has 400 x 200 pixels; all of these are the box from (100, 50) to (300, 100).
PIXELS = [100.0, 50.0, 300.0, 100.0]
CONVENTIONS = {
    "xyxy": [100, 50, 300, 100],
    "xywh": [100, 50, 200, 50],
    "normalised-xyxy": [0.25, 0.25, 0.75, 0.5],
    "normalised-xywh": [0.25, 0.25, 0.5, 0.25],
    "qwen1000": [250, 250, 750, 500],
}


@pytest.mark.parametrize(("convention", "numbers"), CONVENTIONS.items())
def test_each_convention_gives_the_same_pixels(tmp_path, capsys, convention, numbers):
    source = write(tmp_path / "in", numbers)
    run("--source", source, "--box-field", "box", "--convention", convention, "--out", tmp_path / "out")
    assert boxes_of(tmp_path / "out") == [PIXELS]
    assert f"taken as {convention}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("convention", "whole"),
    [("xyxy", [0, 0, 400, 200]), ("normalised-xyxy", [0, 0, 1, 1]), ("qwen1000", [0, 0, 1000, 1000])],
)
def test_the_whole_image_stays_inside_of_it(tmp_path, convention, whole):
    source = write(tmp_path / "in", whole)
    run("--source", source, "--box-field", "box", "--convention", convention, "--out", tmp_path / "out")
    assert boxes_of(tmp_path / "out") == [[0, 0, 400, 200]]


def test_rounding_carries_no_box_over_the_border(tmp_path):
    source = write(tmp_path / "in", [0.1, 0.7, 0.9 + 1e-12, 0.3], size=(333, 333))
    run("--source", source, "--box-field", "box", "--convention", "normalised-xywh", "--out", tmp_path / "out")
    ((x0, y0, x1, y1),) = boxes_of(tmp_path / "out")
    assert (x0, y0, x1, y1) == (pytest.approx(33.3), pytest.approx(233.1), 333, 333)


# auto

ONE_FITS = {
    # 300 + 350 > 400 is no xywh, and 1200 no thousandth.
    "xyxy": ([[100, 50, 300, 100], [300, 10, 350, 60], [1150, 0, 1200, 50]], (1300, 200)),
    # Going left from x = 300 to 50 is no xyxy and no thousandths.
    "xywh": ([[100, 50, 200, 50], [300, 10, 50, 60]], SIZE),
    # As pixels less than one.
    "normalised-xyxy": ([[0.25, 0.25, 0.75, 0.5], [0.6, 0.5, 0.7, 0.9]], SIZE),
    "normalised-xywh": ([[0.25, 0.25, 0.5, 0.25], [0.6, 0.5, 0.3, 0.2]], SIZE),
    # 750 and 990 are outside of 400 pixels.
    "qwen1000": ([[250, 250, 750, 500], [900, 900, 990, 990]], SIZE),
}


@pytest.mark.parametrize(("convention", "given"), ONE_FITS.items(), ids=ONE_FITS)
def test_auto_takes_the_one_convention_that_fits_all_rows(tmp_path, capsys, convention, given):
    numbers, size = given
    options = ("--source", write(tmp_path / "in", *numbers, size=size), "--box-field", "box")
    run(*options, "--convention", "auto", "--out", tmp_path / "a")
    assert f"taken as {convention}" in capsys.readouterr().out
    run(*options, "--convention", convention, "--out", tmp_path / "b")
    assert boxes_of(tmp_path / "a") == boxes_of(tmp_path / "b")


def test_auto_stops_with_the_list_where_several_fit(tmp_path):
    """[100, 50, 300, 100] in 400 x 200: pixels, or thousandths; not x, y, width, height in the second row."""
    source = write(tmp_path / "in", [100, 50, 300, 100], [200, 100, 300, 150])
    message = refusal(tmp_path / "out", "--source", source, "--box-field", "box", "--convention", "auto")
    assert "xyxy 2, xywh 1, normalised-xyxy 0, normalised-xywh 0, qwen1000 2" in message
    assert "xyxy, qwen1000 allow all" in message and "--convention" in message


def test_auto_stops_where_none_fits_all_rows(tmp_path):
    source = write(tmp_path / "in", [250, 250, 750, 500], [0.1, 0.1, 0.5, 0.5])
    options = ("--source", source, "--box-field", "box", "--convention", "auto")
    for more in ([], ["--skip-bad"]):
        message = refusal(tmp_path / "out", *options, *more)
        assert "of 2: xyxy 0, xywh 0, normalised-xyxy 1, normalised-xywh 1, qwen1000 1. None allows all" in message


def test_auto_does_not_count_rows_that_are_bad_anyway(tmp_path, capsys):
    source = write(tmp_path / "in", [250, 250, 750, 500], "no box", [900, 900, 990, 990])
    run("--source", source, "--box-field", "box", "--convention", "auto", "--out", tmp_path / "out", "--skip-bad")
    assert "of 2: " in capsys.readouterr().out and len(boxes_of(tmp_path / "out")) == 2


# EXIF


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_box_of_the_stored_image_turns_with_it(tmp_path, orientation):
    """Drawn into the stored image, which PIL then turns upright, the box is where the command says it is."""
    box = (10, 20, 60, 90)
    stored = Image.new("RGB", (200, 120))
    ImageDraw.Draw(stored).rectangle((10, 20, 59, 89), fill="white")  # PIL's right and bottom are inclusive
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    folder = tmp_path / "in"
    folder.mkdir()
    stored.save(folder / "0.png", exif=exif)
    (folder / "set.jsonl").write_text(json.dumps({"question": "Q?", "image": "0.png", "box": box}))
    options = ("--source", folder / "set.jsonl", "--box-field", "box", "--convention", "xyxy", "--boxes-before-exif")
    run(*options, "--out", tmp_path / "out")
    ((_, row),) = read_rows(tmp_path / "out" / "train.parquet")
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(row["images"][0]["bytes"])))
    assert upright.size == ((200, 120) if orientation < 5 else (120, 200))
    assert tuple(row["bbox"]) == upright.getbbox()


def test_thousandths_of_a_stored_image_are_of_its_own_sides(tmp_path):
    """400 x 200 stored, orientation 6 (a quarter to the right): (100, 50, 300, 100) -> (200-100, 100, 200-50, 300)."""
    source = write(tmp_path / "in", [250, 250, 750, 500], orientation=6)
    options = ("--source", source, "--box-field", "box", "--convention", "qwen1000")
    run(*options, "--boxes-before-exif", "--out", tmp_path / "a")
    assert boxes_of(tmp_path / "a") == [[100, 100, 150, 300]]
    # Of the upright image, 200 x 400, else.
    run(*options, "--out", tmp_path / "b")
    assert boxes_of(tmp_path / "b") == [[50, 100, 150, 200]]


def test_a_box_refers_to_the_upright_image_unless_told_otherwise(tmp_path, capsys):
    source = write(tmp_path / "in", [10, 250, 110, 390], orientation=6)
    options = ("--source", source, "--box-field", "box", "--convention", "xyxy")
    run(*options, "--out", tmp_path / "a")
    assert boxes_of(tmp_path / "a") == [[10, 250, 110, 390]]
    assert "images with an EXIF orientation: 1" in capsys.readouterr().out
    assert "outside the image of 400 x 200" in refusal(tmp_path / "b", *options, "--boxes-before-exif")


# Faults and limits

BAD_BOXES: dict[str, tuple[Any, str]] = {
    "missing": (..., "'box' is missing or empty"),
    "null": (None, "'box' is missing or empty"),
    "empty list": ([], "'box' is missing or empty"),
    "three numbers": ([1, 2, 3], "must be four finite numbers"),
    "text": ("1,2,3,4", "must be four finite numbers"),
    "a number is text": ([1, 2, 3, "4"], "must be four finite numbers"),
    "not finite": ([0, 0, float("nan"), 50], "must be four finite numbers"),
    "infinite": ([0, 0, float("inf"), 50], "must be four finite numbers"),
    "truth values": ([False, False, True, True], "must be four finite numbers"),
    "two boxes": ([[0, 0, 50, 50], [60, 60, 90, 90]], "has 2 boxes; a row has one"),
    "outside": ([350, 50, 450, 100], "as xyxy [350, 50, 450, 100], which lies outside the image of 400 x 200 pixels"),
    "negative": ([-1, 0, 50, 50], "outside the image"),
    "no area": ([50, 50, 50, 90], "which is empty"),
    "reversed": ([300, 50, 100, 100], "which is empty"),
    "normalised": ([0.1, 0.1, 0.5, 0.5], "less than one pixel"),
    "crop too small": ([0, 0, 13, 50], "13 x 50 pixels; enlarged 2 times it stays below --min-crop-side 28"),
}


@pytest.mark.parametrize(("box", "reason"), BAD_BOXES.values(), ids=BAD_BOXES)
def test_a_bad_box_is_named_with_its_place_and_reason(tmp_path, box, reason):
    source = write(tmp_path / "in", [100, 50, 300, 100], box)
    message = refusal(tmp_path / "out", "--source", source, "--box-field", "box", "--convention", "xyxy")
    (line,) = [line for line in message.splitlines() if ", line 2" in line]
    assert line.startswith(f"  {source}, line 2: ") and reason in line


def test_a_single_box_in_a_list_of_boxes_is_that_box(tmp_path):
    source = write(tmp_path / "in", [[100, 50, 300, 100]])
    run("--source", source, "--box-field", "box", "--convention", "xyxy", "--out", tmp_path / "out")
    assert boxes_of(tmp_path / "out") == [PIXELS]


# The box is 200 x 50 pixels, an eighth of the image; its enlarged crop has 400 x 100.
LIMITS = [
    ("--min-side", 50, 51),
    ("--max-area-ratio", 0.125, 0.12),
    ("--min-crop-side", 100, 101),
    ("--zoom", 0.56, 0.55),
    ("--max-aspect", 4, 3.9),
]


@pytest.mark.parametrize(("option", "just", "beyond"), LIMITS, ids=[option for option, _, _ in LIMITS])
def test_limits_refuse_what_is_beyond_them(tmp_path, option, just, beyond):
    source = write(tmp_path / "in", [100, 50, 300, 100])
    options = ("--source", source, "--box-field", "box", "--convention", "xyxy")
    run(*options, option, just, "--out", tmp_path / "a")
    assert "line 1: 'box' is 200 x 50 pixels" in refusal(tmp_path / "b", *options, option, beyond)


def test_the_aspect_limit_of_the_processor_is_the_default(tmp_path):
    source = write(tmp_path / "in", [0, 0, 14 * 200, 14], [0, 0, 14 * 200 + 1, 14], size=(3000, 20))
    message = refusal(tmp_path / "out", "--source", source, "--box-field", "box", "--convention", "xyxy")
    assert "1 of 2 rows" in message and "line 2: " in message and "--max-aspect 200" in message


def test_a_box_that_is_hardly_outside_is_cut_where_the_user_says_so(tmp_path):
    source = write(tmp_path / "in", [-2, 50, 300, 201.5])
    options = ("--source", source, "--box-field", "box", "--convention", "xyxy")
    run(*options, "--clip", 2, "--out", tmp_path / "a")
    assert boxes_of(tmp_path / "a") == [[0, 50, 300, 200]]
    assert "outside the image" in refusal(tmp_path / "b", *options, "--clip", 1.9)


def test_skip_bad_keeps_the_sound_rows_and_their_own_boxes(tmp_path):
    source = write(tmp_path / "in", [100, 50, 300, 100], [0, 0, 999, 50], [10, 10, 60, 60])
    options = ("--source", source, "--box-field", "box", "--convention", "xyxy", "--skip-bad")
    run(*options, "--out", tmp_path / "out")
    assert boxes_of(tmp_path / "out") == [PIXELS, [10, 10, 60, 60]]
    (reject,) = map(json.loads, (tmp_path / "out/rejects.jsonl").read_text().splitlines())
    assert reject["line"] == 2 and "outside" in reject["reasons"][0]


def test_a_box_may_lie_inside_another_field_and_belongs_to_the_last_image(tmp_path, capsys):
    Image.new("RGB", (50, 50)).save(tmp_path / "small.png")
    Image.new("RGB", SIZE).save(tmp_path / "large.png")
    row = {"question": "Q?", "images": ["small.png", "large.png"], "meta": {"box": [250, 250, 750, 500]}}
    (tmp_path / "set.jsonl").write_text(json.dumps(row))
    options = ("--source", tmp_path / "set.jsonl", "--box-field", "meta.box", "--convention", "qwen1000")
    run(*options, "--out", tmp_path / "out")
    assert boxes_of(tmp_path / "out") == [PIXELS]
    printed = capsys.readouterr().out
    assert "not used" not in printed and "--config-name vision_opd" in printed


@pytest.mark.parametrize("convention", [None, "yxyx"])
def test_the_convention_must_be_named(tmp_path, capsys, convention):
    with pytest.raises(SystemExit) as stopped:
        run(
            "--source",
            "s",
            "--out",
            tmp_path,
            "--box-field",
            "box",
            *(["--convention", convention] if convention else []),
        )
    assert stopped.value.code == 2 and "--convention" in capsys.readouterr().err
