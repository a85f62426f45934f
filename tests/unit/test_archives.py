"""Archives in the folder of the published set: what is unpacked, what is refused, and that nothing is written elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data_prep import archives, unpacked, vision_opd_6k
from tests.unit import commands
from tests.unit.archive_cases import (
    BOTH,
    CROPS,
    DAMAGED,
    HOSTILE_TARS,
    HOSTILE_ZIPS,
    IMAGES,
    ROWS,
    claimed,
    long_header,
    nested_headers,
    png,
    short,
    source_of,
    tar,
    zipped,
)


def converted(source: Path, out: Path, *options: Any) -> list[dict[str, Any]]:
    commands.run(vision_opd_6k, "--source", source, "--out", out, *options)
    assert [file.name for file in out.iterdir()] == ["train.parquet"], "what was unpacked is removed"
    return pq.read_table(out / "train.parquet").to_pylist()


def refusal(source: Path, out: Path) -> str:
    """Why an archive is refused; nothing is left in the output, and nothing was written around it."""
    before = {file for file in source.parent.rglob("*") if out not in (file, *file.parents)}
    with pytest.raises(SystemExit) as stopped:
        commands.run(vision_opd_6k, "--source", source, "--out", out)
    assert isinstance(stopped.value.code, str)
    assert not list(out.rglob("*"))
    assert {file for file in source.parent.rglob("*") if out not in (file, *file.parents)} == before
    return stopped.value.code


SETS = {
    "two tars": {"images.tar": tar(IMAGES), "teacher_images.tar": tar(CROPS)},
    "one tar": {"data.tar": tar(BOTH)},
    "gzip": {"images.tar.gz": tar(IMAGES, "w:gz"), "teacher_images.tgz": tar(CROPS, "w:gz")},
    "gzip that is called tar": {"data.tar": tar(BOTH, "w:gz")},
    "zip": {"images.zip": zipped(IMAGES), "teacher_images.zip": zipped(CROPS, zipfile.ZIP_STORED)},
    "without their folder": {"images.tar": tar(short(IMAGES)), "teacher_images.zip": zipped(short(CROPS))},
    "with a dot": {"data.tar": tar({f"./{name}": data for name, data in BOTH.items()})},
    "with other files": {"data.tar": tar({"README.md": b"x", "images/._0.png": b"", **BOTH, "run.sh": b"rm"})},
    "one as files": {"images.tar": tar(IMAGES), **CROPS},
    "other archives": {"code.zip": zipped({"a.py": b""}), "data.tar": tar(BOTH)},
}


@pytest.mark.parametrize("files", SETS.values(), ids=SETS)
def test_rows_hold_the_images_that_the_archives_have(tmp_path, files):
    rows = converted(source_of(tmp_path / "in", files), tmp_path / "out")
    for n, row in enumerate(rows):
        assert row["images"] == [{"bytes": IMAGES[f"images/{n}.png"], "path": f"images/{n}.png"}]
        assert row["bbox_images"] == [{"bytes": CROPS[f"teacher_images/{n}.png"], "path": f"teacher_images/{n}.png"}]
    assert len(rows) == ROWS


@pytest.mark.parametrize(
    "names", [["part00", "part01", "part02"], ["001", "002", "003"], ["part-aa", "part-ab", "part-ac"]]
)
@pytest.mark.parametrize(
    ("name", "data"), [("data.tar", tar(BOTH)), ("data.tar.gz", tar(BOTH, "w:gz")), ("d.zip", zipped(BOTH))]
)
def test_split_archives_are_joined(tmp_path, names, name, data):
    third = len(data) // 3 + 1
    parts = {f"{name}.{part}": data[i * third : (i + 1) * third] for i, part in enumerate(names)}
    assert len(converted(source_of(tmp_path / "in", parts), tmp_path / "out")) == ROWS


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["data.tar.part00", "data.tar.part02"], "not all from the first on"),
        (["data.tar.part01", "data.tar.part03"], "not all from the first on"),
        (["data.tar.ab", "data.tar.ac"], "not all from the first on"),
        (["data.tar.002"], "not all from the first on"),
        (["data.tar.1", "data.tar.01"], "not all from the first on"),
        (["data.tar", "data.tar.00"], "lies there whole and in parts"),
    ],
)
def test_parts_that_are_not_all_there(tmp_path, names, reason):
    message = refusal(source_of(tmp_path / "in", dict.fromkeys(names, tar(BOTH))), tmp_path / "out")
    assert reason in message and "data.tar" in message


def test_images_that_lie_there_as_files_are_not_looked_for(tmp_path):
    source = source_of(tmp_path / "in", {**BOTH, "broken.tar": b"no archive"})
    assert len(converted(source, tmp_path / "out")) == ROWS


def test_an_image_that_is_nowhere_is_told_with_what_the_archives_have(tmp_path):
    files = {"data.tar": tar({f"set/{name}": data for name, data in BOTH.items()}), "rest.tar.zst": b"", "x.z01": b""}
    with pytest.raises(SystemExit) as stopped:
        commands.run(vision_opd_6k, "--source", source_of(tmp_path / "in", files), "--out", tmp_path / "out")
    assert (
        "'images' names 'images/0.png', which is neither a file nor in an archive (data.tar begins with "
        "'set/images/0.png'; rest.tar.zst, x.z01: unpack such archives yourself)"
    ) in str(stopped.value.code)


# Hostile archives


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize(("add", "reason"), HOSTILE_TARS.values(), ids=HOSTILE_TARS)
def test_a_hostile_tar_is_refused_as_a_whole_though_its_other_members_are_good(tmp_path, mode, add, reason):
    message = refusal(source_of(tmp_path / "in", {"data.tar": tar(BOTH, mode, add)}), tmp_path / "out")
    assert message.startswith("data_prep: data.tar: ") and reason in message


@pytest.mark.parametrize(("data", "reason"), HOSTILE_ZIPS.values(), ids=HOSTILE_ZIPS)
def test_a_hostile_zip_is_refused_as_a_whole(tmp_path, data, reason):
    message = refusal(source_of(tmp_path / "in", {"data.zip": data}), tmp_path / "out")
    assert message.startswith("data_prep: data.zip: ") and reason in message


def test_the_same_image_in_two_archives_is_refused(tmp_path):
    source = source_of(tmp_path / "in", {"a.tar": tar(BOTH), "b.zip": zipped(BOTH)})
    assert "is in b.zip and in another archive" in refusal(source, tmp_path / "out")


@pytest.mark.parametrize("add", [long_header, claimed])
def test_a_header_that_would_fill_the_memory_is_refused(tmp_path, add):
    source = source_of(tmp_path / "in", {"data.tar.gz": tar(BOTH, "w:gz", add)})
    assert "a member's header is longer than 1024 KB" in refusal(source, tmp_path / "out")


def test_headers_without_end_are_refused(tmp_path):
    source = source_of(tmp_path / "in", {"data.tar": tar(BOTH, "w", nested_headers)})
    assert "data.tar" in refusal(source, tmp_path / "out")


@pytest.mark.parametrize("wanted", [True, False])
def test_a_bomb_is_refused_whether_its_member_is_wanted_or_not(tmp_path, monkeypatch, wanted):
    monkeypatch.setattr(archives, "FREE", 2**20)
    name = "images/0.png" if wanted else "padding"
    files = {name: bytes(8 * 2**20), **{key: data for key, data in BOTH.items() if key != name}}
    message = refusal(source_of(tmp_path / "in", {"data.tar.gz": tar(files, "w:gz")}), tmp_path / "out")
    assert "data.tar.gz: its " in message and "unpack to" in message and "which images do not" in message


def test_a_zip_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "FREE", 2**20)
    source = source_of(tmp_path / "in", {"data.zip": zipped({**BOTH, "images/0.png": bytes(8 * 2**20)})})
    assert "which images do not" in refusal(source, tmp_path / "out")


def test_volume_members_and_size_are_limited(tmp_path, monkeypatch):
    source = source_of(tmp_path / "in", {"data.tar": tar(BOTH)})
    monkeypatch.setattr(archives, "MAX_UNPACKED", 1000)
    assert "which images do not" in refusal(source, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(archives, "MAX_MEMBERS", 7)
    assert "has more than 7 members" in refusal(source, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(unpacked, "MAX_ENCODED_BYTES", 50)
    assert "is it an image?" in refusal(source, tmp_path / "out")


@pytest.mark.parametrize(("name", "data"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_archive_is_refused(tmp_path, name, data):
    message = refusal(source_of(tmp_path / "in", {name: data}), tmp_path / "out")
    assert (
        message.startswith(f"data_prep: {name}") and "is the download complete?" in message or "is neither" in message
    )


# Going on

KILL = """
import os, signal, sys
from data_prep import unpacked, vision_opd_6k
from data_prep.__main__ import main
stored = []
store = unpacked._store
def kill(*arguments):
    if len(stored) == {after}:
        os.kill(os.getpid(), signal.SIGKILL)
    stored.append(store(*arguments))
