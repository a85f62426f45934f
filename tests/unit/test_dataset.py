"""The training set: what each kind of row gives, and what a bad one is told."""

import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from opd_recipes.dataset import ROW_IMAGES, ROW_VIEW, RowImages, TwoViewDataset, decode, with_images
from opd_recipes.registry import RecipeError
from opd_recipes.views import View, ViewError
from tests import harness


def encoded(image: Image.Image, kind="PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def row(i=0, size=(96, 64), box=(10, 10, 30, 30), prompt="<image>What is in the red box?", **changes):
    image = Image.new("RGB", size, (200, 10 * i % 255, 30))
    out = {
        "data_source": "test",
        "prompt": [{"role": "user", "content": prompt}],
        "images": [{"bytes": encoded(image), "path": f"{i}.png"}],
        "bbox": list(map(float, box)) if box else None,
        "reward_model": {"style": "rule", "ground_truth": "x"},
        "extra_info": {"index": i},
    }
    return {**out, **changes}


def load(tmp_path, rows, *overrides, name="rows.parquet", **kwargs):
    files = []
    for i, part in enumerate(rows if isinstance(rows[0], list) else [rows]):
        files.append(str(tmp_path / f"{i}{name}"))
        datasets.Dataset.from_list(part).to_parquet(files[-1])
    cfg = harness.config(f"+data.cache_dir={tmp_path}", *overrides)
    worker = harness.prompt_builder()
    return TwoViewDataset(files, worker.tokenizer, cfg.data, worker.processor, **kwargs)


def test_a_row_travels_as_bytes(tmp_path):
    data = load(tmp_path, [row(0), row(1)])
    item = data[1]
    assert len(data) == 2 and item[ROW_VIEW] == "student" and item["data_source"] == "test"
    assert item["raw_prompt"] == [
        {
            "role": "user",
            "content": [{"type": "image", "image": "image:0"}, {"type": "text", "text": "What is in the red box?"}],
        }
    ]
    assert "images" not in item and "bbox" not in item
    source: RowImages = item[ROW_IMAGES]
    assert source.box == [10, 10, 30, 30] and isinstance(source.images[0]["bytes"], bytes)
    student, teacher = (source.render(data.recipe.views[name])[0] for name in ("student", "teacher"))
    assert student.size == (96, 64) and teacher.size == (96, 96)


def test_validation_gives_each_row_once_for_each_view(tmp_path):
    data = load(tmp_path, [row(0), row(1)])
    data.set_views(data.recipe.validation_views)
    seen = [(data[i]["index"], data[i][ROW_VIEW], data[i]["data_source"]) for i in range(len(data))]
    assert seen == [(i, view, f"test@{view}") for i in (0, 1) for view in ("student", "teacher")]


def test_training_needs_no_answer_and_validation_says_so(tmp_path):
    data = load(tmp_path, [{k: v for k, v in row(i).items() if k != "reward_model"} for i in range(2)])
    assert "reward_model" not in data[0]
    with pytest.raises(RecipeError, match="validation needs reward_model.ground_truth.*0rows.parquet, row 0"):
        data.set_views(data.recipe.validation_views)


def test_a_hint_needs_answers_in_training_too(tmp_path):
    hint = "opd.teacher_hint=' answer: {answer}'"
    assert len(load(tmp_path, [row(0)], hint, name="a.parquet")) == 1
    with pytest.raises(RecipeError, match="row 1: the row has no reward_model.ground_truth, which opd.teacher_hint"):
        load(tmp_path, [row(0), row(1, reward_model={"style": "rule", "ground_truth": None})], hint, name="b.parquet")
    bare = [{k: v for k, v in row(0).items() if k != "reward_model"}]
    with pytest.raises(RecipeError, match="column 'reward_model'.*is missing.*opd.teacher_hint=null"):
        load(tmp_path, bare, hint, name="c.parquet")


def test_views_for_validation_alone_are_checked_when_they_are_asked_for(tmp_path):
    """Training on pairs without boxes, and measuring on crops."""
    free = ["opd.views.student=[{kind: resize, scale: 0.5}]", "opd.views.teacher=[original]"]
    crop = "opd.validation_views=[student, {crop: [{kind: crop}]}]"
    data = load(tmp_path, [row(0), row(1)], *free, crop)
    data.set_views(data.recipe.validation_views)
    assert [data[i]["data_source"] for i in range(2)] == ["test@student", "test@crop"]
    bad = load(tmp_path, [row(0), row(1, bbox=[5.0, 5.0, 5.0, 9.0])], *free, crop, name="bad.parquet")
    with pytest.raises(RecipeError, match=r"bad.parquet, row 1: bbox .* is empty"):
        bad.set_views(bad.recipe.validation_views)
    boxless = [{k: v for k, v in row(0).items() if k != "bbox"}]
    data = load(tmp_path, boxless, *free, crop, name="none.parquet")
    with pytest.raises(RecipeError, match="column 'bbox' is missing"):
        data.set_views(data.recipe.validation_views)


def test_area_of_the_evidence():
    whole, part = (Image.new("RGB", size) for size in ((96, 64), (48, 16)))
    drawn = {"student": [whole], "teacher": [part]}
    assert RowImages([{"bytes": encoded(whole)}], box=(0, 0, 48, 32)).area_ratio(drawn) == 0.25
    assert RowImages([{"bytes": encoded(whole)}]).area_ratio(drawn) == 0.125


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 96, 3), np.uint8))
BAD_ROWS = [
    ({"bbox": [90.0, 10.0, 120.0, 20.0]}, "lies outside the image of 96 x 64 pixels"),
    ({"bbox": [30.0, 10.0, 10.0, 20.0]}, "is empty"),
    ({"bbox": [10.0, 10.0, 20.0]}, "four numbers"),
    ({"bbox": None}, "no evidence box"),
    ({"images": [{"bytes": b"not an image", "path": None}]}, "cannot be read as an image"),
    ({"images": [{"bytes": encoded(NOISE)[:2000], "path": None}]}, "cannot be read as an image"),
    ({"images": [{"bytes": None, "path": "/nowhere/gone.png"}]}, "'/nowhere/gone.png' cannot be read"),
    ({"images": [{"bytes": None, "path": None}]}, "neither bytes nor a path"),
    ({"images": []}, "1 <image> in the prompt for 0 images"),
    ({"prompt": [{"role": "user", "content": "What?"}]}, "0 <image> in the prompt for 1 images"),
    ({"prompt": [{"role": "user", "content": "<image><image>What?"}]}, "2 <image> in the prompt for 1 images"),
    (
        {"prompt": [{"role": "user", "content": "<image>" + "What is this? " * 60}]},
        "more than data.max_prompt_length=128",
    ),
    (
        {"images": [{"bytes": encoded(Image.new("RGB", (4000, 8))), "path": None}], "bbox": [0.0, 0, 8, 8]},
        "aspect ratio",
    ),
]


