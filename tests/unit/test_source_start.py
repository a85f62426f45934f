"""A pass over a source that begins at any record gives what a whole pass gives from there on, with the same places."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import sources
from data_prep.rows import DataError, RowFault, read_rows
from data_prep.sources import Source, open_source

ROWS = [{"n": n, "text": "x" * n} for n in range(23)]


def lines(folder: Path) -> Path:
    """Two files, with blank lines and a broken one."""
    text = [json.dumps(row) + "\n" * (1 + n % 3) for n, row in enumerate(ROWS)]
    text[5] = "{broken\n"
    (folder / "a.jsonl").write_text("".join(text[:9]))
    (folder / "b.jsonl").write_text("".join(text[9:]))
    return folder


def array(folder: Path) -> Path:
    (folder / "a.json").write_text("[" + ",\n".join(json.dumps(row) for row in ROWS[:-1]) + ", {broken}]")
    return folder / "a.json"


def parquet(folder: Path) -> Path:
    """Two files with row groups of four."""
    for name, rows in (("a", ROWS[:10]), ("b", ROWS[10:])):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=4)
    return folder


def saved(folder: Path) -> Path:
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "set"))
    return folder / "set"


def plain(found: Any) -> list[Any]:
    return [(place, str(record) if isinstance(record, RowFault) else record) for place, record in found]


@pytest.mark.parametrize("make", [lines, array, parquet, saved])
def test_from_any_record_on(tmp_path, make: Callable[[Path], Path]):
    source = open_source(make(tmp_path))
    whole = plain(source.records())
    assert len(whole) == len(ROWS)
    for start in (0, 1, 4, 5, 9, 10, 11, 22, 23, 40):
        assert plain(source.records(start=start)) == whole[start:]
        assert plain(source.records(start + 3, start)) == whole[start : start + 3]
        assert plain(source.records(15, start)) == whole[start:15]


def test_a_source_that_can_only_be_read_from_its_start():
    place = sources.Place("many", 0)
    source = Source("generator", ("many",), ".", lambda: ((place, {"n": n}) for n in range(9)))
    assert [record["n"] for _, record in source.records(7, 5) if isinstance(record, dict)] == [5, 6]


def test_records_that_are_passed_over_are_not_parsed(tmp_path, monkeypatch):
    parsed: list[bytes] = []

    def parse(record: bytes) -> dict[str, Any]:
        parsed.append(record)
        return {}

    monkeypatch.setattr(sources, "parse_object", parse)
    assert len(list(open_source(lines(tmp_path)).records(start=20))) == 3 == len(parsed)


def test_row_groups_that_are_passed_over_are_not_read(tmp_path):
    """The first group's pages are damaged: only who begins behind it can read the file."""
    file = parquet(tmp_path) / "a.parquet"
    data = bytearray(file.read_bytes())
    data[4:60] = bytes(56)
    file.write_bytes(bytes(data))
    with pytest.raises(DataError, match="cannot be read as parquet"):
        list(read_rows(file))
    assert [number for number, _ in read_rows(file, start=5)] == [5, 6, 7, 8, 9]
