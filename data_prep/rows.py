"""Rows on disk: the columns that training reads, one writer, one reader, and the faults that all data commands share.

A file appears under its name when all of it is written: a run that fails or is killed leaves no half of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import pyarrow as pa

REJECTS = "rejects.jsonl"
PLACEHOLDER = "<image>"
#: What would be taken for another modality's placeholder, or for a special token of the chat template.
RESERVED = re.compile(r"<video>|<audio>|<\|\w+\|>")
ROWS_PER_GROUP = 64
#: A row group is closed before its images exceed this, whatever the number of its rows.
BYTES_PER_GROUP = 128 * 2**20
FAULTS_SHOWN = 20


class DataError(ValueError):
    """A source cannot be used. The message names the file, what is wrong with it and what to do."""


class RowFault(ValueError):
    """Why one row cannot be used: a reason with its remedy, or several.

    Attributes:
        reasons: One text for each; the file and the row are added by whoever reports it.
    """

    def __init__(self, *reasons: str):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


def collect(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """The results of all calls, or one :class:`RowFault` with the reasons of all that failed."""
    results: list[Any] = []
    reasons: list[str] = []
    for call in calls:
        try:
            results.append(call())
        except RowFault as fault:
            reasons.extend(fault.reasons)
    if reasons:
        raise RowFault(*reasons)
    return results


def show(value: Any) -> str:
    """A value for a message: escaped, and short."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_object(line: bytes) -> dict[str, Any]:
    """One JSON object.

    Raises:
        RowFault: It is not valid JSON, has text that is not valid UTF-8, or is no object.
    """
    try:
        record = json.loads(line.decode("utf-8-sig"))
        json.dumps(record, ensure_ascii=False).encode()  # fails on half of a surrogate pair, which parquet cannot hold
    except (ValueError, RecursionError) as error:
        cause = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise RowFault(f"invalid JSON ({cause}); mend or remove the line") from error
    if not isinstance(record, dict):
        raise RowFault(f"the line is not a JSON object but {show(record)}; each line must be one row in braces")
    return record


def schema(with_bbox: bool = False, with_evidence: bool = False) -> pa.Schema:
    """The columns that training reads.

    Spelled out because a row group without answers would otherwise have columns with no type.

    Args:
        with_bbox: Add ``bbox``: x0, y0, x1, y1 in pixels of the upright (last) image, right and bottom exclusive.
        with_evidence: Add ``bbox_images``: ready-made evidence images, one for each of ``images``.
    """
    import pyarrow as pa

    text = pa.string()
    images = pa.list_(pa.struct({"bytes": pa.binary(), "path": text}))
    columns = {
        "data_source": text,
        "prompt": pa.list_(pa.struct({"role": text, "content": text})),
        "images": images,
        **({"bbox": pa.list_(pa.float64())} if with_bbox else {}),
        **({"bbox_images": images} if with_evidence else {}),
        "ability": text,
        "reward_model": pa.struct({"style": text, "ground_truth": text}),
        "extra_info": pa.struct({"split": text, "index": pa.int64(), "question": text, "answer": text}),
    }
    return pa.schema(columns)


def image_field(data: bytes | None, name: str | None) -> dict[str, Any]:
    """One entry of ``images``: the encoded bytes, and the name that the source knows them by; opened only without bytes."""
    return {"bytes": data, "path": name}


def answer_field(answer: str | None) -> dict[str, str] | None:
    """``reward_model``; None for a row without an answer."""
    return None if answer is None else {"style": "rule", "ground_truth": answer}


