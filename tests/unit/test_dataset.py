"""The training set: what each kind of row gives, and what a bad one is told."""

import io
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from opd_recipes.dataset import ROW_IMAGES, ROW_VIEW, TwoViewDataset, with_images
from opd_recipes.images import ImageRoot, RowImages, decode
from opd_recipes.recipe import Recipe
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


def load(tmp_path, rows, *overrides, name="rows.parquet", overlay="[cpu,toy]", **kwargs):
    files = []
    for i, part in enumerate(rows if isinstance(rows[0], list) else [rows]):
        files.append(str(tmp_path / f"{i}{name}"))
        datasets.Dataset.from_list(part).to_parquet(files[-1])
    cfg = harness.config(f"+data.cache_dir={tmp_path}", *overrides, overlay=overlay)
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
    with pytest.raises(
        RecipeError, match="opd.teacher_hint needs the answers, but column 'reward_model'.*opd.teacher_hint=null"
    ):
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
    skipping = load(
        tmp_path, [row(0, bbox=[5.0, 5.0, 5.0, 9.0]), row(1)], *free, crop, "data.on_bad_row=skip", name="s.parquet"
    )
    skipping.set_views(skipping.recipe.validation_views)
    assert len(skipping) == 2 and skipping[0]["index"] == 1 and skipping.locate(0).endswith("row 1")
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
    assert "1 of 3 rows cannot be used" in str(error.value) and "data.on_bad_row=skip" in str(error.value)


def test_bad_rows_can_be_left_out(tmp_path, capsys):
    rows = [row(0), {**row(1), "bbox": [1.0, 1.0, 1.0, 1.0]}, row(2)]
    data = load(tmp_path, rows, "data.on_bad_row=skip")
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
    data = load(tmp_path, rows, "data.on_bad_row=skip")
    with pytest.raises(RecipeError, match="1 rows have none, first .*0rows.parquet, row 2"):
        data.set_views(data.recipe.validation_views)


def test_no_row_left(tmp_path):
    with pytest.raises(RecipeError, match="no row is left"):
        load(tmp_path, [{**row(1), "bbox": [1.0, 1.0, 1.0, 1.0]}], "data.on_bad_row=skip")


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


RED, BLUE = Image.new("RGB", (96, 64), (250, 0, 0)), Image.new("RGB", (96, 64), (0, 0, 250))


def named(name, **changes):
    return row(0, images=[{"bytes": None, "path": name}], **changes)


def first_pixel(data, i=0):
    return data[i][ROW_IMAGES].render(View("original"))[0].getpixel((0, 0))


def refusal(tmp_path, name, *overrides, folder="rows"):
    (tmp_path / folder).mkdir(exist_ok=True)
    with pytest.raises(RecipeError) as error:
        load(tmp_path / folder, [named(name)], *overrides)
    return str(error.value)


def test_relative_paths_start_at_the_folder_of_the_rows_file(tmp_path, monkeypatch):
    """Two files in two folders, read from a third one: each row's image is the one beside its own file."""
    files = []
    for folder, image in (("a", RED), ("b", BLUE)):
        (tmp_path / folder / "img").mkdir(parents=True)
        image.save(tmp_path / folder / "img" / "x.png")
        files.append(str(tmp_path / folder / "rows.parquet"))
        datasets.Dataset.from_list([named("img/x.png")] * 2).to_parquet(files[-1])
    (tmp_path / "c").mkdir()
    monkeypatch.chdir(tmp_path / "c")
    worker = harness.prompt_builder()

    def read(*overrides, **options):
        cfg = harness.config(f"+data.cache_dir={tmp_path}", *overrides)
        return TwoViewDataset(list(files), worker.tokenizer, cfg.data, worker.processor, **options)

    data = read()
    assert [first_pixel(data, i) for i in range(4)] == [(250, 0, 0)] * 2 + [(0, 0, 250)] * 2
    for size, seed in ((1, 0), (1, 1), (2, 2), (3, 3)):  # a sample: each row still belongs to its file
        data = read("data.shuffle=true", f"data.seed={seed}", max_samples=size)
        drawn = np.random.default_rng(seed).choice(4, size=size, replace=False).tolist()
        assert [first_pixel(data, i) for i in range(size)] == [(250, 0, 0) if i < 2 else (0, 0, 250) for i in drawn]
        assert data.locate(0) == f"{files[drawn[0] // 2]}, row {drawn[0] % 2}"
    with pytest.raises(RecipeError, match="data.seed=null.*set data.seed, or data.image_root"):
        read("data.shuffle=true", "data.seed=null", max_samples=2)
    assert len(read("data.shuffle=true", "data.seed=null", f"data.image_root={tmp_path}/a", max_samples=2)) == 2


