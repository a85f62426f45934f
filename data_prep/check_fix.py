"""Clean copies: the files without the rows that have an error, and rejects.jsonl with those."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.faults import Report
from data_prep.rows import REJECTS, DataError, write_rejects
from data_prep.sources import Address, parquet_file

BATCH = 32


def check_target(folder: Path, files: Sequence[Path | Address]) -> None:
    """Refuse a folder in which a copy would take the place of a source or of another copy.

    Raises:
        DataError: Such a folder.
    """
    names: dict[str, Path | Address] = {}
    for file in files:
        target = folder / file.name
        if isinstance(file, Path) and (target.resolve() == file.resolve() or target.exists() and target.samefile(file)):
            raise DataError(f"--fix {folder}: {file} lies there itself; name another folder")
        if file.name in names and file.resolve() != names[file.name].resolve():
            raise DataError(f"--fix {folder}: {file} and {names[file.name]} have the same name; check them one by one")
        names[file.name] = file


def write_clean(folder: Path, files: Sequence[Path | Address], report: Report) -> list[str]:
    """Copy every readable file without its bad rows; the schema, its metadata and all values stay as they are.

    Args:
        folder: Where the copies go; sources are not touched.
        files: The checked files.
        report: Of the check, made with ``keep_rejects``.

    Returns:
        What was written, a line for each file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = []
    for file in dict.fromkeys(files):
        if str(file) in report.bad_files:
            said.append(f"not copied: {file}, which has an error of its own")
            continue
        bad = report.bad_rows.get(str(file), {})
        kept = _copy(file, folder / file.name, bad)
        if not kept:
            said.append(f"not copied: {file}, of which no row is left")
            continue
        said.append(f"wrote {kept} rows to {folder / file.name}, {len(bad)} left out")
    count = write_rejects(folder / REJECTS, _rejects(report.bad_rows))
    return [*said, f"wrote {count} rejected rows with their reasons to {folder / REJECTS}"]


def _copy(source: Path | Address, target: Path, bad: Collection[int]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    start = kept = 0
    try:
        with (
            parquet_file(source) as file,
            pq.ParquetWriter(unfinished, file.schema_arrow) as writer,
        ):
            for batch in file.iter_batches(BATCH):
                rows = range(start, start + batch.num_rows)
                good = batch.filter(pa.array([row not in bad for row in rows]))
                if good.num_rows:
                    writer.write_table(pa.Table.from_batches([good], schema=file.schema_arrow))
                kept, start = kept + good.num_rows, start + batch.num_rows
        if kept:
            os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return kept


def _rejects(bad_rows: Mapping[str, Mapping[int, list[str]]]) -> Iterator[dict[str, Any]]:
    for file, rows in bad_rows.items():
        for row in sorted(rows):
            yield {"file": file, "row": row, "reasons": rows[row]}
