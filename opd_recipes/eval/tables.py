"""Rows of a local copy of a data set: parquet shards, JSON, JSON lines, tab- or comma-separated values, one at a time."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd_recipes.registry import RecipeError

#: Rows of a parquet file that are in memory at a time: images of benchmarks have up to 40 MB.
ROWS_AT_A_TIME = 8

#: What stands where a file has been left in Git's large-file storage.
POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Row:
    """A row and where it is.

    Args:
        values: By column. A value that is None, NaN or empty text counts as missing.
        file: Its file.
        number: From 0, in its file.
    """

    values: Mapping[str, Any]
    file: Path
    number: int

    def __str__(self) -> str:
        return f"{self.file}, row {self.number}"

    def find(self, *names: str) -> Any:
        """The value of the first of these columns that has one, else None."""
        return next((value for name in names if not missing(value := self.values.get(name))), None)

    def get(self, *names: str) -> Any:
        """As :meth:`find`.

        Raises:
            RecipeError: None of the columns has a value; the message names them and what there is.
        """
        value = self.find(*names)
        if value is None:
            have = ", ".join(sorted(self.values)) or "nothing"
            raise RecipeError(
                f"{self}: looked for the column {' or '.join(names)}, found none with a value; it has {have}"
            )
        return value

    def text(self, *names: str) -> str:
        """As :meth:`get`, as text without blanks at its ends."""
        return str(self.get(*names)).strip()


def missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and value != value)


def find_files(root: Path, *patterns: str) -> list[Path]:
    """The files of the first pattern that has any, sorted; ``root`` itself where it is a file.

    ``root`` may also be a folder of the Hugging Face cache (``datasets--...``) with one snapshot in it.

    Raises:
        RecipeError: None is found; the message names the patterns.
    """
    if root.is_file():
        return [root]
    if not root.exists():
        raise RecipeError(f"{root}: no such file or folder")
    snapshots = sorted((root / "snapshots").glob("*")) if (root / "snapshots").is_dir() else []
    if len(snapshots) > 1:
        raise RecipeError(f"{root}: it has {len(snapshots)} snapshots; name one, e.g. {snapshots[-1]}")
    for pattern in patterns:
        if files := sorted(file for file in (*snapshots, root)[0].glob(pattern) if file.is_file()):
            return files
    raise RecipeError(f"{root}: found none of {', '.join(patterns)} in it; docs/eval.md says what it must hold")


def read_rows(files: Sequence[Path], drop: Collection[str] = ()) -> Iterator[Row]:
    """All rows of the files, in order.

    Args:
        files: ``.parquet``, ``.json`` (an array), ``.jsonl`` (also under the name ``.json``), ``.tsv`` or ``.csv``.
        drop: Columns that are left out; of parquet they are not even read.

    Raises:
        RecipeError: A file that cannot be read.
    """
    for file in files:
        for number, values in enumerate(_values(file, drop)):
            yield Row({key: value for key, value in values.items() if key not in drop}, file, number)


def _values(file: Path, drop: Collection[str]) -> Iterator[dict[str, Any]]:
    try:
        with open(file, "rb") as opened:
            start = opened.read(4096)
        if start.startswith(POINTER):
            raise RecipeError(f"{file}: it only points at the data; fetch the file itself (git lfs pull)")
        if start.startswith(b"PAR1"):
            yield from _parquet(file, drop)
        elif file.suffix in (".tsv", ".csv"):
            yield from _separated(file)
        elif start.lstrip().startswith(b"["):
            yield from _array(file)
        elif file.suffix in (".json", ".jsonl", ".ndjson"):
            yield from _lines(file)
        else:
            raise RecipeError(f"{file}: neither parquet, JSON, JSON lines, tsv nor csv")
    except (OSError, ValueError, csv.Error) as error:  # ArrowInvalid and JSONDecodeError are ValueErrors
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"{file} cannot be read: {error}; is the download complete?") from error


def _parquet(file: Path, drop: Collection[str]) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file, pre_buffer=False) as opened:
        columns = [name for name in opened.schema_arrow.names if name not in drop]
        for batch in opened.iter_batches(ROWS_AT_A_TIME, columns=columns, use_threads=False):
            yield from batch.to_pylist()


def _array(file: Path) -> Iterator[dict[str, Any]]:
    for number, values in enumerate(json.loads(file.read_text(encoding="utf-8-sig"))):
        if not isinstance(values, dict):
            raise RecipeError(f"{file}, row {number}: expected an object in braces, got {str(values)[:40]!r}")
        yield values


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with open(file, encoding="utf-8-sig") as opened:
        for number, line in enumerate(opened, 1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except ValueError as error:
                raise RecipeError(f"{file}, line {number}: not JSON: {error}") from error
            if not isinstance(values, dict):
                raise RecipeError(f"{file}, line {number}: expected an object in braces, got {line[:40]!r}")
            yield values


def _separated(file: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)  # an image in base64 is one field
    with open(file, encoding="utf-8-sig", newline="") as opened:
        for values in csv.DictReader(opened, delimiter="\t" if file.suffix == ".tsv" else ","):
            if None in values or None in values.values():
                raise RecipeError(f"{file}: a row has another number of fields than the header: {str(values)[:200]}")
            yield dict(values)
