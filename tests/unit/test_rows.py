"""What all data commands share: columns, writer, reader, rejects, the validation draw, and images of one root only."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep import rows, split
from data_prep.images import ORIENTATION, SourceRoot, check_decodes
from data_prep.rows import DataError, RowFault, RowWriter, image_field, read_rows, schema, write_rejects
from data_prep.seen import DecodedImages


def png(color: Any = (1, 2, 3), size: tuple[int, int] = (4, 3), mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, format="PNG", **options)
    return buffer.getvalue()


def row(index: int = 0, **changes: Any) -> dict[str, Any]:
    sound = {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": "<image>What?"}],
        "images": [image_field(b"image", "a.png")],
        "ability": "vqa",
        "reward_model": None,
        "extra_info": {"split": "train", "index": index, "question": "What?", "answer": None},
    }
    return {**sound, **changes}


# Columns and writer


@pytest.mark.parametrize("with_bbox", [False, True])
@pytest.mark.parametrize("with_evidence", [False, True])
def test_the_schema_has_the_optional_columns_that_are_asked_for(with_bbox, with_evidence):
    names = schema(with_bbox, with_evidence).names
    assert ("bbox" in names, "bbox_images" in names) == (with_bbox, with_evidence)
    assert {"data_source", "prompt", "images", "reward_model", "extra_info"} <= set(names)


def test_rows_come_back_as_they_were_written(tmp_path):
    written = [row(i, bbox=[0.0, 1.0, 2.5, 3.0]) for i in range(3)]
    with RowWriter(tmp_path / "new" / "a.parquet", schema(with_bbox=True)) as writer:
        for one in written:
            writer.add(one)
        assert writer.count == 3
    assert list(read_rows(tmp_path / "new" / "a.parquet")) == list(enumerate(written))


def groups(path: Path) -> list[int]:
    metadata = pq.ParquetFile(path).metadata
    return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def test_row_groups_have_at_most_64_rows(tmp_path):
    with RowWriter(tmp_path / "a.parquet", schema()) as writer:
        for i in range(130):
            writer.add(row(i))
    assert groups(tmp_path / "a.parquet") == [64, 64, 2]


def test_row_groups_are_closed_early_where_images_are_large(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BYTES_PER_GROUP", 1000)
    with RowWriter(tmp_path / "a.parquet", schema()) as writer:
        for size in (400, 400, 400, 2000, 10):
            writer.add(row(images=[image_field(b"x" * size, None)]))
    assert groups(tmp_path / "a.parquet") == [2, 1, 1, 1]


def test_a_file_appears_when_it_is_whole(tmp_path):
    with RowWriter(tmp_path / "a.parquet", schema()) as writer:
        writer.add(row())
        assert not (tmp_path / "a.parquet").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["a.parquet"]


def test_a_failure_leaves_the_earlier_file_and_nothing_else(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"earlier")
    with pytest.raises(ZeroDivisionError), RowWriter(tmp_path / "a.parquet", schema()) as writer:
        writer.add(row())
        raise ZeroDivisionError
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"a.parquet": b"earlier"}


@pytest.mark.parametrize("columns", [{"bbox": [0.0] * 4}, {"ability": ...}])
def test_a_row_with_other_columns_is_refused(tmp_path, columns):
    wrong = {key: value for key, value in row(**columns).items() if value is not ...}
    with (
        pytest.raises(DataError, match=r"a.parquet, row 0: it has the columns"),
        RowWriter(tmp_path / "a.parquet", schema()) as writer,
    ):
        writer.add(wrong)
    assert not list(tmp_path.iterdir())


def test_a_value_of_another_type_is_told_with_its_rows(tmp_path):
    with (
        pytest.raises(DataError, match="rows 0 to 0: a value has another type"),
        RowWriter(tmp_path / "a.parquet", schema()) as writer,
    ):
        writer.add(row(data_source=3))
    assert not list(tmp_path.iterdir())


# Reader and rejects


def test_rows_are_read_in_order_with_their_numbers(tmp_path):
    pq.write_table(pa.table({"n": list(range(1000))}), tmp_path / "a.parquet", row_group_size=1000)
    reader = read_rows(tmp_path / "a.parquet")
    assert next(reader) == (0, {"n": 0})
    assert [number for number, _ in reader] == list(range(1, 1000))


@pytest.mark.parametrize(("content", "columns", "reason"), [(b"PAR1 broken", None, "cannot be read as parquet"),
                                                            (None, ["box"], "column box is missing; it has n")])  # fmt: skip
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, columns, reason):
    path = tmp_path / "a.parquet"
    path.write_bytes(content) if content else pq.write_table(pa.table({"n": [1]}), path)
    with pytest.raises(DataError, match=reason) as told:
        list(read_rows(path, columns))
    assert str(path) in str(told.value)


def test_rejects_have_file_row_and_reasons(tmp_path):
    rejects = [{"file": "é.json", "row": 3, "reasons": ("a", "b")}, {"file": "b", "line": 1, "reasons": ["\ud800"]}]
    assert write_rejects(tmp_path / "rejects.jsonl", rejects) == 2
    first, second = map(json.loads, (tmp_path / "rejects.jsonl").read_text().splitlines())
    assert first == {"file": "é.json", "row": 3, "reasons": ["a", "b"]} and second["line"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["rejects.jsonl"]


# The validation draw


def test_rows_that_share_an_image_through_others_stay_together():
    images = [(b"a", b"b"), (b"c",), (b"b", b"d"), (b"d",), (b"e",), (b"c", b"e")]
    for seed in range(8):
        assert split.choose_val(images, [True] * 6, 0.1, seed) in ({0, 2, 3}, {1, 4, 5})


def test_only_images_with_all_their_answers_are_drawn():
    images = [(b"a",), (b"a",), (b"b",), (b"c",)]
    for seed in range(8):
        assert split.choose_val(images, [True, False, True, False], 0.9, seed) == {2}


def test_a_single_image_cannot_be_split():
    with pytest.raises(DataError, match="of 1 images 1 have all answers"):
        split.choose_val([(b"a",), (b"a",)], [True, True], 0.5, 0)


# Images


@pytest.fixture
def root(tmp_path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "a.png").write_bytes(png())
    (tmp_path / "secret.png").write_bytes(png((9, 9, 9)))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    return folder


def test_an_image_is_read_from_each_form_that_records_have(root):
    data, images = png(), SourceRoot(root)
    coded = "data:image/png;base64," + base64.b64encode(data).decode()
    for entry, name in (
        ("a.png", "a.png"),
        ({"path": "a.png", "bytes": None}, "a.png"),
        ({"path": "../else.png", "bytes": data}, "../else.png"),
        (data, None),
        (coded, None),
    ):
        assert images.read(entry, "image") == (data, name)
    again, _ = images.read(Image.open(io.BytesIO(data)), "image")
    assert Image.open(io.BytesIO(again)).getpixel((0, 0)) == (1, 2, 3)


ATTACKS = {
    "dots": ("../secret.png", "leaves the source folder"),
    "dots inside": ("x/../../secret.png", "leaves the source folder"),
    "link": ("link.png", "a link that leaves the source folder"),
    "absolute": ("/etc/hostname", "leaves the source folder"),
    "http": ("http://127.0.0.1:9/a.png", "addresses are not fetched"),
    "s3": ("s3://bucket/a.png", "addresses are not fetched"),
    "file address": ("file:///etc/hostname", "addresses are not fetched"),
    "chained address": ("simplecache::http://127.0.0.1:9/a.png", "addresses are not fetched"),
    "null": ("a\0.png", "cannot be read"),
    "number": (7, "must be the path or the bytes"),
    "empty": ("", "must be the path or the bytes"),
    "nothing": ({"bytes": None, "path": None}, "must be the path or the bytes"),
    "broken base64": ("data:image/png;base64,@@", "base64 is damaged"),
    "folder": (".", "there is no such file"),
}


@pytest.mark.parametrize(("entry", "reason"), ATTACKS.values(), ids=ATTACKS)
@pytest.mark.parametrize("remote", [False, True])
def test_no_row_reads_what_is_outside_of_the_root(root, entry, reason, remote):
    if remote and entry in ("link.png", "a\0.png", "."):
        pytest.skip("a remote root has no links of this machine")
    with pytest.raises(RowFault, match=reason):
        SourceRoot("memory://bucket" if remote else root).read(entry, "image")


def test_a_pipe_is_no_image(root):
    import os

    os.mkfifo(root / "pipe.png")
    with pytest.raises(RowFault, match="no such file"):
        SourceRoot(root).read("pipe.png", "image")


def test_the_user_may_allow_files_outside_but_no_addresses(root):
    images = SourceRoot(root, allow_outside=True)
    secret = png((9, 9, 9))
    for name in ("../secret.png", "link.png", str(root.parent / "secret.png")):
        assert images.read(name, "image") == (secret, name)
    with pytest.raises(RowFault, match="not fetched"):
        images.read("http://127.0.0.1:9/a.png", "image")


def test_a_remote_root_that_the_user_names_is_read(root):
    import fsspec

    with fsspec.open("memory://bucket/folder/a.png", "wb") as file:
        file.write(png())
    images = SourceRoot("memory://bucket/folder")
    assert images.read("a.png", "image") == (png(), "a.png")
    with pytest.raises(RowFault, match="does not have"):
        images.read("b.png", "image")


def test_a_root_of_an_unknown_kind_is_refused():
    with pytest.raises(DataError, match="nonesuch://x cannot be opened"):
        SourceRoot("nonesuch://x")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


def test_no_format_that_starts_a_program_is_opened(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a program was started"))
    with pytest.raises(RowFault, match="no image"):
        check_decodes(EPS, "image", "a.eps")


def test_a_decompression_bomb_is_a_fault(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    with pytest.raises(RowFault, match="too large to decode"):
        check_decodes(png(), "image", "a.png")


def test_the_digest_is_of_the_picture_not_of_its_file():
    plain = check_decodes(png(), "image", None)
    assert check_decodes(png(compress_level=0), "image", None).digest == plain.digest
    assert check_decodes(png((1, 2, 4)), "image", None).digest != plain.digest
    assert check_decodes(png(size=(3, 4)), "image", None).digest != plain.digest


def pictures() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    grey = Image.new("P", (4, 3), 1)
    buffer = io.BytesIO()
    grey.save(buffer, format="PNG", transparency=1)
    return {
        "RGB": png(),
        "turned": png(exif=exif),
        "RGBA": png((10, 20, 30, 100), mode="RGBA"),
        "LA": png((10, 100), mode="LA"),
        "L": png(7, mode="L"),
        "P with transparency": buffer.getvalue(),
        "16 bit": png(300, mode="I;16"),
    }


@pytest.mark.parametrize("name", pictures())
def test_every_kind_of_pixels_is_an_image_with_a_digest_of_its_own(name):
    """The pixels are those that training decodes: 4 x 3 upright, or 3 x 4 where the orientation turns them."""
    facts = {other: check_decodes(data, "image", None) for other, data in pictures().items()}
    assert facts[name].size == (4, 3) and facts[name].upright_size == ((3, 4) if name == "turned" else (4, 3))
    assert [other for other in facts if facts[other].digest == facts[name].digest] == [name]


def test_what_decoded_before_is_remembered_by_content(tmp_path, monkeypatch):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    data = png(exif=exif)
    with DecodedImages(tmp_path / "decoded") as images:
        first = images.facts(data, "image", "a.png")
    assert (first.size, first.upright_size, first.orientation) == ((4, 3), (3, 4), 6)
    assert first.digest == check_decodes(png(size=(3, 4)), "image", None).digest
    monkeypatch.setattr("data_prep.seen.check_decodes", lambda *_: pytest.fail("decoded again"))
    with DecodedImages(tmp_path / "decoded") as images:
        assert images.facts(data, "image", "b.png") == first
        images.forget()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: data[:90] + b"\xff" + data[91:]])
def test_a_damaged_memory_is_forgotten_from_there_on(tmp_path, damage):
    path = tmp_path / "decoded"
    with DecodedImages(path) as images:
        for number in range(3):
            images.facts(png((number, 0, 0)), "image", None)
    path.write_bytes(damage(path.read_bytes()))
    with DecodedImages(path) as images:
        assert len(images) in (1, 2)
        assert path.stat().st_size == 77 * len(images)
