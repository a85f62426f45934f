"""``python -m data_prep vision-opd-6k``: the published Vision-OPD-6K layout (arXiv 2605.18740) in verl's columns.

The source is a folder with ``train.jsonl``, ``images/`` (boxed in red) and ``teacher_images/`` (the evidence crops).
The first pass checks every row and decodes every image; only when that is done is anything written. Encoded images are
copied as they are: a JPEG stays the same JPEG.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

NAME = "vision_opd_6k"
REJECTS = "rejects.jsonl"
PLACEHOLDER = "<image>"
#: What would be taken for another modality's placeholder, or for a special token of the chat template.
RESERVED = re.compile(r"<video>|<audio>|<\|\w+\|>")
ROWS_PER_GROUP = 64
FAULTS_SHOWN = 20


class ConversionError(ValueError):
    """The source cannot be converted. The message names the file, what is wrong with it and what to do."""


class RowFault(ValueError):
    """Why one row cannot be used: a reason with its remedy, or several."""

    def __init__(self, *reasons: str):
        super().__init__("; ".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True)
class SourceRow:
    """One line of ``train.jsonl``."""

    content: str
    answer: str | None
    images: list[str]
    teacher_images: list[str]

    @property
    def question(self) -> str:
        return self.content.replace(PLACEHOLDER, "").strip()


@dataclass(frozen=True)
class Checked:
    """What the first pass keeps of a row: little, so that memory does not grow with the images."""

    line: int
    reasons: tuple[str, ...] = ()
    image_digest: bytes = b""
    has_answer: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source", type=Path, required=True, help="folder with train.jsonl, images/ and teacher_images/"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and val.parquet")
    parser.add_argument("--limit", type=_positive, help="use only the first N rows of the source")
    parser.add_argument(
        "--val-fraction",
        type=_fraction,
        default=0.0,
        help="share of the rows for val.parquet; rows with the same image stay together (default: no val.parquet)",
    )
    parser.add_argument("--seed", type=int, default=0, help="which rows become val.parquet (default: %(default)s)")
    parser.add_argument(
        "--skip-bad", action="store_true", help=f"leave out rows that cannot be used, and list them in {REJECTS}"
    )


def run(args: argparse.Namespace) -> None:
    try:
        convert(args.source, args.out, args.limit, args.val_fraction, args.seed, args.skip_bad)
    except ConversionError as error:
        sys.exit(f"data_prep: {error}")
    except OSError as error:
        sys.exit(f"data_prep: {error}; nothing was written to {args.out}")


def convert(source: Path, out: Path, limit: int | None, val_fraction: float, seed: int, skip_bad: bool) -> None:
    """Check the whole source, then write it.

    Raises:
        ConversionError: Rows cannot be used and ``skip_bad`` is off, or no row is left. Nothing is written.
    """
    jsonl = source / "train.jsonl"
    if not jsonl.is_file():
        raise ConversionError(
            f"{jsonl}: no such file; --source must be the folder that has train.jsonl, images/ and teacher_images/"
        )
    checked = check_source(source, jsonl, limit)
    good = [row for row in checked if not row.reasons]
    bad = [row for row in checked if row.reasons]
    if bad and not (skip_bad and good):
        raise ConversionError(describe_faults(jsonl, bad, len(checked), skip_bad))
    if not good:
        raise ConversionError(f"{jsonl}: it has no rows; is the download complete?")
    val_lines = choose_val(good, val_fraction, seed)
    counts = write(source, jsonl, out, good, bad, val_lines)
    unanswered = sum(not row.has_answer for row in good)
    print(closing_lines(out, counts, len(bad), unanswered))


def read_lines(jsonl: Path, limit: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Line numbers (from 1) and the lines, blank ones left out.

    Bytes, because text mode would stop a whole file at one bad character.
    """
    with jsonl.open("rb") as file:
        numbered = ((number, line.strip()) for number, line in enumerate(file, start=1) if line.strip())
        yield from islice(numbered, limit)


