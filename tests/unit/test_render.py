"""Views drawn into plain verl rows: the pixels, the columns, and rows that cannot be used."""

import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.__main__ import main
from data_prep.rows import ROWS_PER_GROUP
from data_prep.toy.dataset import make_row

RED = (255, 0, 0)


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def toy_rows(count):
    return [make_row("train", index, seed=0) for index in range(count)]


def render(data, out, *options, view="student"):
    main(["render", "--data", str(data), "--out", str(out), "--overlay", "toy", "--view", view, *options])
    return pq.read_table(out).to_pylist()


def refusal(tmp_path, data, *options, view="student"):
    """The message of a run that must fail, and leave nothing."""
    out = tmp_path / "out" / "rendered.parquet"
    with pytest.raises(SystemExit) as stopped:
        render(data, out, *options, view=view)
    assert isinstance(stopped.value.code, str)
    assert not out.parent.exists() or not list(out.parent.iterdir())
    return stopped.value.code


def image_of(row, column="images"):
    return Image.open(io.BytesIO(row[column][0]["bytes"])).convert("RGB")


def test_the_students_view_has_the_red_box_on_unchanged_pixels(tmp_path):
    source = toy_rows(3)
    for before, after in zip(
        source, render(write(tmp_path / "a.parquet", source), tmp_path / "b.parquet"), strict=True
    ):
        scene, drawn = image_of(before), image_of(after)
        x0, y0, x1, y1 = map(int, before["bbox"])
        assert drawn.size == scene.size
        assert drawn.crop((x0, y0, x1, y1)).tobytes() == scene.crop((x0, y0, x1, y1)).tobytes()
        # The overlay's line is 2 px wide and lies outside of the box, which is not expanded.
        corners = [(x0 - 2, y0 - 2), (x0 - 1, y0 - 1), (x1, y1), (x1 + 1, y1 + 1)]
        assert [drawn.getpixel(p) for p in corners] == [RED] * 4
        assert drawn.getpixel((x0 - 3, y0)) == scene.getpixel((x0 - 3, y0)) != RED


def test_the_teachers_view_is_the_crop_enlarged_twice(tmp_path):
    (row,) = render(write(tmp_path / "a.parquet", toy_rows(1)), tmp_path / "b.parquet", view="teacher")
    assert image_of(row).size == (96, 96)  # a cut-out of 48 px, twice


def test_rows_serve_reinforcement_and_imitation(tmp_path):
    (source,) = toy_rows(1)
    (row,) = render(write(tmp_path / "a.parquet", [source]), tmp_path / "b.parquet")
    assert set(row) == {"data_source", "prompt", "messages", "images", "reward_model", "extra_info"}
    assert {key: row[key] for key in ("data_source", "prompt", "reward_model", "extra_info")} == {
        key: source[key] for key in ("data_source", "prompt", "reward_model", "extra_info")
    }
    answer = {"role": "assistant", "content": source["reward_model"]["ground_truth"]}
    assert row["messages"] == [*source["prompt"], answer]
    assert row["images"][0]["path"] is None


def test_overrides_and_tag(tmp_path):
    data = write(tmp_path / "a.parquet", toy_rows(1))
    (row,) = render(data, tmp_path / "b.parquet", "--tag", "half", "opd.views.student=[{kind: resize, scale: 0.5}]")
    assert row["data_source"] == "toy@half" and image_of(row).size == (96, 96)


def test_more_rows_than_a_row_group_from_two_files_in_order(tmp_path):
    rows = toy_rows(ROWS_PER_GROUP + 3)
    first, second = write(tmp_path / "a.parquet", rows[:-1]), write(tmp_path / "b.parquet", rows[-1:])
    drawn = render(first, tmp_path / "c.parquet", "--data", str(second))
    assert [row["extra_info"]["index"] for row in drawn] == list(range(ROWS_PER_GROUP + 3))
    assert pq.ParquetFile(tmp_path / "c.parquet").num_row_groups == 2


def test_rows_without_extra_info_are_numbered(tmp_path):
    rows = [{key: value for key, value in row.items() if key != "extra_info"} for row in toy_rows(2)]
    drawn = render(write(tmp_path / "a.parquet", rows), tmp_path / "b.parquet")
    assert [row["extra_info"] for row in drawn] == [{"index": 0}, {"index": 1}]


