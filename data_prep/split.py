"""Output of a data command: which rows become validation rows, and files that appear all together or not at all."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from data_prep.looks import Looks
from data_prep.rows import REJECTS, DataError, fraction, positive


def add_split_arguments(parser: argparse.ArgumentParser) -> None:
    """Which rows of a source are used, and which of them are for validation."""
    parser.add_argument("--limit", type=positive, help="use only the first N rows of the source")
    parser.add_argument(
        "--val-fraction",
        type=fraction,
        default=0.0,
        help="share of the rows for val.parquet; rows with the same image stay together (default: no val.parquet)",
    )
    parser.add_argument(
        "--exact-images",
        action="store_true",
        help="in the split, only equal pixels are the same image; else also what looks the same: scaled, or encoded with loss",
    )
    parser.add_argument("--seed", type=int, default=0, help="which rows become val.parquet (default: %(default)s)")
    parser.add_argument(
        "--skip-bad", action="store_true", help=f"leave out rows that cannot be used, and list them in {REJECTS}"
    )


def add_ray_argument(parser: argparse.ArgumentParser) -> None:
    """Where rows are checked."""
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="check rows on a Ray cluster (auto, or HOST:PORT) that sees the same files; local: Ray on this machine "
        "(default: threads of this process)",
    )


def draw_val(
    args: argparse.Namespace,
    images: Sequence[tuple[bytes, ...]],
    looks: Sequence[tuple[bytes, ...]],
    answered: Sequence[bool],
) -> tuple[set[int], list[str]]:
    """:func:`choose_val` as the options say, and lines to print."""
    alike = similar(images, looks) if args.val_fraction and not args.exact_images else []
    drawn = choose_val(images, answered, args.val_fraction, args.seed, alike)
    if not alike:
        return drawn, []
    count = len({digest for pair in alike for digest in pair})
    return drawn, [f"images that look like another one: {count}; their rows are in the same file (--exact-images: not)"]


def choose_val(
    images: Sequence[tuple[bytes, ...]],
    answered: Sequence[bool],
    share: float,
    seed: int,
    alike: Iterable[tuple[bytes, bytes]] = (),
) -> set[int]:
    """The rows that become ``val.parquet``.

    Rows that share an image stay together, through others too (a with b, b with c), so that no image is in both files.
    An image's place in the draw depends on its content and the seed only, and only rows with an answer are drawn:
    validation has to score them. A group of more rows than are wanted is drawn only where the others do not suffice.

    Args:
        images: The digests of each row's images.
        answered: Whether each row has an answer.
        share: Of all rows, about as many are drawn, and at least one.
        seed: Another seed, another draw.
        alike: Pairs of digests of images that count as the same (:func:`similar`).

    Returns:
        Positions in ``images``.

    Raises:
        DataError: No image can be set aside.
    """
    if share == 0:
        return set()
    groups = _sharing(images, alike)
    wanted = max(1, round(share * len(images)))
    drawable = [key for key, rows in groups.items() if all(answered[row] for row in rows)]
    drawable.sort(key=lambda key: (len(groups[key]) > wanted, hashlib.sha256(str(seed).encode() + key).digest()))
    if len(groups) < 2 or not drawable:
        raise DataError(
            f"--val-fraction {share}: validation needs an image with all its answers, and training another image, "
            f"but of {len(groups)} images {len(drawable)} have all answers; leave the option out"
        )
    chosen: set[int] = set()
    for key in drawable[: len(groups) - 1]:
        if len(chosen) >= wanted:
            break
        chosen.update(groups[key])
    return chosen


class Groups:
    """Digests that belong together, directly or through others; a group is named by its least digest."""

    def __init__(self) -> None:
        self._parent: dict[bytes, bytes] = {}

    def root(self, digest: bytes) -> bytes:
        parent = self._parent
        while parent.setdefault(digest, digest) != digest:
            parent[digest] = parent[parent[digest]]
            digest = parent[digest]
        return digest

    def join(self, digests: Iterable[bytes]) -> bool:
        """Put digests into one group; whether they were not yet."""
        roots = set(map(self.root, digests))
        self._parent.update(dict.fromkeys(roots, min(roots)))
        return len(roots) > 1


def similar(images: Sequence[tuple[bytes, ...]], looks: Sequence[tuple[bytes, ...]]) -> list[tuple[bytes, bytes]]:
    """Pairs of images that look the same though their pixels differ: the same picture, encoded with loss or scaled.

    Args:
        images: The digests of each row's images.
        looks: The looks of the same images.

    Returns:
        Digests; as many pairs as connect all images that are near one another.
    """
    index: Looks[bytes] = Looks()
    seen: set[bytes] = set()
    groups = Groups()
    pairs: list[tuple[bytes, bytes]] = []
    for digest, look in ((d, k) for row in zip(images, looks, strict=True) for d, k in zip(*row, strict=True)):
        if digest not in seen:
            seen.add(digest)
            pairs += [(digest, other) for _, other in index.near(look) if groups.join((digest, other))]
            index.add(look, digest)
    return pairs


def _sharing(images: Sequence[tuple[bytes, ...]], alike: Iterable[tuple[bytes, bytes]]) -> dict[bytes, list[int]]:
    """Rows that are connected by common images, under the least digest of each such group."""
    connected = Groups()
    for digests in (*images, *alike):
        connected.join(digests)
    groups: dict[bytes, list[int]] = {}
    for row, digests in enumerate(images):
        groups.setdefault(connected.root(digests[0]), []).append(row)
    return groups


@contextmanager
def all_or_nothing(out: Path, name: str) -> Iterator[Path]:
    """A temporary folder in ``out``; its files move into ``out`` when the block ends well, and vanish when it does not."""
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{name}-", dir=out) as folder:
        temporary = Path(folder)
        yield temporary
        for file in sorted(temporary.iterdir()):
            os.replace(file, out / file.name)


def notes_on_earlier_runs(out: Path, made: set[str], name: str) -> list[str]:
    """Lines about files in ``out`` that do not belong to the run that made ``made``."""
    others = [file for file in ("val.parquet", "rejects.jsonl") if file not in made and (out / file).exists()]
    notes = [f"note: {out / file} is of an earlier run and does not belong to this one; remove it" for file in others]
    killed = sorted(out.glob(f".{name}-*"))
    return notes + [f"note: {folder} was left by a run that was killed; remove it" for folder in killed]
