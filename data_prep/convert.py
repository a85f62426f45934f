"""Two passes over a source: check every row, then write those that can be used. Shared by ``pairs`` and ``boxes``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from data_prep.images import Facts, SourceRoot, loaded
from data_prep.layouts import Layout, Pair
from data_prep.rows import REJECTS, DataError, RowFault, RowWriter, answer_field, collect, schema, write_rejects
from data_prep.seen import DecodedImages
from data_prep.shards import in_shards
from data_prep.sources import Located, Place, Source
from data_prep.split import all_or_nothing

ROWS_AT_ONCE = 16
TEMPORARY = "data_prep"


class BoxColumn(Protocol):
    """The ``bbox`` column of ``boxes``: what a convention is may depend on all rows."""

    field: str

    def note(self, record: dict[str, Any], facts: Facts) -> Any:
        """What the box depends on, in a few bytes. Raises :class:`RowFault`."""

    def settle(self, notes: Sequence[Any]) -> list[str]:
        """Decide from the notes of all sound rows; lines to print. Raises :class:`DataError`."""

    def value(self, note: Any) -> list[float]:
        """The box. Raises :class:`RowFault`."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What the first pass keeps of a row: little, so that memory does not grow with the images."""

    place: Place
    reasons: tuple[str, ...] = ()
    images: tuple[bytes, ...] = ()
    looks: tuple[bytes, ...] = ()
    has_answer: bool = False
    later_turns: int = 0
    fingerprint: bytes = b""
    note: Any = None  #: of the box; after :func:`settle` the box itself


@dataclass(frozen=True)
class Job:
    """A source and how it is read.

    Attributes:
        source: Its records.
        layout: What their fields mean.
        root: Where its images are.
        need_answer: Whether a row without an answer is a fault.
        limit: Only the first rows.
        boxes: The column that ``boxes`` adds.
        data_source: Of all rows, whatever they say of themselves.
        decoded: Images that need not be decoded again.
        ray: Address of the cluster that checks rows; None: threads of this process.
    """

    source: Source
    layout: Layout
    root: SourceRoot
    need_answer: bool = False
    limit: int | None = None
    boxes: BoxColumn | None = None
    data_source: str | None = None
    decoded: DecodedImages = field(default_factory=DecodedImages)
    ray: str | None = None

    def check(self, located: Located) -> Checked:
        """Everything that can be wrong with one row."""
        place, record = located
        try:
            pair, images = self.load(record)
            where = self.layout.image
            facts = collect(partial(self.decoded.facts, image["bytes"], where, image["path"]) for image in images)
            note = self.boxes.note(record, facts[-1]) if self.boxes and isinstance(record, dict) else None
        except RowFault as fault:
            return Checked(place, fault.reasons)
        digests, looks = tuple(fact.digest for fact in facts), tuple(fact.look for fact in facts)
        answered = pair.answer is not None
        return Checked(place, (), digests, looks, answered, pair.later_turns, fingerprint(pair, images), note)

    def load(self, record: dict[str, Any] | RowFault) -> tuple[Pair, list[dict[str, Any]]]:
        """One record's pair, and its encoded images.

        Raises:
            RowFault: Either cannot be had.
        """
        if isinstance(record, RowFault):
            raise record
        pair = self.layout.pair(record)
        if self.need_answer and pair.answer is None:
            raise RowFault("it has no answer, which --need-answer asks for")
        return pair, loaded(self.root, pair.images, self.layout.image)


def fingerprint(pair: Pair, images: Iterable[dict[str, Any]]) -> bytes:
    """Of what a row is made from, so that a source that changes between the passes is noticed."""
    digest = hashlib.blake2b(repr((pair.turns, pair.answer)).encode(), digest_size=8)
    for image in images:
        digest.update(image["bytes"])
    return digest.digest()


def in_threads(items: Iterable[Any], work: Callable[[Any], Any], what: str, total: int | None) -> Iterator[Any]:
    """``work`` on each item, in order; only some are in memory."""
    items = iter(items)
    with (
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,  # decoding and reading release the GIL
        tqdm(total=total, desc=what, unit="row", mininterval=1) as progress,
    ):
        while chunk := list(islice(items, ROWS_AT_ONCE)):
            for result in pool.map(work, chunk):
                yield result
                progress.update()


