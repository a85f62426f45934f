"""``python -m data_prep render``: draw one view of a recipe into plain verl rows, for trainers that know no views.

The rows serve verl's GRPO and SFT trainers and its validation as they are: ``images`` hold the drawn pixels, ``prompt`` is
the question, ``messages`` the question with its answer. Only as many rows as a row group has are in memory.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from data_prep.configuration import ColumnNames, compose_config
from data_prep.rows import PLACEHOLDER, ROWS_PER_GROUP, DataError
from opd_recipes.images import ImageRoot, RowImages
from opd_recipes.registry import RecipeError
from opd_recipes.views import View, ViewError

FAULTS_SHOWN = 20


class RenderError(ValueError):
    """The file cannot be rendered. The message names it, what is wrong and what to do; nothing was written."""


@dataclass(frozen=True)
class Columns(ColumnNames):
    """What the source calls its columns, and where its rows may name images; from the configuration's ``data`` section."""

    image_root: str | Sequence[str] | None = None


@dataclass(frozen=True)
class Counts:
    rows: int
    skipped: int


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
    parser.add_argument("--skip-bad", action="store_true", help="leave out rows that cannot be used, and count them")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the configuration")


def run(args: argparse.Namespace) -> None:
    try:
        view, columns = configured_view(args.config_name, args.overlay, args.overrides, args.view)
        counts = render(args.data, args.out, view, columns, tag=args.tag, skip_bad=args.skip_bad)
    except (DataError, RecipeError, RenderError) as error:
        sys.exit(f"data_prep: {error}")
    except OSError as error:
        sys.exit(f"data_prep: {error}; nothing was written to {args.out}")
    left_out = f", {counts.skipped} left out" if counts.skipped else ""
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


def render(
    sources: Sequence[Path],
    out: Path,
    view: View,
    columns: Columns | None = None,
    *,
    tag: str | None = None,
    skip_bad: bool = False,
) -> Counts:
    """Draw every row of ``sources`` and write them to ``out``, which appears when all of it is written.

    Raises:
        RenderError: A file is no parquet file with the needed columns, rows cannot be used, or none is left.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = columns or Columns()
    total = sum(_row_count(source, view, columns) for source in sources)
    schema = _schema(pq.read_schema(sources[0]))
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    faults: list[str] = []
    written = 0
    try:
        with pq.ParquetWriter(unfinished, schema) as writer:
            roots = {source: ImageRoot.of(source, columns.image_root) for source in sources}
            draw = partial(draw_row, view=view, columns=columns, tag=tag)
            for rows in _drawn(sources, total, lambda row, number, source: draw(row, number, root=roots[source])):
                good = [row for row in rows if isinstance(row, dict)]
                faults += [row for row in rows if isinstance(row, str)]
                written += len(good)
                if good and (skip_bad or not faults):
                    writer.write_table(pa.Table.from_pylist(good, schema=schema))
        if (faults and not skip_bad) or not written:
            raise RenderError(_describe(faults, total, skip_bad))
        os.replace(unfinished, out)
    finally:
        unfinished.unlink(missing_ok=True)
    return Counts(written, len(faults))


def _row_count(source: Path, view: View, columns: Columns) -> int:
    """Rows of a file that has what the view is drawn from."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(source)
    except (OSError, pa.ArrowInvalid) as error:
        raise RenderError(f"{source} cannot be read as parquet: {error}; nothing was written") from error
    needed = [columns.prompt, columns.images, "data_source", "reward_model"]
    needed += [columns.box] if view.needs_box else []
    needed += [columns.evidence] if view.provided else []
    known = file.schema_arrow.names
    missing = [name for name in needed if name not in known]
    if missing:
        raise RenderError(
            f"{source}: column {', '.join(missing)} is missing; it has {', '.join(known)}. Nothing was written"
        )
    return file.metadata.num_rows


def _drawn(sources: Sequence[Path], total: int, draw: Callable[[dict, int, Path], dict]) -> Iterator[list[dict | str]]:
    """Row groups of drawn rows; in the place of a row that cannot be used stands the reason, with file and row."""
    import pyarrow.parquet as pq

    def attempt(source: Path, number: int, row: dict) -> dict | str:
        try:
            return draw(row, number, source)
        except ViewError as error:
            return f"{source}, row {number}: {error}"

    with (
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,  # decoding, resizing and PNG release the GIL
        tqdm(total=total, desc="drawing rows", unit="row", mininterval=1) as progress,
    ):
        for source in sources:
            start = 0
            for batch in pq.ParquetFile(source).iter_batches(ROWS_PER_GROUP):
                rows = batch.to_pylist()
                yield list(pool.map(partial(attempt, source), range(start, start + len(rows)), rows))
                start += len(rows)
                progress.update(len(rows))


def draw_row(
    row: dict[str, Any], number: int, *, view: View, columns: Columns, root: ImageRoot, tag: str | None = None
) -> dict[str, Any]:
    """One row with its view drawn, in the columns of :func:`_schema`.

    Raises:
        ViewError: It has no answer, images and placeholders differ in number, or the view cannot be drawn from it.
    """
    answer = (row["reward_model"] or {}).get("ground_truth")
    if answer is None or not str(answer).strip():
        raise ViewError("no reward_model.ground_truth: without an answer there is nothing to reward, imitate or score")
    prompt, images = row[columns.prompt] or [], row[columns.images] or []
    if not all(isinstance(turn["content"], str) for turn in prompt):
        raise ViewError(
            f"'{columns.prompt}' has structured content; write it as text with {PLACEHOLDER} for each image"
        )
    placeholders = sum(turn["content"].count(PLACEHOLDER) for turn in prompt)
    if not images or placeholders != len(images):
        raise ViewError(f"{placeholders} {PLACEHOLDER} in the prompt for {len(images)} images in '{columns.images}'")
    source = RowImages(images=images, box=row.get(columns.box), evidence=row.get(columns.evidence) or [], root=root)
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in prompt]
    return {
        "data_source": row["data_source"] + (f"@{tag}" if tag else ""),
        "prompt": turns,
        "messages": [*turns, {"role": "assistant", "content": str(answer)}],
        "images": [{"bytes": _png(image), "path": None} for image in source.render(view)],
        "reward_model": row["reward_model"],
        "extra_info": row.get("extra_info") or {"index": number},
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


def _describe(faults: list[str], total: int, skip_bad: bool) -> str:
    if not faults:
        return "there are no rows; nothing was written"
    listed = [f"  {fault}" for fault in faults[:FAULTS_SHOWN]]
    if len(faults) > FAULTS_SHOWN:
        listed.append(f"  ... and {len(faults) - FAULTS_SHOWN} more")
    remedy = "No row is left" if skip_bad else "Mend or remove these rows, or leave them out with --skip-bad"
    return "\n".join([f"{len(faults)} of {total} rows cannot be used:", *listed, f"{remedy}. Nothing was written"])