unpacked._store = kill
main({arguments!r})
"""


def spy(monkeypatch, function: str, argument: int) -> list[str]:
    """The names of what one argument was, at each call."""
    names: list[str] = []
    original = getattr(unpacked, function)

    def noting(*arguments: Any) -> Any:
        names.append(arguments[argument].name)
        return original(*arguments)

    monkeypatch.setattr(unpacked, function, noting)
    return names


def test_a_run_goes_on_where_a_killed_one_was(tmp_path, monkeypatch):
    out = tmp_path / "out"
    source = source_of(tmp_path / "in", {"images.tar": tar(IMAGES), "teacher_images.tar.gz": tar(CROPS, "w:gz")})
    arguments = ["vision-opd-6k", "--source", str(source), "--out", str(out)]
    code = KILL.format(after=ROWS + 1, arguments=arguments)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -signal.SIGKILL
    read, stored = spy(monkeypatch, "read_members", 0), spy(monkeypatch, "_store", 1)
    assert len(converted(source, out)) == ROWS
    assert read == ["teacher_images.tar.gz"] and stored == [f"teacher_images/{n}.png" for n in (1, 2, 3)]


def test_a_changed_archive_is_unpacked_anew(tmp_path):
    out = tmp_path / "out"
    source = source_of(tmp_path / "in", {"data.tar": tar({**BOTH, "images/0.png": b"no image"})})
    with pytest.raises(SystemExit, match="1 of 4 rows cannot be used"):
        commands.run(vision_opd_6k, "--source", source, "--out", out)
    assert [file.name for file in out.iterdir()] == [unpacked.FOLDER], "kept for the next run"
    (source / "data.tar").write_bytes(tar(BOTH))
    os.utime(source / "data.tar", ns=(1, 1))
    assert converted(source, out)[0]["images"][0]["bytes"] == IMAGES["images/0.png"]


def test_only_what_rows_name_is_unpacked(tmp_path, monkeypatch):
    stored = spy(monkeypatch, "_store", 1)
    source = source_of(tmp_path / "in", {"data.tar": tar({"images/9.png": png(9), "images/x.sh": b"rm", **BOTH})})
    converted(source, tmp_path / "out", "--limit", "2")
    assert sorted(stored) == [f"{field}/{n}.png" for field in ("images", "teacher_images") for n in range(2)]


def test_names_of_files_are_ours(tmp_path):
    """Whatever a member is called, what is written is called by a digest of it."""
    images = unpacked.SourceImages(source_of(tmp_path / "in", {"data.tar": tar(BOTH)}), tmp_path / "out")
    assert images.unpack(BOTH) == ["8 of 8 images that are no files were found in data.tar"]
    files = [file for file in images.folder.rglob("*") if file.is_file()]
    names = {file.name for file in files if file.parent != images.folder}
    assert len(names) == 8 and all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in names)
