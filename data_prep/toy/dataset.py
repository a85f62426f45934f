"""``python -m data_prep toy``: the scenes as ``train.parquet`` and ``val.parquet`` in verl's columns."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from data_prep.toy.scenes import QUESTION, make_scene, scene_rng

ROWS_PER_GROUP = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and val.parquet")
    parser.add_argument("--train", type=int, default=4096, help="training rows (default: %(default)s)")
    parser.add_argument("--val", type=int, default=256, help="validation rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same images (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", args.train), ("val", args.val)):
        write_split(args.out / f"{split}.parquet", split, count, args.seed)
    sizes = sum((args.out / f"{split}.parquet").stat().st_size for split in ("train", "val"))
    print(f"wrote {args.train} train and {args.val} val rows ({sizes / 1e6:.1f} MB) to {args.out}")


def make_row(split: str, index: int, seed: int) -> dict[str, Any]:
    """One row in verl's columns; ``bbox`` is x0, y0, x1, y1 in the image's pixels."""
    scene = make_scene(scene_rng(split, seed, index))
    return {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": "<image>" + QUESTION}],
        "images": [{"bytes": _png(scene.image), "path": None}],
        "bbox": [float(v) for v in scene.bbox],
        "ability": "vqa",
        "reward_model": {"style": "rule", "ground_truth": scene.answer},
        "extra_info": {"split": split, "index": index, "question": QUESTION, "answer": scene.answer},
    }


def write_split(path: Path, split: str, count: int, seed: int) -> None:
    """Write ``count`` rows, one row group at a time, so that memory does not grow with the dataset."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tqdm import tqdm

    schema = _schema()
    with (
        pq.ParquetWriter(path, schema) as writer,
        tqdm(total=count, desc=split, unit="row") as progress,
    ):
        for rows in _groups(split, count, seed):
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
            progress.update(len(rows))


def _groups(split: str, count: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, count, ROWS_PER_GROUP):
        yield [make_row(split, index, seed) for index in range(start, min(start + ROWS_PER_GROUP, count))]


def _schema():
    """Spelled out because an all-null ``path`` would otherwise be written with no type."""
    import pyarrow as pa

    text = pa.string()
    return pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": text})),
            "bbox": pa.list_(pa.float64()),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct({"split": text, "index": pa.int64(), "question": text, "answer": text}),
        }
    )


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
