"""The checker: files and their columns, its parts, and the command with its reports and clean copies."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep import check, check_fix, check_memory, check_report
from data_prep.check_images import inspect_image
from data_prep.check_text import SpecialTokens, prompt_findings
from data_prep.faults import Fault, Finding
from opd_recipes.images import ImageRoot
from tests import harness
from tests.unit.check_helpers import (
    HALF,
    HINT,
    PROVIDED,
    SCHEMA,
    SMALL_BATCH,
    faults_of,
    setup,
    write,
)
from tests.unit.check_rows import (
    BOX,
    QUESTION,
    encoded,
    entry,
    picture,
    row,
)

# Files


def table_of(**columns: Any) -> pa.Table:
    """One sound row; columns are replaced by arrays, or left out where None."""
    whole = pa.Table.from_pylist([row(0)], schema=SCHEMA)
    for name, values in columns.items():
        index = whole.schema.get_field_index(name)
        whole = whole.remove_column(index) if values is None else whole.set_column(index, name, values)
    return whole


def file_kinds(
    folder: Path, content: pa.Table | bytes, *overrides: str, name: str = "odd.parquet", val=False
) -> set[str]:
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(content, path)
    faults = faults_of(folder, [[row(1)]], *overrides, val=[path]) if val else faults_of(folder, [path], *overrides)
    return {fault["kind"] for fault in faults if fault["file"] == str(path) and fault["row"] is None}


PARTS = [[{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]}]]


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"images": None}, "missing_column"),
        ({"prompt": None}, "missing_column"),
        ({"data_source": None}, "missing_column"),
        ({"bbox": None}, "missing_column"),
        ({"prompt": pa.array([QUESTION])}, "wrong_column_type"),
        ({"prompt": pa.array(PARTS)}, "wrong_column_type"),
        ({"images": pa.array([entry(b"x", "a.png")])}, "wrong_column_type"),
        ({"images": pa.array([[1, 2]])}, "wrong_column_type"),
        ({"images": pa.array([[b"x"]])}, "wrong_column_type"),
        ({"bbox": pa.array([{"x0": 1.0}])}, "wrong_column_type"),
        ({"bbox": pa.array(["1,2,3,4"])}, "wrong_column_type"),
        ({"bbox": pa.array([["1", "2", "3", "4"]])}, "wrong_column_type"),
        ({"data_source": pa.array([3])}, "wrong_column_type"),
        ({"reward_model": pa.array(["red"])}, "wrong_column_type"),
        ({"extra_info": pa.array(['{"index": 1}'])}, "wrong_column_type"),
        ({"reward_model": pa.array([{"ground_truth": 3}])}, "answer_number"),
        ({"reward_model": pa.array([{"ground_truth": ["red", "blue"]}])}, "answer_type"),
    ],
)
def test_columns(tmp_path, columns, kind):
    assert file_kinds(tmp_path, table_of(**columns)) == {kind}


@pytest.mark.parametrize(
    "columns",
    [
        {"reward_model": None, "extra_info": None, "ability": None, "bbox_images": None},
        {"bbox": pa.array([[20, 12, 68, 44]])},
        {"bbox": pa.array([BOX], pa.list_(pa.float32(), 4))},
        {"data_source": pa.array(["test"], pa.large_string())},
        {"reward_model": pa.array([{"ground_truth": None}])},
    ],
)
def test_columns_of_other_types_that_training_reads(tmp_path, columns):
    assert file_kinds(tmp_path, table_of(**columns)) == set()


def test_columns_that_only_some_recipes_read(tmp_path):
    bare = table_of(reward_model=None, bbox_images=None, bbox=None)
    assert file_kinds(tmp_path, bare, *HALF) == set()
    assert file_kinds(tmp_path, bare, *PROVIDED) == {"missing_column"}
    assert file_kinds(tmp_path, bare, *HALF, HINT) == {"missing_column"}
    assert file_kinds(tmp_path, bare, *HALF, val=True) == {"missing_column"}


def test_images_that_datasets_would_decode(tmp_path):
    import datasets

    rows = {"images": [[picture(0)]], **{name: [row(0)[name]] for name in ("data_source", "prompt", "bbox")}}
    for decode, kinds in ((True, {"image_feature"}), (False, set())):
        columns = datasets.Dataset.from_dict(rows).cast_column("images", datasets.List(datasets.Image(decode=decode)))
        columns.to_parquet(str(tmp_path / "hf.parquet"))
        faults = faults_of(tmp_path, [tmp_path / "hf.parquet"])
        assert {fault["kind"] for fault in faults if fault["file"]} == kinds


def test_files_that_cannot_be_read(tmp_path):
    whole = (write(tmp_path / "whole.parquet", [row(i) for i in range(3)])).read_bytes()
    assert file_kinds(tmp_path, b"rows") == {"unreadable_file"}
    assert file_kinds(tmp_path, b"") == {"unreadable_file"}
    assert file_kinds(tmp_path, whole[: len(whole) // 2]) == {"unreadable_file"}
    assert file_kinds(tmp_path, whole, name="rows.pq") == {"unreadable_file"}
    assert file_kinds(tmp_path, SCHEMA.empty_table()) == {"no_rows"}


def test_a_file_whose_pages_are_damaged(tmp_path):
    data = bytearray(write(tmp_path / "whole.parquet", [row(i) for i in range(3)]).read_bytes())
    data[4:200] = bytes(196)
    assert file_kinds(tmp_path, bytes(data)) == {"unreadable_file"}


def test_files_that_cannot_be_joined(tmp_path):
    pq.write_table(table_of(bbox=pa.array([[20, 12, 68, 44]])), tmp_path / "whole_numbers.parquet")
    faults = faults_of(tmp_path, [[row(1)], tmp_path / "whole_numbers.parquet"])
    assert [(fault["kind"], fault["row"]) for fault in faults] == [("schemas_differ", None)]
    assert "column 'bbox' is list<element: int64>, but" in faults[0]["reason"]


def test_text_that_is_no_utf8_spoils_its_row_alone(tmp_path):
    names = pa.array([b"test", b"\xff\xfe", b"test"]).view(pa.binary()).cast(pa.string(), safe=False)
    whole = pa.Table.from_pylist([row(i) for i in range(3)], schema=SCHEMA)
    pq.write_table(
        whole.set_column(whole.schema.get_field_index("data_source"), "data_source", names), tmp_path / "a.parquet"
    )
    faults = faults_of(tmp_path, [tmp_path / "a.parquet"])
    assert [(fault["kind"], fault["row"]) for fault in faults] == [("not_utf8", 1)]


# Parts


def test_content_that_parquet_of_the_right_type_cannot_hold():
    special = SpecialTokens(["<|im_end|>"])
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": "http://example.com/a.png"}]}]
    assert [finding.kind for finding in prompt_findings(parts, 1, special)] == ["content_type"]
    assert [finding.kind for finding in prompt_findings("What?", 1, special)] == ["prompt_missing"]


def test_huge_images_are_told_before_they_are_bombs(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    with pytest.warns(Image.DecompressionBombWarning):
        image, found = inspect_image(entry(encoded(picture(0))), "images[0]", ImageRoot())
    assert image is not None and [finding.kind for finding in found] == ["image_huge"]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
    image, found = inspect_image(entry(encoded(picture(0))), "images[0]", ImageRoot())
    assert image is None and [finding.kind for finding in found] == ["image_bomb"]


def test_the_pixels_digest_is_of_what_training_sees():
    def digest(image: Image.Image, kind: str, **options: Any) -> bytes:
        found, _ = inspect_image(entry(encoded(image, kind, **options)), "images[0]", ImageRoot())
        assert found is not None
        return found.pixels_digest

    image = picture(0)
    assert digest(image, "PNG") == digest(image, "PNG", compress_level=1) == digest(image, "BMP")
    assert digest(image, "PNG") != digest(picture(1), "PNG")
    assert digest(image, "PNG") != digest(image.transpose(Image.Transpose.ROTATE_90), "PNG")


def test_token_summary():
    assert check_report.token_summary([5, 1, 3, 100]) == {"rows": 4, "min": 1, "mean": 27.2, "p95": 100, "max": 100}
    assert check_report.token_summary(range(1, 101))["p95"] == 95


def test_memory_of_the_tiny_model():
    """By hand, from its config.json: hidden 128, feed-forward 256, 3 layers, vocabulary 336; fp32, no checkpointing."""
    from safetensors import safe_open

    with safe_open(Path(harness.BASE) / "model.safetensors", "pt") as file:
        parameters = sum(np.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    memory = check_memory.estimate_memory(setup().config, setup().model_config, longest=60)
    assert memory["parameters"] == parameters and memory["state_bytes"] == 20 * parameters
    assert memory["micro_batch_tokens"] == 8192
    assert memory["activation_bytes"] == 8192 * 3 * (8 * 128 + 3 * 256) * 4
    assert memory["head_bytes"] == 6 * 256 * 336 * 4
    assert memory["total_bytes"] == memory["state_bytes"] + memory["activation_bytes"] + memory["head_bytes"]


# The command


def run(*arguments: Any) -> int:
    parser = argparse.ArgumentParser()
    check.add_arguments(parser)
    args = parser.parse_args([str(a) for a in (*arguments, "--overlay", "cpu,toy", "--model", harness.BASE)])
    try:
        check.run(args)
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        return stopped.code
    return 0


def test_a_clean_file(tmp_path, capsys):
    train, val = (
        write(tmp_path / "train.parquet", [row(i) for i in range(3)]),
        write(tmp_path / "val.parquet", [row(9)]),
    )
    assert run(train, SMALL_BATCH, "--val", val) == 0
    out = capsys.readouterr().out
    assert "0 errors, 0 warnings" in out and "training, student" in out and "memory for training" in out


def test_faulty_rows_and_a_clean_copy(tmp_path, capsys):
    source = tmp_path / "source"
    rows = [row(i, **({"bbox": None} if i in (1, 20) else {})) for i in range(40)]
    train = write(source / "train.parquet", rows)
    before = train.read_bytes()
    assert run(train, SMALL_BATCH, "--fix", tmp_path / "clean", "--json", tmp_path / "out.json") == 1
    assert train.read_bytes() == before and [file.name for file in source.iterdir()] == ["train.parquet"]

    copy = pq.read_table(tmp_path / "clean" / "train.parquet")
    assert copy.schema.equals(pq.read_schema(train), check_metadata=True)
    assert copy.to_pylist() == [one for i, one in enumerate(pq.read_table(train).to_pylist()) if i not in (1, 20)]
    rejects = [json.loads(line) for line in (tmp_path / "clean" / "rejects.jsonl").read_text().splitlines()]
    assert [(reject["file"], reject["row"]) for reject in rejects] == [(str(train), 1), (str(train), 20)]
    assert "evidence box" in rejects[0]["reasons"][0]
    assert sorted(file.name for file in (tmp_path / "clean").iterdir()) == ["rejects.jsonl", "train.parquet"]
    assert run(tmp_path / "clean" / "train.parquet", SMALL_BATCH) == 0

    report = json.loads((tmp_path / "out.json").read_text())
    assert report["counts"] == {"box_missing": 2} and report["errors"] == 2
    assert report["sets"]["training"]["rows_with_errors"] == 2
    assert report["sets"]["training"]["tokens"]["student"]["rows"] == 38
    out = capsys.readouterr().out
    assert "box_missing  error          2" in out and f"{train}, row 1: " in out


def test_a_file_with_a_fault_of_its_own_is_not_copied(tmp_path, capsys):
    good, bad = write(tmp_path / "good.parquet", [row(0)]), tmp_path / "bad.parquet"
    bad.write_bytes(b"rows")
    assert run(good, bad, SMALL_BATCH, "--fix", tmp_path / "clean") == 1
    assert sorted(file.name for file in (tmp_path / "clean").iterdir()) == ["good.parquet", "rejects.jsonl"]
    assert f"not copied: {bad}" in capsys.readouterr().out


def test_warnings_alone_are_clean(tmp_path, capsys):
    train = write(tmp_path / "train.parquet", [row(0, bbox=[0.0, 0.0, 96.0, 64.0])])
    assert run(train, SMALL_BATCH) == 0
    assert "0 errors, 1 warnings" in capsys.readouterr().out


def test_a_limit(tmp_path, capsys):
    train = write(tmp_path / "train.parquet", [row(0), row(1), row(2, bbox=None)])
    assert run(train, "--limit", 2) == 0
    out = capsys.readouterr().out
    assert "training: 2 rows checked" in out and "only the first 2 rows" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{train}", "opd.teacher.rate=7"], "opd.teacher.rate"),
        (["{train}", "no.such.key=1"], "no.such.key"),
        (["{train}", "--config-name", "no_such_recipe"], "no_such_recipe"),
        (["{train}", "--config-name", "grpo"], "opd"),
        (["gone.parquet"], "gone.parquet: no such file"),
        (["data.seed=1"], "at least one file"),
        (["{train}", "--fix", "{folder}"], "name another folder"),
        (["{train}", "--fix", "{folder}/new", "--limit", "1"], "leave --limit out"),
        (["{train}", "--json", "{train}"], "would overwrite"),
    ],
)
def test_what_cannot_run(tmp_path, capsys, arguments, words):
    train = write(tmp_path / "train.parquet", [row(0)])
    before = train.read_bytes()
    assert run(*(a.replace("{train}", str(train)).replace("{folder}", str(tmp_path)) for a in arguments)) == 2
    assert words in capsys.readouterr().err and train.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["train.parquet"]


def test_copies_of_the_same_name(tmp_path):
    files = [write(tmp_path / name / "train.parquet", [row(0)]) for name in "ab"]
    with pytest.raises(check.DataError, match="same name"):
        check_fix.check_target(tmp_path / "out", files)


def test_files_and_overrides_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("size=2.parquet").touch()
    given = ["a.parquet", "data.seed=1", "+overlay=[toy]", "~opd.x", "size=2.parquet", "b/c=1.parquet"]
    files, overrides = check.split_inputs(given)
    assert files == [Path("a.parquet"), Path("size=2.parquet")]
    assert overrides == ["data.seed=1", "+overlay=[toy]", "~opd.x", "b/c=1.parquet"]


def test_reasons_are_one_short_line(tmp_path):
    """Rows and decoders supply parts of them: no escape sequence reaches a terminal."""
    fault = Fault.at(Finding("special_token", "a \x1b[2J\n" + "é" * 1000), "a.parquet", 3)
    assert fault.reason.startswith("a \\x1b[2J\\né") and len(fault.reason) < 520 and fault.reason.endswith("...")
    assert fault.place == "a.parquet, row 3"


def test_rows_at_an_address(tmp_path, capsys):
    """Images that the rows name are read beside it, as training does."""
    import fsspec

    rows = [row(0), row(1, bbox=None), row(2, images=[entry(None, "pictures/2.png")])]
    for name, data in (
        ("train.parquet", write(tmp_path / "a.parquet", rows).read_bytes()),
        ("pictures/2.png", encoded(picture(2))),
    ):
        with fsspec.open(f"memory://rows/{name}", "wb") as file:
            file.write(data)
    assert run("memory://rows/train.parquet", SMALL_BATCH, "--fix", tmp_path / "clean") == 1
    out = capsys.readouterr().out
    assert "memory://rows/train.parquet, row 1: " in out and "3 rows checked, 1 with errors" in out
    assert pq.read_table(tmp_path / "clean/train.parquet").num_rows == 2
    assert (
        run("memory://rows/gone.parquet") == 2 and "memory://rows/gone.parquet: no such file" in capsys.readouterr().err
    )
    assert run("nosuch://rows/a.parquet") == 2 and "nosuch://rows/a.parquet cannot be opened" in capsys.readouterr().err
