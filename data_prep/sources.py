"""Records of a source, one at a time: parquet, JSONL, a JSON array, or a Hugging Face dataset saved to disk.

A source can be gone through again and again, always in the same order, and never has more in memory than some rows. What
the fields of a record mean is the part of :mod:`data_prep.layouts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from data_prep.rows import DataError, RowFault, parse_object, read_rows

CHUNK = 2**20
#: One JSON record (a line, or an element of an array) may have as many bytes; images in base64 make it long.
MAX_RECORD = 64 * 2**20
ROWS_AT_ONCE = 64
STRUCTURE = re.compile(rb'["\[\]{},]')
IN_STRING = re.compile(rb'["\\]')
ENDINGS = (".parquet", ".jsonl", ".json", ".ndjson")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is: the file, and its row (from 0) or line (from 1)."""

    file: str
    number: int
    unit: str = "row"

    def __str__(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"

    def reject(self, reasons: Sequence[str]) -> dict[str, Any]:
        """An entry of rejects.jsonl."""
        return {"file": self.file, self.unit: self.number, "reasons": list(reasons)}


#: A record, or why there is none.
Located = tuple[Place, dict[str, Any] | RowFault]


@dataclass(frozen=True)
class Source:
    """Records that can be gone through several times.

    Attributes:
        kind: What the files are, in words.
        files: Their names, in the order of the records.
        folder: What relative image paths are relative to, unless the user names something else.
        read: Starts a new pass.
        total: Number of records, where it is known without a pass.
        read_from: Starts a pass at a record, those before it unparsed; without it, they are read and dropped.
    """

    kind: str
    files: tuple[str, ...]
    folder: str
    read: Callable[[], Iterator[Located]]
    total: int | None = None
    read_from: Callable[[int], Iterator[Located]] | None = None

    def records(self, limit: int | None = None, start: int = 0) -> Iterator[Located]:
        """A new pass over the first ``limit`` records, from record ``start`` on."""
        if self.read_from is None:
            return islice(self.read(), start, limit)
        return islice(self.read_from(start), None if limit is None else max(0, limit - start))


@dataclass
class Skip:
    """Records that are still to be passed over."""

    left: int = 0

    def one(self) -> bool:
        """Whether the next record is passed over."""
        passed = self.left > 0
        self.left -= passed
        return passed


def open_source(address: str | Path, split: str | None = None) -> Source:
    """Find out what a file or folder is.

    Args:
        address: A file; a folder with a saved dataset or with files of one kind; or a file's remote address, which is
            opened with fsspec.
        split: Of a saved dataset with several.

    Raises:
        DataError: There is no such thing, or it is of no known kind.
    """
    name = str(address)
    if "://" in name:
        return _of_files((name,), folder=name.rsplit("/", 1)[0])
    path = Path(address)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if not path.is_dir():
        return _of_files((name,), folder=str(path.parent))
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved_dataset(path, split)
    files = sorted(file for file in path.iterdir() if file.suffix in ENDINGS and not file.name.startswith("."))
    endings = sorted({file.suffix for file in files})
    if len(endings) != 1:
        found = f"files of several kinds ({', '.join(endings)})" if endings else f"no {', '.join(ENDINGS)} file"
        raise DataError(f"{path}: it has {found}; name one file, or a folder with files of one kind")
    return _of_files(tuple(map(str, files)), folder=name)


def _of_files(files: tuple[str, ...], folder: str) -> Source:
    kinds = {_kind(file) for file in files}
    if len(kinds) != 1:
        raise DataError(f"{folder}: its files are of several kinds ({', '.join(sorted(kinds))}); name one of them")
    (kind,) = kinds
    reader = {"parquet": _parquet, "JSONL": _jsonl, "JSON array": _array}[kind]

    def read(start: int = 0) -> Iterator[Located]:
        skip = Skip(start)
        for file in files:
            yield from reader(file, skip)

    total = sum(map(_parquet_rows, files)) if kind == "parquet" else None
    return Source(kind, files, folder, read, total, read)


class Address(str):
    """A file's remote address, with what a ``Path`` has."""

    @property
    def name(self) -> str:
        return self.rsplit("/", 1)[-1]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def resolve(self) -> Address:
        return self

    def is_file(self) -> bool:
        """Raises :class:`DataError` where it is of no kind that can be opened."""
        import fsspec

        try:
            system, path = fsspec.core.url_to_fs(str(self))
            return system.isfile(path)
        except Exception as error:  # each file system has errors of its own
            raise DataError(f"{self} cannot be opened: {error}") from error


def file_or_address(name: str) -> Path | Address:
    """What the user named."""
    return Address(name) if "://" in name else Path(name).expanduser()


def parquet_file(file: Path | Address) -> Any:
    """An opened parquet file; close it.

    Raises:
        DataError, OSError, pyarrow.ArrowException: It cannot be opened, or is none.
    """
    import pyarrow.parquet as pq

    return pq.ParquetFile(open_binary(file) if isinstance(file, Address) else file, pre_buffer=False)


def open_binary(name: str) -> BinaryIO:
    """Open a file, or what the user named by a remote address, for reading.

    Raises:
        DataError: It cannot be opened.
    """
    try:
        if "://" not in name:
            return open(name, "rb")
        import fsspec

        return cast(BinaryIO, fsspec.open(name, "rb").open())
    except (OSError, ImportError, ValueError) as error:
        raise DataError(f"{name} cannot be opened: {error}") from error


def _kind(name: str) -> str:
    """By content, since many files that are called ``.json`` hold lines."""
    with open_binary(name) as file:
        start = file.read(4096)
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"PAR1"):
        return "parquet"
    if text.startswith(b"["):
        return "JSON array"
    if text.startswith(b"{"):
        return "JSONL"
    what = "it is empty" if not text else f"it starts with {text[:20]!r}"
    raise DataError(f"{name}: {what}; it must be parquet, JSONL (a row in braces on each line) or a JSON array of rows")