def check_source(job: Job) -> list[Checked]:
    """The first pass: every row, every image."""
    total = job.source.total
    expected = total if total is None or job.limit is None else min(total, job.limit)
    if job.ray is None:
        return list(in_threads(job.source.records(job.limit), job.check, "checking rows", expected))
    checked: list[Checked] = []
    needed = [*job.source.files, str(job.root.root)]
    for rows, records in in_shards(job.ray, job, check_shard, "checking rows", expected, needed):
        job.decoded.remember(records)
        checked += rows
    return checked


def check_shard(job: Job, start: int, count: int) -> tuple[list[Checked], list[bytes]]:
    """Some rows, and what was found out about images."""
    end = start + count if job.limit is None else min(start + count, job.limit)
    return [job.check(located) for located in job.source.records(end, start)], job.decoded.records()


def settle(job: Job, checked: list[Checked]) -> tuple[list[Checked], list[str]]:
    """Turn what was noted of each box into the box; a row whose box cannot be used becomes bad. And lines to print.

    Raises:
        DataError: The boxes as a whole cannot be understood.
    """
    boxes = job.boxes
    if boxes is None:
        return checked, []
    lines = boxes.settle([row.note for row in checked if not row.reasons])

    def settled(row: Checked) -> Checked:
        try:
            return row if row.reasons else replace(row, note=boxes.value(row.note))
        except RowFault as fault:
            return Checked(row.place, fault.reasons)

    return [settled(row) for row in checked], lines


def write(
    job: Job, out: Path, checked: list[Checked], val: set[int], bad: list[dict[str, Any]], default_name: str
) -> dict[str, int]:
    """The second pass: write all files under temporary names, then rename them; return the rows of each split.

    Args:
        job: As in the first pass.
        out: The folder.
        checked: What the first pass found, in the order of the source.
        val: Positions of the rows for ``val.parquet``.
        bad: Entries of rejects.jsonl.
        default_name: ``data_source`` of rows that have none of their own.

    Raises:
        DataError: The source is not what it was in the first pass.
    """
    columns = schema(with_bbox=job.boxes is not None)
    names = ["train", "val"] if val else ["train"]
    with all_or_nothing(out, TEMPORARY) as temporary:
        with ExitStack() as stack:
            splits = {name: stack.enter_context(RowWriter(temporary / f"{name}.parquet", columns)) for name in names}
            both = zip(checked, job.source.records(job.limit), strict=False)
            seen = 0
            for content in in_threads(both, lambda pair: again(job, *pair), "writing rows", len(checked)):
                split = "val" if seen in val else "train"
                if content:
                    pair, images = content
                    name = job.data_source or pair.data_source or default_name
                    row = make_row(pair, images, split, splits[split].count, name)
                    splits[split].add({**row, "bbox": checked[seen].note} if job.boxes else row)
                seen += 1
            if seen != len(checked):
                raise DataError(f"{job.source.files[0]}: it became shorter meanwhile; run again. Nothing was written")
        if bad:
            write_rejects(temporary / REJECTS, bad)
    return {name: split.count for name, split in splits.items()}


def again(job: Job, row: Checked, located: Located) -> tuple[Pair, list[dict[str, Any]]] | None:
    """Load a row for the second time; None for one that is left out."""
    if row.reasons:
        return None
    place, record = located
    try:
        pair, images = job.load(record)
    except RowFault as fault:
        raise DataError(f"{row.place} changed meanwhile ({fault}); run again. Nothing was written") from fault
    if place != row.place or fingerprint(pair, images) != row.fingerprint:
        raise DataError(f"{row.place} changed meanwhile; run again. Nothing was written")
    return pair, images


def make_row(pair: Pair, images: list[dict[str, Any]], split: str, index: int, name: str) -> dict[str, Any]:
    """One row in verl's columns; ``index`` counts within the split."""
    return {
        "data_source": name,
        "prompt": pair.turns,
        "images": images,
        "ability": "vqa",
        "reward_model": answer_field(pair.answer),
        "extra_info": {"split": split, "index": index, "question": pair.question, "answer": pair.answer},
    }