class RowWriter:
    """A parquet file that is written one row group at a time and appears under its name when it is whole.

    Use as a context manager: leaving it in the ordinary way renames the file to ``path``, an exception removes it.

    Args:
        path: The file; its folder is made. An earlier file is replaced when the new one is whole.
        schema: As :func:`schema` gives it. Each row must have exactly these columns; None where it has no value.
        rows_per_group: Most rows in a group; only as many are in memory.

    Attributes:
        count: Rows added so far.
    """

    def __init__(self, path: Path | str, schema: pa.Schema, rows_per_group: int = ROWS_PER_GROUP):
        self.path = Path(path)
        self.count = 0
        self._schema = schema
        self._rows_per_group = rows_per_group
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0
        self._unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")

    def __enter__(self) -> Self:
        import pyarrow.parquet as pq

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = pq.ParquetWriter(self._unfinished, self._schema)
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        try:
            if kind is None:
                self._flush()
                self._writer.close()
                os.replace(self._unfinished, self.path)
        finally:
            if self._writer.is_open:
                with suppress(OSError):  # of a file that is about to be removed
                    self._writer.close()
            self._unfinished.unlink(missing_ok=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row.

        Raises:
            DataError: Its columns are not those of the schema, or (later, when its group is written) a value has
                another type.
        """
        if set(row) != set(self._schema.names):
            raise DataError(
                f"{self.path}, row {self.count}: it has the columns {', '.join(sorted(row))}; "
                f"needed are {', '.join(sorted(self._schema.names))}"
            )
        size = sum(len(entry["bytes"] or b"") for key in ("images", "bbox_images") for entry in row.get(key) or [])
        if self._bytes + size > BYTES_PER_GROUP:
            self._flush()
        self._rows.append(dict(row))
        self._bytes += size
        self.count += 1
        if len(self._rows) >= self._rows_per_group:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._rows:
            return
        try:
            table = pa.Table.from_pylist(self._rows, schema=self._schema)
        except (pa.ArrowInvalid, pa.ArrowTypeError, UnicodeError) as error:
            first = self.count - len(self._rows)
            raise DataError(
                f"{self.path}, rows {first} to {self.count - 1}: a value has another type: {error}"
            ) from error
        self._writer.write_table(table)
        self._rows, self._bytes = [], 0


def read_rows(
    path: Any, columns: Sequence[str] | None = None, name: str | None = None, start: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row numbers (from 0) and rows of a parquet file, a few at a time.

    Args:
        path: The file, or an open one.
        columns: Only these; all without it.
        name: What messages call an open file.
        start: The first row; whole row groups before it are not read.

    Raises:
        DataError: It cannot be read as parquet, or lacks a column.
    """
    name = name or str(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=2**20) as file:  # pages, not a whole row group, in memory
            missing = set(columns or []).difference(file.schema_arrow.names)
            if missing:
                raise DataError(
                    f"{name}: column {', '.join(sorted(missing))} is missing; it has {', '.join(file.schema_arrow.names)}"
                )
            number, group = 0, 0
            while group < file.num_row_groups and number + file.metadata.row_group(group).num_rows <= start:
                number += file.metadata.row_group(group).num_rows
                group += 1
            groups = list(range(group, file.num_row_groups))
            for batch in file.iter_batches(ROWS_PER_GROUP, row_groups=groups, columns=columns):
                passed = min(batch.num_rows, max(0, start - number))
                number += passed
                for row in batch.slice(passed).to_pylist():
                    yield number, row
                    number += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{name} cannot be read as parquet ({error}); is the download complete?") from error


def write_rejects(path: Path | str, rejects: Iterable[Mapping[str, Any]]) -> int:
    """Write rejects.jsonl, one object for each row that was left out; return their number.

    Args:
        path: The file; it appears when it is whole.
        rejects: Mappings with ``file``, ``row`` (from 0; ``line``, from 1, where the source has lines), ``reasons``
            (texts), and whatever else helps to find the row.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for reject in rejects:
                file.write(json.dumps(dict(reject), ensure_ascii=False, default=str) + "\n")
                count += 1
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def describe_faults(rejects: Sequence[Mapping[str, Any]], total: int, skip_bad: bool) -> str:
    """Why nothing is written: the first rows that cannot be used, and what to do.

    Args:
        rejects: As for :func:`write_rejects`.
        total: Rows looked at.
        skip_bad: Whether bad rows were to be left out, so that this means that none remains.
    """
    listed = [f"  {place(reject)}: {'; '.join(reject['reasons'])}" for reject in rejects[:FAULTS_SHOWN]]
    if len(rejects) > FAULTS_SHOWN:
        listed.append(f"  ... and {len(rejects) - FAULTS_SHOWN} more")
    remedy = (
        "No row is left, so nothing was written"
        if skip_bad
        else "Nothing was written. Mend or remove these rows, or leave them out with --skip-bad"
    )
    return "\n".join([f"{len(rejects)} of {total} rows cannot be used:", *listed, remedy])


def place(reject: Mapping[str, Any]) -> str:
    """File and row (or line) of a reject, for a message."""
    unit = "line" if "line" in reject else "row"
    return f"{reject['file']}, {unit} {reject[unit]}"


def positive(text: str) -> int:
    """An option's whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def fraction(text: str) -> float:
    """An option's share: from 0 to below 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 0 and less than 1")
    return value