@pytest.mark.parametrize(("change", "reason"), BAD_ROWS, ids=[reason for _, reason in BAD_ROWS])
def test_bad_rows_stop_the_run_with_file_row_and_reason(tmp_path, change, reason):
    rows = [[row(0)], [row(1), {**row(2), **change}]]
    with pytest.raises(RecipeError) as error:
        load(tmp_path, rows)
    assert reason in str(error.value)
    assert "1rows.parquet, row 1: " in str(error.value)
    assert "1 of 3 rows cannot be used" in str(error.value) and "opd.on_bad_row=skip" in str(error.value)


def test_bad_rows_can_be_left_out(tmp_path, capsys):
    rows = [row(0), {**row(1), "bbox": [1.0, 1.0, 1.0, 1.0]}, row(2)]
    data = load(tmp_path, rows, "opd.on_bad_row=skip")
    assert [data[i]["index"] for i in range(len(data))] == [0, 2]
    assert "skipped 1 of 3 rows, e.g." in capsys.readouterr().out


def test_says_how_long_the_prompts_are_and_warns_where_the_views_hardly_differ(tmp_path, capsys):
    views = ["opd.views.student=[{kind: resize, scale: 0.5}]", "opd.views.teacher=[{kind: original}]"]
    load(tmp_path, [row(i, size=(240, 240)) for i in range(2)], *views)
    out = capsys.readouterr().out
    assert "prompt tokens: student mean" in out and "teacher mean" in out and "WARNING" not in out
    load(tmp_path, [row(i, size=(64, 64)) for i in range(2)], *views)
    assert "in 2 of 2 rows the student's smaller view has more than 60%" in capsys.readouterr().out


def test_rows_are_named_by_their_place_in_the_file_also_after_others_were_left_out(tmp_path):
    rows = [{**row(0), "bbox": [1.0, 1.0, 1.0, 1.0]}, row(1), {**row(2), "reward_model": None}]
    data = load(tmp_path, rows, "opd.on_bad_row=skip")
    with pytest.raises(RecipeError, match="1 rows have none, first .*0rows.parquet, row 2"):
        data.set_views(data.recipe.validation_views)


def test_no_row_left(tmp_path):
    with pytest.raises(RecipeError, match="no row is left"):
        load(tmp_path, [{**row(1), "bbox": [1.0, 1.0, 1.0, 1.0]}], "opd.on_bad_row=skip")


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        ("bbox", r"column 'bbox' is missing.*\+overlay=vision_opd_6k"),
        ("images", "column 'images' is missing; it has"),
        ("data_source", "column 'data_source' is missing"),
    ],
)
def test_missing_columns(tmp_path, drop, words):
    with pytest.raises(RecipeError, match=words):
        load(tmp_path, [{k: v for k, v in row().items() if k != drop}])


