"""``python -m data_prep vision-opd-6k``: the published Vision-OPD-6K layout (arXiv 2605.18740) in verl's columns.

The source is a folder with ``train.jsonl``, ``images/`` (boxed in red) and ``teacher_images/`` (the evidence crops), as files
or in the archives that they are published in.
The first pass checks every row and decodes every image; only when that is done is anything written. Encoded images are
copied as they are: a JPEG stays the same JPEG.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.convert import in_threads
from data_prep.images import Facts, check_decodes
from data_prep.rows import (
    PLACEHOLDER,
    REJECTS,
    RESERVED,
    ROWS_PER_GROUP,
    DataError,
    RowFault,
    RowWriter,
    answer_field,
    collect,
    describe_faults,
    image_field,
    parse_object,
    schema,
    show,
    write_rejects,
)
from data_prep.shards import in_shards
from data_prep.split import (
    add_ray_argument,
    add_split_arguments,
    all_or_nothing,
    draw_val,
    notes_on_earlier_runs,
)
from data_prep.unpacked import SourceImages

NAME = "vision_opd_6k"


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
    image: Facts | None = None
    has_answer: bool = False


@dataclass(frozen=True)
class Job:
    """The set and how much of it is used."""

    images: SourceImages
    jsonl: Path
    limit: int | None = None
    ray: str | None = None

    def lines(self) -> Iterator[tuple[int, bytes]]:
        return read_lines(self.jsonl, self.limit)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source",
        type=Path,
        required=True,
        help="folder with train.jsonl, images/ and teacher_images/ (or images.tar, .tar.gz, .zip, also split)",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and val.parquet")
    add_split_arguments(parser)
    add_ray_argument(parser)


def run(args: argparse.Namespace) -> None:
    try:
        convert(args)
    except DataError as error:
        sys.exit(f"data_prep: {error}")
    except OSError as error:
        sys.exit(f"data_prep: {error}; nothing was written to {args.out}")


def convert(args: argparse.Namespace) -> None:
    """Check the whole source, then write it.

    Raises:
        DataError: Rows cannot be used and ``--skip-bad`` is off, or no row is left. Nothing is written.
    """
    source, out = args.source, args.out
    jsonl = source / "train.jsonl"
    if not jsonl.is_file():
        raise DataError(
            f"{jsonl}: no such file; --source must be the folder that has train.jsonl, images/ and teacher_images/"
        )
    job = Job(SourceImages(source, out), jsonl, args.limit, args.ray)
    for line in job.images.unpack(named_images(job)):
        print(line)
    checked = check_source(job)
    good = [row for row in checked if not row.reasons]
    bad = [{"file": str(jsonl), "line": row.line, "reasons": row.reasons} for row in checked if row.reasons]
    if bad and not (args.skip_bad and good):
        raise DataError(describe_faults(bad, len(checked), args.skip_bad))
    if not good:
        raise DataError(f"{jsonl}: it has no rows; is the download complete?")
    digests, looks = ([(getattr(row.image, name),) for row in good] for name in ("digest", "look"))
    drawn, notes = draw_val(args, digests, looks, [row.has_answer for row in good])
    counts = write(job, out, good, bad, {good[row].line for row in drawn})
    job.images.forget()
    unanswered = sum(not row.has_answer for row in good)
    print("\n".join([*notes, closing_lines(out, counts, len(bad), unanswered)]))


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
    record = parse_object(line)
    content, answer, images, teacher_images = collect(
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


def _content(record: dict[str, Any]) -> str:
    """The prompt, with exactly one image placeholder."""
    problem = record.get("problem")
    if problem is None:
        raise RowFault("'problem' is missing; add the question")
    if not isinstance(problem, str):
        raise RowFault(f"'problem' is {show(problem)}; it must be text")
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
        raise RowFault(f"'answer' is {show(answer)}; it must be text, a number or left out")
    return str(answer).strip() or None


def _image_names(record: dict[str, Any], field: str) -> list[str]:
    entries = record.get(field)
    if entries is None or entries == []:
        raise RowFault(f"'{field}' is missing or empty; it must list the path of one image")
    if not isinstance(entries, list):
        raise RowFault(f"'{field}' is {show(entries)}; it must be a list of paths")
    return collect(partial(_image_name, entry, field) for entry in entries)


def _image_name(entry: Any, field: str) -> str:
    if isinstance(entry, dict) and entry.get("bytes") is not None:
        raise RowFault(f"'{field}' holds an image's bytes, which JSON cannot keep; name the image's file instead")
    name = entry.get("path") if isinstance(entry, dict) else entry
    if not isinstance(name, str) or not name:
        raise RowFault(f"'{field}' has the entry {show(entry)}; it must be a path in the source folder")
    return name


def named_images(job: Job) -> Iterator[str]:
    """The images of all rows that can be read."""
    for _, line in job.lines():
        with suppress(RowFault):
            row = parse_row(line)
            yield from (*row.images, *row.teacher_images)


def check_image(images: SourceImages, field: str, name: str) -> Facts:
    """What is known of an image that lies inside the source folder, or in its archives, and decodes.

    Raises:
        RowFault: The path leaves the folder, there is no file that can be read, or it cannot be decoded.
    """
    return check_decodes(images.read(name, field), field, name)


def check_source(job: Job) -> list[Checked]:
    """Check every row and decode every image."""
    total = sum(1 for _ in job.lines())
    if job.ray is None:
        return list(in_threads(job.lines(), partial(_check_numbered, job.images), "checking rows", total))
    needed = [str(job.jsonl), *([str(job.images.folder)] if job.images.folder.exists() else [])]
    return [row for rows, _ in in_shards(job.ray, job, check_shard, "checking rows", total, needed) for row in rows]


def check_shard(job: Job, start: int, count: int) -> tuple[list[Checked], None]:
    return [_check_numbered(job.images, line) for line in islice(job.lines(), start, start + count)], None


def _check_numbered(images: SourceImages, numbered: tuple[int, bytes]) -> Checked:
    return check_row(images, *numbered)


def check_row(images: SourceImages, number: int, line: bytes) -> Checked:
    try:
        row = parse_row(line)
        named = [*(("images", n) for n in row.images), *(("teacher_images", n) for n in row.teacher_images)]
        image, *_ = collect(partial(check_image, images, field, name) for field, name in named)
    except RowFault as fault:
        return Checked(number, fault.reasons)
    return Checked(number, image=image, has_answer=row.answer is not None)


def write(job: Job, out: Path, good: list[Checked], bad: list[dict[str, Any]], val_lines: set[int]) -> dict[str, int]:
    """Write all files under temporary names, then rename them; return the rows of each split."""
    kept = {row.line for row in good}
    with all_or_nothing(out, NAME) as temporary:
        with ExitStack() as stack:
            splits = {"train": stack.enter_context(SplitWriter(temporary, "train"))}
            if val_lines:
                splits["val"] = stack.enter_context(SplitWriter(temporary, "val"))
            for number, line in tqdm(_only(job.lines(), kept), total=len(kept), desc="writing rows", unit="row"):
                split = splits["val" if number in val_lines else "train"]
                try:
                    split.add(make_row(job.images, parse_row(line), split.name, split.count))
                except RowFault as fault:
                    raise DataError(f"{job.jsonl}, line {number} changed meanwhile ({fault}); run again") from fault
        if bad:
            write_rejects(temporary / REJECTS, bad)
    return {name: split.count for name, split in splits.items()}


def _only(lines: Iterable[tuple[int, bytes]], numbers: set[int]) -> Iterator[tuple[int, bytes]]:
    last = max(numbers)
    for number, line in lines:
        if number in numbers:
            yield number, line
        if number == last:
            return


class SplitWriter(RowWriter):
    """The parquet file of one split."""

    def __init__(self, folder: Path, split: str):
        super().__init__(folder / f"{split}.parquet", schema(with_evidence=True), ROWS_PER_GROUP)
        self.name = split


def make_row(source: SourceImages, row: SourceRow, split: str, index: int) -> dict[str, Any]:
    """One row in verl's columns; ``index`` counts within the split."""
    return {
        "data_source": NAME,
        "prompt": [{"role": "user", "content": row.content}],
        "images": [image_field(source.read(name, "images"), name) for name in row.images],
        "bbox_images": [image_field(source.read(name, "teacher_images"), name) for name in row.teacher_images],
        "ability": "vqa",
        "reward_model": answer_field(row.answer),
        "extra_info": {"split": split, "index": index, "question": row.question, "answer": row.answer},
    }


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
    made = {f"{split}.parquet" for split in counts} | ({REJECTS} if skipped else set())
    lines += notes_on_earlier_runs(out, made, NAME)
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
