"""A run: images in, a few at a time; rows, rejects and a report out, in the order of the images."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import shlex
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from data_prep.rows import (
    PLACEHOLDER,
    REJECTS,
    DataError,
    RowFault,
    RowWriter,
    answer_field,
    image_field,
    schema,
    write_rejects,
)
from data_prep.synthesize.calls import Caller
from data_prep.synthesize.client import Retry, Server, check_url
from data_prep.synthesize.images import Picture, list_images, read_picture
from data_prep.synthesize.ledger import NAME as LEDGER
from data_prep.synthesize.ledger import Ledger
from data_prep.synthesize.options import settings_of, suffix_of
from data_prep.synthesize.pipeline import Kept, Outcome, Pipeline, Settings
from data_prep.synthesize.report import Prices, Tally, make_report, table
from data_prep.synthesize.templates import FIELDS, Templates

REPORT = "report.json"
UNFINISHED = re.compile(r"\.(train\.parquet|val\.parquet|rejects\.jsonl|report\.json)\.\d+")


def synthesize(args: argparse.Namespace) -> dict[str, Any]:
    """Make the data set and return its report.

    Raises:
        DataError: An option, the folder, the ledger or the server is of no use, or no question is kept. Finished calls stay
            in the ledger in any case.
    """
    settings, suffix = settings_of(args), suffix_of(args)
    unused = {"choices": not args.multiple_choice, "hard": args.hard_model is None}
    templates = Templates(args.prompts, [name for name in FIELDS if not unused.get(name)])
    server, hard = _servers(args)
    names = _image_names(args)
    with Ledger(args.out / LEDGER) as ledger, tempfile.TemporaryFile("w+", encoding="utf-8") as rejects:
        caller = Caller(ledger, args.concurrency)
        pipeline = Pipeline(settings, templates, caller, server, hard)
        start = time.monotonic()
        named = args.images if args.name_images else None
        output = Output(args.out, suffix, args.data_source, args.val_fraction, settings.seed, rejects, named)
        with output:
            asyncio.run(_drive(args, pipeline, names, output))
            report = _report(args, settings, output.tally, caller, server, hard, time.monotonic() - start)
            output.close(report)
    print(table(report))
    print(output.summary())
    return report


def _servers(args: argparse.Namespace) -> tuple[Server, Server | None]:
    retry = Retry(attempts=args.attempts, longest=args.max_wait, timeout=args.timeout)
    server = Server(args.url, args.model, retry, args.api_key_env, args.extra_body)
    if args.hard_model is None:
        return server, None
    url = args.hard_url or args.url
    # A key goes to the server that it was named for, and to no other.
    same = check_url(url) == server.url
    key = args.hard_api_key_env or (args.api_key_env if same else None)
    return server, Server(url, args.hard_model, retry, key, args.extra_body)


def _image_names(args: argparse.Namespace) -> list[str]:
    if not args.images.is_dir():
        raise DataError(f"--images {args.images}: no such folder")
    names, others = list_images(args.images)
    if others:
        print(f"{args.images}: {others} files are left alone: by their names they are hidden or no images")
    if not names:
        raise DataError(f"--images {args.images}: it has no image (JPEG, PNG, WebP, BMP, TIFF)")
    return names[: args.limit]


async def _drive(args: argparse.Namespace, pipeline: Pipeline, names: list[str], output: Output) -> None:
    """Start an image when an earlier one is done; hand them on in order."""
    running: deque[tuple[Outcome, Picture | None, asyncio.Task[None]]] = deque()
    caller = pipeline.caller
    seen: dict[bytes, int] = {}

    async def finish_first(progress: tqdm) -> None:
        outcome, picture, task = running[0]
        await task
        running.popleft()
        await asyncio.to_thread(output.add, outcome, picture)
        totals = caller.totals()
        progress.set_postfix(
            kept=output.tally.kept, calls=totals["asked"], ledger=totals["recorded"], failed=totals["failed"]
        )
        progress.update()

    async with AsyncExitStack() as stack:
        for server in filter(None, (pipeline.server, pipeline.hard)):
            await stack.enter_async_context(server)
        with tqdm(total=len(names), desc="images", unit="image", mininterval=1) as progress:
            try:
                for row, name in enumerate(names):
                    if len(running) >= args.images_at_once:
                        await finish_first(progress)
                    outcome = Outcome(name, row)
                    picture = await outcome.attempt("images", _read_once(args.images, name, row, seen, names))
                    task = asyncio.create_task(_one(pipeline, outcome, picture))
                    running.append((outcome, picture, task))
                while running:
                    await finish_first(progress)
            except Exception:
                # Calls on their way are paid for: let them end and be recorded.
                await asyncio.gather(*(task for *_, task in running), return_exceptions=True)
                raise


async def _one(pipeline: Pipeline, outcome: Outcome, picture: Picture | None) -> None:
    if picture is not None:
        await pipeline.run(outcome, picture)


async def _read_once(folder: Path, name: str, row: int, seen: dict[bytes, int], names: list[str]) -> Picture:
    picture = await asyncio.to_thread(read_picture, folder, name)
    first = seen.setdefault(bytes.fromhex(picture.pixels), row)
    if first != row:
        raise RowFault(f"it is the same picture as {names[first]}; remove one")
    return picture


class Output:
    """The files of a run. They appear when the run ends well; a failure leaves those of an earlier run alone.

    Args:
        folder: Where they are written.
        suffix: Text behind each question.
        data_source: Name of the rows.
        val_fraction: Share of the images that go into val.parquet; an image's place depends on its content and the seed.
        seed: Of that split.
        rejects: An open temporary file, so that memory does not grow with them.
        named: The folder of the images, where rows name them instead of holding them.
    """

    def __init__(
        self,
        folder: Path,
        suffix: str,
        data_source: str,
        val_fraction: float,
        seed: int,
        rejects: IO[str],
        named: Path | None = None,
    ):
        self.folder = folder
        self.tally = Tally()
        self._suffix, self._data_source = suffix, data_source
        self._val_fraction, self._seed = val_fraction, seed
        self._rejects = rejects
        self._named = named
        self._files = ExitStack()
        self._writers: dict[str, RowWriter] = {}

    def __enter__(self) -> Output:
        for left in self.folder.glob(
            ".*.*.[0-9]*"
        ):  # what a killed run was writing; the ledger's lock says that none runs
            if UNFINISHED.fullmatch(left.name):
                left.unlink()
        for split in ("train", "val") if self._val_fraction else ("train",):
            writer = RowWriter(self.folder / f"{split}.parquet", schema(with_bbox=True))
            self._writers[split] = self._files.enter_context(writer)
        return self

    def __exit__(self, *error: Any) -> None:
        self._files.__exit__(*error)

    def add(self, outcome: Outcome, picture: Picture | None) -> None:
        self.tally.add(outcome)
        for reject in outcome.rejects:
            self._rejects.write(json.dumps(reject) + "\n")
        for kept in outcome.kept:
            assert picture is not None
            self._add_row(picture, kept)

    def _add_row(self, picture: Picture, kept: Kept) -> None:
        split = "val" if self._in_val(picture) else "train"
        index = self._writers[split].count
        extra = {"split": split, "index": index, "question": kept.question, "answer": kept.answer}
        self._writers[split].add(
            {
                "data_source": self._data_source,
                "prompt": [{"role": "user", "content": PLACEHOLDER + kept.question + self._suffix}],
                "images": [image_field(None if self._named else picture.data, picture.name)],
                "bbox": list(kept.box),
                "ability": "vqa",
                "reward_model": answer_field(kept.truth),
                "extra_info": extra,
            }
        )

    def _in_val(self, picture: Picture) -> bool:
        drawn = hashlib.sha256(f"{self._seed} {picture.pixels}".encode()).digest()[:8]
        return int.from_bytes(drawn) < self._val_fraction * 2**64

    def close(self, report: dict[str, Any]) -> None:
        """Write rejects and report, which tell why a run that kept nothing did so.

        Raises:
            DataError: A split is empty: its file is not written.
        """
        write_rejects(self.folder / REJECTS, _records(self._rejects))
        write_whole(self.folder / REPORT, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        if not self._writers["train"].count:
            raise DataError(
                f"no question is kept for train.parquet; nothing was written to it\n{table(report)}\n"
                f"The reasons are in {self.folder / REJECTS}{self._first_reject()}"
            )
        if self._val_fraction and not self._writers["val"].count:
            raise DataError(
                f"--val-fraction {self._val_fraction}: no image with a kept question falls into it; raise it"
            )

    def _first_reject(self) -> str:
        for reject in _records(self._rejects):
            return f", the first: {reject['file']}, {reject['stage']}: {'; '.join(reject['reasons'])}"
        return ""

    def summary(self) -> str:
        written = [f"{writer.count} rows to {writer.path}" for writer in self._writers.values()]
        lines = [
            f"wrote {' and '.join(written)}; rejected candidates: {self.folder / REJECTS}; report: {self.folder / REPORT}"
        ]
        counts = self.tally.counts
        if 2 * counts["boxes", "rejected"] > counts["boxes", "in"]:
            lines.append(
                f"note: {counts['boxes', 'rejected']} of {counts['boxes', 'in']} boxes were rejected; look at the reasons, "
                "and whether --box-convention is the model's"
            )
        if self._named:
            lines.append(
                f"rows name images below {self._named}: train with data.image_root={shlex.quote(str(self._named))}"
            )
        stale = self.folder / "val.parquet"
        if "val" not in self._writers and stale.exists():
            lines.append(f"note: {stale} is of an earlier run and does not belong to this one; remove it")
        return "\n".join(lines)


def _records(file: IO[str]) -> Iterator[dict[str, Any]]:
    file.seek(0)
    return map(json.loads, file)


def _report(
    args: argparse.Namespace,
    settings: Settings,
    tally: Tally,
    caller: Caller,
    server: Server,
    hard: Server | None,
    wall: float,
) -> dict[str, Any]:
    main = Prices(args.price_in, args.price_out)
    prices = dict.fromkeys(caller.spent, main)
    prices["hard"] = Prices(args.hard_price_in, args.hard_price_out)
    about = {
        "images": str(args.images),
        "model": server.model,
        "url": server.url,
        "hard_model": hard.model if hard else None,
        "settings": asdict(settings),
        "retries": server.retries + (hard.retries if hard else 0),
        "ledger_calls": len(caller.ledger),
    }
    return make_report(tally, caller.spent, prices, wall, about)


def write_whole(path: Path, text: str) -> None:
    """Write a text file that appears when it is whole."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