def test_provided_views(tmp_path):
    evidence = [{"bytes": encoded(Image.new("RGB", (64, 64), "green")), "path": None}]
    overlay = ["opd.views.student=[{kind: original}]", "opd.views.teacher=[{kind: provided}]"]
    data = load(tmp_path, [row(0, box=None, bbox_images=evidence)], *overlay)
    teacher = data[0][ROW_IMAGES].render(data.recipe.teacher_view)
    assert [image.size for image in teacher] == [(64, 64)] and teacher[0].getpixel((5, 5)) == (0, 128, 0)
    masked = data[0][ROW_IMAGES].render(View([{"kind": "provided"}, {"kind": "blank"}]))
    assert masked[0].size == (64, 64) and masked[0].getpixel((5, 5)) == (127, 127, 127)
    with pytest.raises(RecipeError, match="column 'bbox_images' is missing"):
        load(tmp_path, [row(0)], *overlay)
    with pytest.raises(RecipeError, match="2 images in 'bbox_images' for 1"):
        load(tmp_path, [row(0, bbox_images=evidence * 2)], *overlay)
    with pytest.raises(RecipeError, match="'bbox_images' is missing or empty"):
        load(tmp_path, [row(0, bbox_images=evidence), row(1, bbox_images=[])], *overlay)


def test_lengths_are_counted_as_the_processor_counts(tmp_path):
    data = load(tmp_path, [row(0)])
    for size in ((96, 64), (192, 192), (40, 300), (33, 31), (500, 400)):
        image = Image.new("RGB", size)
        messages = data[0]["raw_prompt"]
        counted = data._prompt_length(messages, [image])
        exact = harness.prompt_builder()._prompt(with_images(messages, [image])).ids
        assert counted == len(exact), size


def exif(image, orientation):
    tags = Image.Exif()
    tags[0x0112] = orientation
    return encoded(image, "JPEG", exif=tags)


def test_decoding_modes():
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 12)).resize((24, 8))
    for mode, kind in (("L", "PNG"), ("P", "PNG"), ("1", "PNG"), ("CMYK", "JPEG"), ("RGB", "WEBP"), ("I;16", "PNG")):
        image = decode({"bytes": encoded(picture.convert(mode), kind), "path": None})
        assert image.mode == "RGB" and image.size == (24, 8), mode


def test_transparency_becomes_white():
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    image.putpixel((0, 0), (255, 0, 0, 255))
    out = decode({"bytes": encoded(image)})
    assert out.getpixel((0, 0)) == (255, 0, 0) and out.getpixel((1, 1)) == (255, 255, 255)


def test_exif_orientation_is_applied_once():
    out = decode({"bytes": exif(Image.new("RGB", (30, 20)), 6)})
    assert out.size == (20, 30) and out.getexif().get(0x0112) is None


def test_a_path_is_read(tmp_path):
    Image.new("RGB", (7, 5)).save(tmp_path / "a.png")
    assert (
        decode(str(tmp_path / "a.png")).size == decode({"path": str(tmp_path / "a.png"), "bytes": None}).size == (7, 5)
    )


def test_a_decompression_bomb_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ViewError, match="cannot be read as an image"):
        decode({"bytes": encoded(Image.new("RGB", (100, 100)))})


def test_the_box_belongs_to_the_last_image():
    source = RowImages(
        [{"bytes": encoded(Image.new("RGB", (50, 50)))}, {"bytes": encoded(Image.new("RGB", (40, 40)))}], [0, 0, 10, 10]
    )
    assert [image.size for image in source.render(View("crop"))] == [(50, 50), (20, 20)]


def test_placeholders_are_filled_in_order():
    messages = [{"role": "user", "content": [{"type": "image", "image": "image:0"}, {"type": "text", "text": "a"}]}]
    image = Image.new("RGB", (2, 2))
    assert with_images(messages, [image])[0]["content"][0]["image"] is image
    assert messages[0]["content"][0]["image"] == "image:0"
    with pytest.raises(ViewError, match="more images"):
        with_images(messages, [image, image])


def test_json_lines(tmp_path):
    Image.new("RGB", (96, 64)).save(tmp_path / "a.png")
    record = row(0, images=[str(tmp_path / "a.png")])
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(record) for _ in range(2)))
    cfg = harness.config(f"+data.cache_dir={tmp_path}")
    worker = harness.prompt_builder()
    data = TwoViewDataset([str(tmp_path / "rows.jsonl")], worker.tokenizer, cfg.data, worker.processor)
    assert data[1][ROW_IMAGES].images == [str(tmp_path / "a.png")]