def test_image_root_takes_the_place_of_the_files_folder(tmp_path):
    for folder in ("rows", "pictures"):
        (tmp_path / folder).mkdir()
    RED.save(tmp_path / "pictures" / "x.png")
    root = f"data.image_root={tmp_path}/pictures"
    assert first_pixel(load(tmp_path / "rows", [named("x.png")], root)) == (250, 0, 0)
    both = f"data.image_root=[{tmp_path}/rows,{tmp_path}/pictures]"
    up = load(tmp_path / "rows", [named("../pictures/x.png"), named(str(tmp_path / "pictures/x.png"))], both)
    assert first_pixel(up, 0) == first_pixel(up, 1) == (250, 0, 0)


def test_a_path_may_not_leave_the_folder(tmp_path):
    RED.save(tmp_path / "secret.png")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "rows" / "folder").symlink_to(tmp_path)
    (tmp_path / "rows2").mkdir()  # a folder whose name begins like the allowed one
    RED.save(tmp_path / "rows2" / "x.png")
    names = ["../secret.png", "link.png", "folder/secret.png", str(tmp_path / "secret.png"), "../rows2/x.png"]
    for name in [*names, f"file://{tmp_path}/secret.png"]:
        message = refusal(tmp_path, name)
        assert f"'{name}' cannot be read: it leads to" in message and "data.image_root" in message
        assert "0rows.parquet, row 0" in message
    whole = f"data.image_root=[{tmp_path}/rows,{tmp_path}]"
    assert first_pixel(load(tmp_path / "rows", [named(name) for name in names], whole)) == (250, 0, 0)


def test_a_link_inside_the_folder_is_followed(tmp_path):
    RED.save(tmp_path / "x.png")
    (tmp_path / "link.png").symlink_to("x.png")
    assert first_pixel(load(tmp_path, [named("link.png")])) == (250, 0, 0)


def test_what_is_no_file_is_not_opened(tmp_path):
    import os

    (tmp_path / "rows").mkdir()
    os.mkfifo(tmp_path / "rows" / "pipe.png")
    assert "'pipe.png' cannot be read: a folder or a device" in refusal(tmp_path, "pipe.png")
    assert "cannot be read: a folder or a device" in refusal(tmp_path, ".")
    assert "'gone.png' cannot be read: no such file" in refusal(tmp_path, "gone.png")
    assert "cannot be read" in refusal(tmp_path, "x\0.png")