def parse_row(line: bytes) -> SourceRow:
    """Check the fields of one line.

    Raises:
        RowFault: With the reason for each field that cannot be used.
    """
    try:
        record = json.loads(line.decode("utf-8-sig"))
        json.dumps(record, ensure_ascii=False).encode()  # fails on half of a surrogate pair, which parquet cannot hold
    except (ValueError, RecursionError) as error:
        cause = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise RowFault(f"invalid JSON ({cause}); mend or remove the line") from error
    if not isinstance(record, dict):
        raise RowFault(f"the line is not a JSON object but {_show(record)}; each line must be one row in braces")
    content, answer, images, teacher_images = _all(
        [
            partial(_content, record),
            partial(_answer, record),
            partial(_image_names, record, "images"),
            partial(_image_names, record, "teacher_images"),
        ]
    )
    if len(images) != len(teacher_images):
        raise RowFault(
            f"{len(images)} in 'images' but {len(teacher_images)} in 'teacher_images'; "
            "each image needs its own evidence crop"
        )
    if len(images) != 1:
        raise RowFault(f"{len(images)} in 'images'; a row of this set has one image and one evidence crop")
    return SourceRow(content, answer, images, teacher_images)


def _all(calls: Iterable[Callable[[], Any]]) -> list[Any]:
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


def _content(record: dict[str, Any]) -> str:
    """The prompt, with exactly one image placeholder."""
    problem = record.get("problem")
    if problem is None:
        raise RowFault("'problem' is missing; add the question")
    if not isinstance(problem, str):
        raise RowFault(f"'problem' is {_show(problem)}; it must be text")
    if not problem.replace(PLACEHOLDER, "").strip():
        raise RowFault("'problem' is empty; add the question")
    placeholders = problem.count(PLACEHOLDER)
    if placeholders > 1:
        raise RowFault(f"'problem' has {PLACEHOLDER} {placeholders} times; leave one, for the row's one image")
    if reserved := RESERVED.search(problem):
        raise RowFault(f"'problem' contains {reserved[0]}, which the model would not read as text; remove it")
    return problem if placeholders else PLACEHOLDER + problem


def _answer(record: dict[str, Any]) -> str | None:
    """The reference answer; training needs none, so a row may lack it."""
    answer = record.get("answer")
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise RowFault(f"'answer' is {_show(answer)}; it must be text, a number or left out")
    return str(answer).strip() or None


def _image_names(record: dict[str, Any], field: str) -> list[str]:
    entries = record.get(field)
    if entries is None or entries == []:
        raise RowFault(f"'{field}' is missing or empty; it must list the path of one image")
    if not isinstance(entries, list):
        raise RowFault(f"'{field}' is {_show(entries)}; it must be a list of paths")
    return _all(partial(_image_name, entry, field) for entry in entries)


