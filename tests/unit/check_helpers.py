"""What the checker's tests share: a set-up of the tiny model for each list of overrides, and the faults of rows."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep import check
from data_prep.check_setup import load_setup
from data_prep.faults import Report
from data_prep.rows import schema
from tests import harness
from tests.unit.check_rows import row

SMALL_BATCH = "data.train_batch_size=1"
SCHEMA = schema(with_bbox=True, with_evidence=True)
PROVIDED = ("opd.views.student=[original]", "opd.views.teacher=[provided]")
HALF = ("opd.views.student=[{kind: resize, scale: 0.5}]", "opd.views.teacher=[original]")
HINT = "opd.teacher_hint=' It is {answer}.'"


@cache
def setup(*overrides: str):
    return load_setup("vision_opd", "cpu,toy", [SMALL_BATCH, *overrides], harness.BASE)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    return path


def faults_of(
    folder: Path, train: list, *overrides: str, val: list | None = None, limit: int | None = None
) -> list[dict]:
    """All faults of training (and validation) files; an item is a list of rows, or a file."""
    out = folder / "report.json"

    def files(items: list, name: str) -> list[Path]:
        return [
            item if isinstance(item, Path) else write(folder / f"{name}{i}.parquet", item)
            for i, item in enumerate(items)
        ]

    with Report(out) as report:
        sets = {"validation": files(val or [], "val"), "training": files(train, "train")}
        check.check_sets(setup(*overrides), sets, limit, report)
        report.finish({})
    return json.loads(out.read_text())["faults"]


def kinds_of(faults: list[dict], row: int | None = 0) -> set[str]:
    return {fault["kind"] for fault in faults if fault["row"] == row}


def one_row(folder: Path, *overrides: str, val: bool = False, **changes: Any) -> set[str]:
    """The kinds of faults of one changed row."""
    rows = [row(0, **changes)]
    if val:
        faults = faults_of(folder, [[row(1)]], *overrides, val=[rows])
        return {fault["kind"] for fault in faults if fault["file"].endswith("val0.parquet")}
    return kinds_of(faults_of(folder, [rows], *overrides))