@pytest.fixture
def store():
    """A remote file system that is in memory."""
    import fsspec

    system = fsspec.filesystem("memory")
    for name, image in (("set/x.png", RED), ("other/x.png", BLUE), ("settle/x.png", BLUE)):
        system.pipe(f"/{name}", encoded(image))
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.fixture
def no_fetch(monkeypatch):
    """Any use of a remote file system, and any connection, fails the test."""
    import socket

    import fsspec.core

    def refuse(*args, **kwargs):
        raise AssertionError(f"fetched {args}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_addresses_are_read_where_the_user_named_them(tmp_path, store):
    root = "data.image_root=memory://set"
    data = load(tmp_path, [named("x.png"), named("memory://set/x.png")], root)
    assert first_pixel(data, 0) == first_pixel(data, 1) == (250, 0, 0)
    with pytest.raises(RecipeError, match="'gone.png' cannot be read: .*memory://set/gone.png"):
        load(tmp_path, [named("gone.png")], root)


def test_addresses_beside_rows_at_an_address(store):
    """Where the rows' file is remote, its folder is, too."""
    root = ImageRoot.of("memory://set/rows.parquet")
    assert root == ImageRoot(("memory://set",))
    assert decode({"bytes": None, "path": "x.png"}, root).getpixel((0, 0)) == (250, 0, 0)


@pytest.mark.parametrize(
    "name",
    [
        "s3://bucket/x.png",
        "http://169.254.169.254/latest/meta-data",
        "memory://set/x.png",
        "simplecache::memory://set/x.png",
    ],
)
def test_a_row_makes_nothing_be_fetched(tmp_path, no_fetch, name):
    message = refusal(tmp_path, name)
    assert f"'{name}' cannot be read" in message and "0rows.parquet, row 0" in message


@pytest.mark.parametrize(
    "name",
    [
        "memory://other/x.png",
        "memory://settle/x.png",
        "memory://set/../other/x.png",
        "../other/x.png",
        "%2e%2e/other/x.png",
        "..\\other\\x.png",
        "memory://set/x.png::memory://other/x.png",
        "s3://set/x.png",
        "/etc/passwd",
    ],
)
def test_a_named_address_opens_no_other(tmp_path, no_fetch, name):
    assert f"{name!r} cannot be read" in refusal(tmp_path, name, "data.image_root=memory://set")


def test_bytes_need_no_folder_and_their_path_is_only_a_name(tmp_path, no_fetch):
    picture = {"bytes": encoded(RED), "path": "s3://bucket/../../x.png"}
    data = load(tmp_path, [row(0, images=[picture])])
    assert first_pixel(data) == (250, 0, 0)
    with pytest.raises(ViewError, match="no folder is named"):
        RowImages(["x.png"]).render(View("original"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("<image><video>What?", "the prompt has <video>"),
        ("<image><audio>What?", "the prompt has <audio>"),
        (
            [{"type": "image", "image": "http://127.0.0.1:9/x.png"}, {"type": "text", "text": "<image>What?"}],
            "content that is no text",
        ),
    ],
)
def test_a_prompt_makes_nothing_be_fetched(tmp_path, no_fetch, content, reason):
    bad = row(0, prompt=[{"role": "user", "content": content}], videos=["http://127.0.0.1:9/x.mp4"])
    bad["prompt"] = [{"role": "user", "content": content}]
    with pytest.raises(RecipeError, match=f"row 0: .*{reason}"):
        load(tmp_path, [bad])


def test_a_row_is_small_on_its_way_to_the_rollout_worker(tmp_path):
    """Encoded bytes and a few names: after drawing, too, no pixels travel."""
    import pickle

    large = encoded(Image.new("RGB", (1000, 1000)), "JPEG")
    source = load(tmp_path, [row(0, images=[{"bytes": large, "path": None}])])[0][ROW_IMAGES]
    list(source.rendered({"a": View("redbox"), "b": View("crop")}))
    assert len(pickle.dumps(source)) < len(large) + 1000
    assert pickle.loads(pickle.dumps(source)).root == ImageRoot((str(tmp_path),))


def test_an_image_is_decoded_once_however_many_views_show_it(monkeypatch):
    opened = []
    real = Image.open
    monkeypatch.setattr(Image, "open", lambda stream, *a, **k: (opened.append(stream), real(stream, *a, **k))[1])
    source = RowImages(
        [{"bytes": encoded(RED)}, {"bytes": encoded(BLUE)}], [8, 8, 40, 40], [{"bytes": encoded(RED)}] * 2
    )
    crop = View("crop")
    views = {"student": View("redbox"), "teacher": crop, "negative": View(["crop", "mask_rectangle"])}
    drawn = dict(source.rendered(views))
    assert len(opened) == 2  # two images, three views
    assert list(drawn) == ["student", "teacher", "negative"]
    assert all(images[0].getpixel((0, 0)) == (250, 0, 0) for images in drawn.values())
    assert [images[1].size for images in drawn.values()] == [(96, 64), (64, 64), (64, 64)]
    assert drawn["teacher"][1].tobytes() == source.render(crop)[1].tobytes()  # no view sees what another has drawn
    del opened[:]
    assert source.area_ratio(drawn) == 32 * 32 / (96 * 64)
    assert opened == []  # nor is it opened for its size
    dict(source.rendered({"student": View("redbox"), "teacher": View("provided")}))
    assert len(opened) == 4  # the evidence images are other images


def test_the_check_at_load_decodes_once_for_all_views(tmp_path, monkeypatch):
    opened = []
    real = Image.open
    monkeypatch.setattr(Image, "open", lambda stream, *a, **k: (opened.append(stream), real(stream, *a, **k))[1])
    load(tmp_path, [row(0), row(1), row(2)])
    assert len(opened) == 3


def test_postscript_is_not_run(monkeypatch):
    data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n"
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *a, **k: pytest.fail("Ghostscript was started"))
    with pytest.raises(ViewError, match="EPS is a program"):
        decode({"bytes": data})


@pytest.mark.parametrize("data", ["text", [1, 2], 5])
def test_bytes_of_another_type(data):
    with pytest.raises(ViewError, match="an image's bytes are"):
        decode({"bytes": data})


def test_a_task_reward_needs_answers_in_training(tmp_path):
    options = ["opd.objective.task_advantage=grpo"]
    unanswered = [row(0), row(1, reward_model={"style": "rule", "ground_truth": None})]
    with pytest.raises(
        RecipeError, match="row 1: the row has no reward_model.ground_truth, which opd.objective.task_adv"
    ):
        load(tmp_path, unanswered, *options, overlay="[cpu,toy,advantage]")


def test_the_recipes_own_views_are_checked_once(tmp_path, capsys):
    data = load(tmp_path, [row(0)])
    before = capsys.readouterr().out.count("prompt tokens")
    data.set_views(Recipe.load(harness.config().opd).validation_views)
    assert before == 1 and "prompt tokens" not in capsys.readouterr().out