def _image_name(entry: Any, field: str) -> str:
    if isinstance(entry, dict) and entry.get("bytes") is not None:
        raise RowFault(f"'{field}' holds an image's bytes, which JSON cannot keep; name the image's file instead")
    name = entry.get("path") if isinstance(entry, dict) else entry
    if not isinstance(name, str) or not name:
        raise RowFault(f"'{field}' has the entry {_show(entry)}; it must be a path in the source folder")
    return name


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read_image(source: Path, field: str, name: str) -> bytes:
    """The encoded bytes of an image that lies inside the source folder.

    Raises:
        RowFault: The path leaves the folder, or there is no file that can be read.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise RowFault(f"'{field}' names {name!r}, which leaves the source folder; use a path inside it, without '..'")
    data = None
    try:
        target = (source / path).resolve()
        inside = target.is_relative_to(source.resolve())
        if inside and target.is_file():
            data = target.read_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that is none, no right to read
        cause = getattr(error, "strerror", None) or error
        raise RowFault(
            f"'{field}' names {name!r}, which cannot be read ({cause}); mend the path or its rights"
        ) from error
    if not inside:
        raise RowFault(
            f"'{field}' names {name!r}, a link that leaves the source folder; copy the files themselves into it "
            "(for a download from a hub: into a local folder, not the hub's cache)"
        )
    if data is None:
        raise RowFault(
            f"'{field}' names {name!r}, but there is no such file; unpack the set's images or remove the row"
        )
    return data


def check_image(source: Path, field: str, name: str) -> bytes:
    """The encoded bytes of an image that decodes to its last row.

    Raises:
        RowFault: As :func:`read_image`, or it cannot be decoded.
    """
    data = read_image(source, field, name)
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except UnidentifiedImageError as error:
        hint = "fetch it with git lfs pull" if data.startswith(b"version https://git-lfs") else "download it again"
        raise RowFault(f"'{field}' names {name!r}, which is damaged or no image ({len(data)} bytes); {hint}") from error
    except Exception as error:  # a damaged file can raise nearly anything in a decoder
        raise RowFault(f"'{field}' names {name!r}, which cannot be decoded ({error}); download it again") from error
    return data


def check_source(source: Path, jsonl: Path, limit: int | None) -> list[Checked]:
    """Check every row and decode every image, some at a time."""
    total = sum(1 for _ in read_lines(jsonl, limit))
    lines = read_lines(jsonl, limit)
    checked: list[Checked] = []
    with (
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,  # decoding releases the GIL
        tqdm(total=total, desc="checking rows", unit="row") as progress,
    ):
        while chunk := list(islice(lines, ROWS_PER_GROUP)):
            for row in pool.map(lambda numbered: check_row(source, *numbered), chunk):
                checked.append(row)
                progress.update()
    return checked


def check_row(source: Path, number: int, line: bytes) -> Checked:
    try:
        row = parse_row(line)
        named = [*(("images", n) for n in row.images), *(("teacher_images", n) for n in row.teacher_images)]
        image, *_ = _all(partial(check_image, source, field, name) for field, name in named)
    except RowFault as fault:
        return Checked(number, fault.reasons)
    return Checked(number, image_digest=hashlib.sha256(image).digest(), has_answer=row.answer is not None)


def describe_faults(jsonl: Path, bad: list[Checked], total: int, skip_bad: bool) -> str:
    listed = [f"  {jsonl}, line {row.line}: {'; '.join(row.reasons)}" for row in bad[:FAULTS_SHOWN]]
    if len(bad) > FAULTS_SHOWN:
        listed.append(f"  ... and {len(bad) - FAULTS_SHOWN} more")
    remedy = (
        "No row is left, so nothing was written"
        if skip_bad
        else "Nothing was written. Mend or remove these rows, or leave them out with --skip-bad"
    )
    return "\n".join([f"{len(bad)} of {total} rows cannot be used:", *listed, remedy])


def choose_val(rows: list[Checked], fraction: float, seed: int) -> set[int]:
    """The lines that become ``val.parquet``.

    Questions about one image stay together, so that none is in both files. An image's place in the draw depends on its
    content and the seed only, and only rows with an answer are drawn: validation has to score them.

    Raises:
        ConversionError: No image can be set aside.
    """
    if fraction == 0:
        return set()
    groups: dict[bytes, list[Checked]] = {}
    for row in rows:
        groups.setdefault(row.image_digest, []).append(row)
    answered = [digest for digest, group in groups.items() if all(row.has_answer for row in group)]
    answered.sort(key=lambda digest: hashlib.sha256(str(seed).encode() + digest).digest())
    if len(groups) < 2 or not answered:
        raise ConversionError(
            f"--val-fraction {fraction}: validation needs an image with all its answers, and training another image, "
            f"but of {len(groups)} images {len(answered)} have all answers; leave the option out"
        )
    wanted = max(1, round(fraction * len(rows)))
    lines: set[int] = set()
    for digest in answered[: len(groups) - 1]:
        if len(lines) >= wanted:
            break
        lines.update(row.line for row in groups[digest])
    return lines


def write(
    source: Path, jsonl: Path, out: Path, good: list[Checked], bad: list[Checked], val_lines: set[int]
) -> dict[str, int]:
    """Write all files under temporary names, then rename them; return the rows of each split."""
    kept = {row.line for row in good}
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{NAME}-", dir=out) as folder:
        temporary = Path(folder)
        with ExitStack() as stack:
            splits = {"train": stack.enter_context(SplitWriter(temporary, "train"))}
            if val_lines:
                splits["val"] = stack.enter_context(SplitWriter(temporary, "val"))
            for number, line in tqdm(_only(read_lines(jsonl), kept), total=len(kept), desc="writing rows", unit="row"):
                split = splits["val" if number in val_lines else "train"]
                try:
                    split.add(source, parse_row(line))
                except RowFault as fault:
                    raise ConversionError(f"{jsonl}, line {number} changed meanwhile ({fault}); run again") from fault
        if bad:
            write_rejects(temporary / REJECTS, jsonl, bad)
        for file in sorted(temporary.iterdir()):
            os.replace(file, out / file.name)
    return {name: split.count for name, split in splits.items()}


def _only(lines: Iterable[tuple[int, bytes]], numbers: set[int]) -> Iterator[tuple[int, bytes]]:
    last = max(numbers)
    for number, line in lines:
        if number in numbers:
            yield number, line
        if number == last:
            return


class SplitWriter:
    """A parquet file that is written one row group at a time."""

    def __init__(self, folder: Path, split: str):
        import pyarrow.parquet as pq

        self.split = split
        self.count = 0
        self._schema = _schema()
        self._rows: list[dict[str, Any]] = []
        self._writer = pq.ParquetWriter(folder / f"{split}.parquet", self._schema)

    def __enter__(self) -> SplitWriter:
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def add(self, source: Path, row: SourceRow) -> None:
        self._rows.append(make_row(source, row, self.split, self.count))
        self.count += 1
        if len(self._rows) == ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows = []


def make_row(source: Path, row: SourceRow, split: str, index: int) -> dict[str, Any]:
    """One row in verl's columns; ``index`` counts within the split."""
    return {
        "data_source": NAME,
        "prompt": [{"role": "user", "content": row.content}],
        "images": [{"bytes": read_image(source, "images", name), "path": name} for name in row.images],
        "bbox_images": [
            {"bytes": read_image(source, "teacher_images", name), "path": name} for name in row.teacher_images
        ],
        "ability": "vqa",
        "reward_model": None if row.answer is None else {"style": "rule", "ground_truth": row.answer},
        "extra_info": {"split": split, "index": index, "question": row.question, "answer": row.answer},
    }


