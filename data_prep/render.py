"""``python -m data_prep render``: draw one view of a recipe into plain verl rows, for trainers that know no views.

The rows serve verl's GRPO and SFT trainers and its validation as they are: ``images`` hold the drawn pixels, ``prompt`` is
the question, ``messages`` the question with its answer. Only as many rows as a row group has are in memory.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from data_prep.configuration import ColumnNames, compose_config
from data_prep.convert import in_threads
from data_prep.rows import (
    PLACEHOLDER,
    ROWS_PER_GROUP,
    DataError,
    RowFault,
    RowWriter,
    describe_faults,
    read_rows,
    write_rejects,
)
from data_prep.shards import in_shards
from data_prep.sources import Place
from data_prep.split import add_ray_argument
from opd_recipes.images import ImageRoot, RowImages
from opd_recipes.registry import RecipeError
from opd_recipes.views import View, ViewError


@dataclass(frozen=True)
class Columns(ColumnNames):
    """What the source calls its columns, and where its rows may name images; from the configuration's ``data`` section."""

    image_root: str | Sequence[str] | None = None


@dataclass(frozen=True)
class Counts:
    rows: int
    skipped: int


@dataclass(frozen=True)
class Job:
    """What is drawn. Small, so that it travels.

    Attributes:
        sources: Parquet files, one after the other.
        view: Drawn of each row.
        columns: What the files call their columns.
        tag: Appended to ``data_source``.
    """

    sources: tuple[Path, ...]
    view: View
    columns: Columns
    tag: str | None = None

    def rows(self, start: int = 0) -> Iterator[tuple[Place, dict[str, Any]]]:
        """The rows of all files from one on, counted over all of them."""
        import pyarrow.parquet as pq

        for source in self.sources:
            count = pq.read_metadata(source).num_rows
            if start < count:
                for number, row in read_rows(source, start=start):
                    yield Place(str(source), number), row
            start = max(0, start - count)

    def draw(self, located: tuple[Place, dict[str, Any]]) -> dict[str, Any] | tuple[Place, str]:
        """The drawn row, or why there is none."""
        place, row = located
        try:
            return draw_row(row, place, self)
        except (RowFault, ViewError) as fault:
            return place, str(fault)


def draw_shard(job: Job, start: int, count: int) -> tuple[list[Any], None]:
    """Some rows, on another machine."""
    return [job.draw(located) for located in islice(job.rows(start), count)], None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", type=Path, action="append", required=True, help="parquet file with the recipe's rows; may be repeated"
    )
    parser.add_argument("--out", type=Path, required=True, help="the parquet file to write")
    parser.add_argument("--view", required=True, help="student, teacher, or a name in opd.validation_views")
    parser.add_argument("--config-name", default="vision_opd", help="recipe that has the view (default: %(default)s)")
    parser.add_argument("--overlay", help="overlays of the recipe, e.g. toy or toy,toy_rp_opsd")
    parser.add_argument(
        "--tag", help="append @TAG to data_source, so that validation reports this file's accuracy by that name"
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="leave out rows that cannot be used, and list them beside OUT"
    )
    add_ray_argument(parser)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the configuration")


def run(args: argparse.Namespace) -> None:
    try:
        view, columns = configured_view(args.config_name, args.overlay, args.overrides, args.view)
        counts = render(Job(tuple(args.data), view, columns, args.tag), args.out, skip_bad=args.skip_bad, ray=args.ray)
    except (DataError, RecipeError) as error:
        sys.exit(f"data_prep: {error}")
    except OSError as error:
        sys.exit(f"data_prep: {error}; nothing was written to {args.out}")
    left_out = f", {counts.skipped} left out ({rejects_of(args.out)})" if counts.skipped else ""
    print(f"wrote {counts.rows} rows{left_out} ({args.out.stat().st_size / 1e6:.1f} MB) to {args.out}")


def configured_view(
    config_name: str, overlays: str | None, overrides: Sequence[str], name: str
) -> tuple[View, Columns]:
    """The view called ``name`` of a recipe, and the names of the columns that it is drawn from.

    Raises:
        DataError: The configuration does not compose.
        RecipeError: It is no recipe, or has no such view.
    """
    from opd_recipes.recipe import Recipe

    config = compose_config(config_name, overlays, overrides)
    if "opd" not in config:
        raise RecipeError(f"--config-name {config_name}: it has no views; name a recipe, e.g. vision_opd")
    recipe = Recipe.load(config.opd)
    views = {**recipe.validation_views, **recipe.views}
    if name not in views:
        raise RecipeError(f"--view {name}: {config_name} has no such view; known: {', '.join(sorted(views))}")
    data = config.data
    return views[name], Columns(
        data.prompt_key,
        data.image_key,
        data.get("bbox_key", "bbox"),
        data.get("bbox_images_key", "bbox_images"),
        data.get("image_root"),
    )