def _parquet_rows(name: str) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_binary(name) as file:
            return pq.ParquetFile(file).metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{name} cannot be read as parquet ({error}); is the download complete?") from error


def _parquet(name: str, skip: Skip) -> Iterator[Located]:
    start, skip.left = skip.left, max(0, skip.left - (_parquet_rows(name) if skip.left else 0))
    if skip.left:
        return
    with open_binary(name) as file:
        for number, row in read_rows(file if "://" in name else name, name=name, start=start):
            yield Place(name, number), row


def _parsed(place: Place, record: bytes) -> Located:
    try:
        return place, parse_object(record)
    except RowFault as fault:
        return place, fault


def _jsonl(name: str, skip: Skip) -> Iterator[Located]:
    with open_binary(name) as file:
        number = 0
        while line := file.readline(MAX_RECORD + 1):
            number += 1
            if len(line) > MAX_RECORD:
                raise DataError(
                    f"{name}, line {number}: it is longer than {MAX_RECORD >> 20} MB; keep images in files of their own"
                )
            if line.strip() and not skip.one():
                yield _parsed(Place(name, number, "line"), line.strip())


def _array(name: str, skip: Skip) -> Iterator[Located]:
    with open_binary(name) as file:
        for number, record in enumerate(split_array(file, name)):
            if not skip.one():
                yield _parsed(Place(name, number), record)


def split_array(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The elements of a JSON array, unparsed: a broken one spoils no other, and only one is in memory.

    Raises:
        DataError: The file does not start with an array, ends within it, or an element is too long.
    """
    depth, quoted, count, item = 0, False, 0, bytearray()
    while chunk := file.read(CHUNK):
        position = start = 0
        while match := (IN_STRING if quoted else STRUCTURE).search(chunk, position):
            token, position = match[0], match.end()
            if token == b"\\":
                if position == len(chunk):  # what it escapes is in the next chunk
                    chunk += file.read(1)
                position += 1
            elif token == b'"':
                quoted = not quoted
            elif token in b"[{":
                depth += 1
                if depth == 1:
                    start = position
            elif token in b"]}":
                depth -= 1
            if (token == b"," and depth == 1) or (token in b"]}" and depth == 0):
                item += chunk[start : match.start()]
                if item.strip() or token == b",":
                    yield bytes(item).strip()
                    count += 1
                item.clear()
                start = position
            if depth == 0:
                if (chunk[position:] + file.read(CHUNK)).strip():
                    raise DataError(
                        f"{name}: there is more behind the array's end, after row {count - 1}; mend the file"
                    )
                return
        item += chunk[start:]
        if len(item) > MAX_RECORD:
            raise DataError(
                f"{name}, row {count}: it is longer than {MAX_RECORD >> 20} MB; keep images in files of their own"
            )
    raise DataError(f"{name}: it ends in the middle of row {count}; is the download complete?")


def _saved_dataset(folder: Path, split: str | None) -> Source:
    import datasets

    try:
        loaded: Any = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever a damaged folder makes it raise
        raise DataError(f"{folder} cannot be read as a saved dataset: {error}") from error
    name = str(folder)
    if isinstance(loaded, datasets.DatasetDict):
        splits = ", ".join(loaded)
        if split is None and len(loaded) > 1:
            raise DataError(f"{folder}: it has the splits {splits}; name one with --split")
        if split is not None and split not in loaded:
            raise DataError(f"{folder}: it has no split {split!r}; it has {splits}")
        split = split or next(iter(loaded))
        loaded, name = loaded[split], f"{folder}/{split}"

    def read(start: int = 0) -> Iterator[Located]:
        number = start
        if start >= len(loaded):
            return
        # As Arrow, images are still the bytes that were saved: nothing decodes or encodes them again.
        for table in loaded.select(range(number, len(loaded))).with_format("arrow").iter(ROWS_AT_ONCE):
            for row in table.to_pylist():
                yield Place(name, number), row
                number += 1

    return Source("saved dataset", (name,), str(folder), read, len(loaded), read)