def test_images_by_path_start_at_the_rows_file(tmp_path):
    (row,) = toy_rows(1)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(row["images"][0]["bytes"])
    row["images"] = [{"bytes": None, "path": "pictures/a.png"}]
    (drawn,) = render(write(tmp_path / "a.parquet", [row]), tmp_path / "b.parquet", view="teacher")
    assert image_of(drawn).size == (96, 96)


def test_ready_made_evidence_is_a_view_too(tmp_path):
    (row,) = toy_rows(1)
    row["bbox_images"] = [{"bytes": row["images"][0]["bytes"], "path": None}]
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), RED).save(buffer, format="PNG")
    row["images"] = [{"bytes": buffer.getvalue(), "path": None}]
    data = write(tmp_path / "a.parquet", [row])
    (drawn,) = render(data, tmp_path / "b.parquet", "opd.views.teacher=[{kind: provided}]", view="teacher")
    assert image_of(drawn).tobytes() == image_of(row, "bbox_images").tobytes()


def bad_rows():
    rows = toy_rows(5)
    rows[1]["bbox"] = [9.0, 9.0, 9.0, 9.0]
    rows[2]["reward_model"] = {"style": "rule", "ground_truth": None}
    rows[3]["prompt"] = [{"role": "user", "content": "no placeholder"}]
    return rows


def test_bad_rows_are_all_named_and_nothing_is_written(tmp_path):
    data = write(tmp_path / "a.parquet", bad_rows())
    message = refusal(tmp_path, data)
    assert message.startswith("data_prep: 3 of 5 rows cannot be used:")
    assert f"{data}, row 1: bbox [9.0, 9.0, 9.0, 9.0] is empty" in message
    assert f"{data}, row 2: no reward_model.ground_truth" in message
    assert f"{data}, row 3: 0 <image> in the prompt for 1 images" in message
    assert message.endswith("Nothing was written. Mend or remove these rows, or leave them out with --skip-bad")


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path, capsys):
    data = write(tmp_path / "a.parquet", bad_rows())
    drawn = render(data, tmp_path / "b.parquet", "--skip-bad")
    assert [row["extra_info"]["index"] for row in drawn] == [0, 4]
    rejects = [json.loads(line) for line in (tmp_path / "b.rejects.jsonl").read_text().splitlines()]
    assert [(reject["file"], reject["row"]) for reject in rejects] == [(str(data), n) for n in (1, 2, 3)]
    assert f"wrote 2 rows, 3 left out ({tmp_path}/b.rejects.jsonl)" in capsys.readouterr().out


def test_nothing_is_left(tmp_path):
    data = write(tmp_path / "a.parquet", bad_rows()[1:2])
    assert "No row is left, so nothing was written" in refusal(tmp_path, data, "--skip-bad")


def test_a_missing_column_is_named(tmp_path):
    rows = [{key: value for key, value in row.items() if key != "bbox"} for row in toy_rows(1)]
    assert "a.parquet: column bbox is missing; it has data_source" in refusal(
        tmp_path, write(tmp_path / "a.parquet", rows)
    )


def test_no_parquet_file(tmp_path):
    (tmp_path / "a.parquet").write_text("rows")
    assert "a.parquet cannot be read as parquet" in refusal(tmp_path, tmp_path / "a.parquet")


def test_an_unknown_view_or_recipe_is_refused(tmp_path):
    data = write(tmp_path / "a.parquet", toy_rows(1))
    assert "crops" in refusal(tmp_path, data, view="crops")
    assert "--config-name vision_opt" in refusal(tmp_path, data, "--config-name", "vision_opt")
    assert "opd.views.student: unknown value 'redbx'" in refusal(tmp_path, data, "opd.views.student=[{kind: redbx}]")


def test_an_earlier_file_survives_a_failure(tmp_path):
    out = tmp_path / "out.parquet"
    render(write(tmp_path / "a.parquet", toy_rows(1)), out)
    before = out.read_bytes()
    with pytest.raises(SystemExit):
        render(write(tmp_path / "a.parquet", bad_rows()), out)
    assert out.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "out.parquet"]