def render(job: Job, out: Path, *, skip_bad: bool = False, ray: str | None = None) -> Counts:
    """Draw every row and write them to ``out``, which appears when all of it is written.

    Args:
        job: What is drawn.
        out: The parquet file; with ``skip_bad``, rows that are left out are listed in a file beside it (:func:`rejects_of`).
        skip_bad: Leave out rows that cannot be used.
        ray: Address of the cluster that draws; None: threads of this process.

    Raises:
        DataError: A file is no parquet file with the needed columns, rows cannot be used, or none is left. Nothing is
            written.
    """
    import pyarrow.parquet as pq

    total = sum(_row_count(source, job.view, job.columns) for source in job.sources)
    rejects: list[dict[str, Any]] = []
    with RowWriter(out, _schema(pq.read_schema(job.sources[0]))) as writer:
        for row in _drawn(job, total, ray):
            if isinstance(row, tuple):
                rejects.append(row[0].reject([row[1]]))
            elif skip_bad or not rejects:
                writer.add(row)
        if rejects and not (skip_bad and writer.count):
            raise DataError(describe_faults(rejects, total, skip_bad))
        if not total:
            raise DataError("there are no rows; nothing was written")
        if rejects:
            write_rejects(rejects_of(out), rejects)
    return Counts(writer.count, len(rejects))


def rejects_of(out: Path) -> Path:
    """Where the rows are listed that ``out`` lacks."""
    return out.with_suffix(".rejects.jsonl")


def _drawn(job: Job, total: int, ray: str | None) -> Iterator[dict[str, Any] | tuple[Place, str]]:
    """Each row, drawn, or why there is none, in order."""
    if ray is None:
        yield from in_threads(job.rows(), job.draw, "drawing rows", total)
        return
    needed = [str(source) for source in job.sources]
    for rows, _ in in_shards(ray, job, draw_shard, "drawing rows", total, needed, ROWS_PER_GROUP):
        yield from rows


def _row_count(source: Path, view: View, columns: Columns) -> int:
    """Rows of a file that has what the view is drawn from."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(source)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{source} cannot be read as parquet: {error}; nothing was written") from error
    needed = [columns.prompt, columns.images, "data_source", "reward_model"]
    needed += [columns.box] if view.needs_box else []
    needed += [columns.evidence] if view.provided else []
    known = file.schema_arrow.names
    missing = [name for name in needed if name not in known]
    if missing:
        raise DataError(
            f"{source}: column {', '.join(missing)} is missing; it has {', '.join(known)}. Nothing was written"
        )
    return file.metadata.num_rows


def draw_row(row: dict[str, Any], place: Place, job: Job) -> dict[str, Any]:
    """One row with its view drawn, in the columns of :func:`_schema`.

    Raises:
        RowFault: It has no answer, or images and placeholders differ in number.
        ViewError: The view cannot be drawn from it.
    """
    columns = job.columns
    answer = (row["reward_model"] or {}).get("ground_truth")
    if answer is None or not str(answer).strip():
        raise RowFault("no reward_model.ground_truth: without an answer there is nothing to reward, imitate or score")
    prompt, images = row[columns.prompt] or [], row[columns.images] or []
    if not all(isinstance(turn["content"], str) for turn in prompt):
        raise RowFault(f"'{columns.prompt}' has structured content; write it as text with {PLACEHOLDER} for each image")
    placeholders = sum(turn["content"].count(PLACEHOLDER) for turn in prompt)
    if not images or placeholders != len(images):
        raise RowFault(f"{placeholders} {PLACEHOLDER} in the prompt for {len(images)} images in '{columns.images}'")
    root = ImageRoot.of(place.file, columns.image_root)
    source = RowImages(images=images, box=row.get(columns.box), evidence=row.get(columns.evidence) or [], root=root)
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in prompt]
    return {
        "data_source": row["data_source"] + (f"@{job.tag}" if job.tag else ""),
        "prompt": turns,
        "messages": [*turns, {"role": "assistant", "content": str(answer)}],
        "images": [{"bytes": _png(image), "path": None} for image in source.render(job.view)],
        "reward_model": row["reward_model"],
        "extra_info": row.get("extra_info") or {"index": place.number},
    }


def _png(image: Image.Image) -> bytes:
    """Lossless, so that every trainer sees the very pixels of the view."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _schema(source):
    """Spelled out because a column of nulls has no type; what trainers only pass on keeps the source's."""
    import pyarrow as pa

    text = pa.string()
    turns = pa.list_(pa.struct({"role": text, "content": text}))
    passed_on = pa.struct({"index": pa.int64()})
    if "extra_info" in source.names:
        passed_on = source.field("extra_info").type
    return pa.schema(
        {
            "data_source": text,
            "prompt": turns,
            "messages": turns,
            "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": text})),
            "reward_model": source.field("reward_model").type,
            "extra_info": passed_on,
        }
    )