def _schema():
    """Spelled out because a row group without answers would otherwise have columns with no type."""
    import pyarrow as pa

    text = pa.string()
    images = pa.list_(pa.struct({"bytes": pa.binary(), "path": text}))
    return pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "images": images,
            "bbox_images": images,
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct({"split": text, "index": pa.int64(), "question": text, "answer": text}),
        }
    )


def write_rejects(path: Path, jsonl: Path, bad: list[Checked]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in bad:
            reject = {"file": str(jsonl), "line": row.line, "reasons": row.reasons}
            file.write(json.dumps(reject, ensure_ascii=False) + "\n")


def closing_lines(out: Path, counts: dict[str, int], skipped: int, unanswered: int) -> str:
    """What was written, what deserves a look, and how to train on it."""
    written = " and ".join(
        f"{count} rows to {out / split}.parquet ({(out / f'{split}.parquet').stat().st_size / 1e6:.1f} MB)"
        for split, count in counts.items()
    )
    lines = [f"wrote {written}"]
    if skipped:
        lines.append(f"rows left out: {skipped}; the reasons are in {out / REJECTS}")
    if unanswered:
        lines.append(f"rows without an answer: {unanswered}; training needs none, validation does")
    stale = [name for name, made in (("val.parquet", "val" in counts), (REJECTS, skipped)) if not made]
    lines += [
        f"note: {out / name} is of an earlier run and does not belong to this one; remove it"
        for name in stale
        if (out / name).exists()
    ]
    val = str(out / "val.parquet") if "val" in counts else "VAL.parquet"
    command = [
        *("python", "-m", "opd_recipes", "--config-name", "vision_opd", f"+overlay={NAME}"),
        f"data.train_files={out / 'train.parquet'}",
        f"data.val_files={val}",
        "actor_rollout_ref.model.path=MODEL",
    ]
    missing = "MODEL" if "val" in counts else "MODEL and VAL.parquet (or make one with --val-fraction 0.02)"
    lines.append(f"train on it, with your {missing}:\n  {shlex.join(command)}")
    return "\n".join(lines)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 0 and less than 1")
    return value
