"""``python -m data_prep boxes``: evidence boxes of any convention as ``bbox`` in pixels of the upright image.

Rows are read and written as by ``pairs``. What the numbers of a box mean is named, or decided from all rows together where
only one convention fits every one of them; it is never guessed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep import pairs
from data_prep.images import Facts
from data_prep.layouts import lookup
from data_prep.rows import DataError, RowFault, show
from opd_recipes.view_steps import EDGE

Box = tuple[float, float, float, float]
Size = tuple[int, int]

#: Four numbers and the image's size in pixels -> x0, y0, x1, y1 in pixels, right and bottom exclusive.
CONVENTIONS: dict[str, Callable[[Box, Size], Box]] = {
    "xyxy": lambda b, size: b,
    "xywh": lambda b, size: (b[0], b[1], b[0] + b[2], b[1] + b[3]),
    "normalised-xyxy": lambda b, size: _scaled(b, size, 1),
    "normalised-xywh": lambda b, size: _scaled((b[0], b[1], b[0] + b[2], b[1] + b[3]), size, 1),
    "qwen1000": lambda b, size: _scaled(b, size, 1000),
}
AUTO = "auto"


def _scaled(box: Box, size: Size, full: float) -> Box:
    (x0, y0, x1, y1), (width, height) = box, size
    return x0 * width / full, y0 * height / full, x1 * width / full, y1 * height / full


def turned(box: Box, size: Size, orientation: int) -> Box:
    """A box of the stored image in the upright one.

    Args:
        box: x0, y0, x1, y1 in pixels of the stored image.
        size: Of the stored image.
        orientation: EXIF, 1 to 8 (the standard's table of row 0 and column 0).
    """
    (x0, y0, x1, y1), (width, height) = box, size
    if orientation in (2, 3, 7, 8):  # the stored right is the upright left, or its top
        x0, x1 = width - x1, width - x0
    if orientation in (3, 4, 6, 7):
        y0, y1 = height - y1, height - y0
    return (y0, x0, y1, x1) if orientation >= 5 else (x0, y0, x1, y1)


def misfit(box: Box, size: Size) -> str | None:
    """Why a box cannot be one of an image of this size; None for one that can."""
    x0, y0, x1, y1 = box
    told = f"[{', '.join(f'{value:g}' for value in box)}]"
    if x1 - x0 < 1 - EDGE or y1 - y0 < 1 - EDGE:
        return f"{told}, which is empty: it has less than one pixel"
    if x0 < -EDGE or y0 < -EDGE or x1 > size[0] + EDGE or y1 > size[1] + EDGE:
        return f"{told}, which lies outside the image of {size[0]} x {size[1]} pixels"
    return None


@dataclass(frozen=True, slots=True)
class Note:
    """A row's box before its convention is known."""

    numbers: Box
    size: Size
    orientation: int


@dataclass
class Boxes:
    """The ``bbox`` column; see :class:`data_prep.convert.BoxColumn`.

    Attributes:
        field: Where records have their box.
        convention: One of ``CONVENTIONS``; ``auto`` until :meth:`settle` has decided.
        before_exif: Boxes refer to the stored image, not to the upright one.
        min_side: Least side in pixels.
        max_area_ratio: Greatest share of the image.
        zoom: By how much the recipe enlarges the crop.
        min_crop_side: Least side of the enlarged crop in pixels (Qwen's processors: one merged patch, 28).
        max_aspect: Greatest ratio of its sides (Qwen's processors refuse more than 200).
        clip: A box that is outside by at most so many pixels is cut at the border.
    """

    field: str
    convention: str
    before_exif: bool = False
    min_side: float = 1
    max_area_ratio: float = 1
    zoom: float = 2
    min_crop_side: float = 28
    max_aspect: float = 200
    clip: float = 0

    def note(self, record: dict[str, Any], facts: Facts) -> Note:
        """The four numbers of a row, whatever they mean.

        Raises:
            RowFault: There is no box, or not one of four finite numbers.
        """
        value = lookup(record, self.field)
        if value is None or value == []:
            raise RowFault(f"'{self.field}' is missing or empty; a row needs its evidence box")
        if isinstance(value, list) and all(isinstance(entry, list) for entry in value):
            if len(value) > 1:
                raise RowFault(f"'{self.field}' has {len(value)} boxes; a row has one, around all of its evidence")
            (value,) = value
        if not isinstance(value, list) or len(value) != 4 or not all(map(_is_number, value)):
            raise RowFault(f"'{self.field}' is {show(value)}; it must be four finite numbers")
        a, b, c, d = map(float, value)
        return Note((a, b, c, d), facts.size, facts.orientation)

    def settle(self, notes: Sequence[Note]) -> list[str]:
        """Count for how many rows each convention is possible, and where it is to be found out, decide.

        Raises:
            DataError: Several conventions fit all rows, or none does.
        """
        fits = {name: sum(misfit(*self._pixels(name, note)) is None for note in notes) for name in CONVENTIONS}
        counts = f"boxes in '{self.field}' that each convention allows, of {len(notes)}: " + ", ".join(
            f"{name} {count}" for name, count in fits.items()
        )
        if self.convention == AUTO and notes:
            possible = [name for name, count in fits.items() if count == len(notes)]
            if not possible:
                raise DataError(
                    f"{counts}. None allows all; name one with --convention to see which rows it does not fit. "
                    "Nothing was written"
                )
            if len(possible) > 1:
                raise DataError(
                    f"{counts}. {', '.join(possible)} allow all, and which is meant cannot be told from the numbers; "
                    "name it with --convention. Nothing was written"
                )
            (self.convention,) = possible
        lines = [counts, f"taken as {self.convention}"]
        oriented = sum(note.orientation != 1 for note in notes)
        if oriented:
            frame, other = "upright", "if they refer to the stored one: --boxes-before-exif"
            if self.before_exif:
                frame, other = "stored", "they are turned along"
            lines.append(f"images with an EXIF orientation: {oriented}; their boxes are in the {frame} image ({other})")
        return lines

    def value(self, note: Note) -> list[float]:
        """x0, y0, x1, y1 in pixels of the upright image.

        Raises:
            RowFault: The box does not fit its image, or is too small, too large or too long.
        """
        box, size = self._pixels(self.convention, note)
        if reason := misfit(box, size):
            raise RowFault(f"'{self.field}' is {show(list(note.numbers))}, as {self.convention} {reason}; mend the box")
        box = _cut(box, size)
        self._check_limits(box, size)
        return list(turned(box, size, note.orientation) if self.before_exif else box)

    def _pixels(self, convention: str, note: Note) -> tuple[Box, Size]:
        """The box in pixels, and the size of the image that it refers to."""
        lying = note.orientation >= 5 and not self.before_exif
        size = (note.size[1], note.size[0]) if lying else note.size
        box = CONVENTIONS[convention](note.numbers, size)
        cut = _cut(box, size)
        near = all(abs(old - new) <= self.clip for old, new in zip(box, cut, strict=True))
        return (cut if near else box), size

    def _check_limits(self, box: Box, size: Size) -> None:
        width, height = box[2] - box[0], box[3] - box[1]
        short, long, ratio = min(width, height), max(width, height), width * height / (size[0] * size[1])
        what, told = f"'{self.field}' is {width:g} x {height:g} pixels", []
        if short < self.min_side:
            told.append(f"{what}, less than --min-side {self.min_side:g}")
        if ratio > self.max_area_ratio:
            told.append(f"{what}, {ratio:.3f} of the image, more than --max-area-ratio {self.max_area_ratio:g}")
        if short * self.zoom < self.min_crop_side - EDGE:
            told.append(f"{what}; enlarged {self.zoom:g} times it stays below --min-crop-side {self.min_crop_side:g}")
        if long / short > self.max_aspect:
            told.append(f"{what}, longer than --max-aspect {self.max_aspect:g} to 1 allows")
        if told:
            raise RowFault(*told)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _cut(box: Box, size: Size) -> Box:
    x0, y0, x1, y1 = box
    return max(x0, 0.0), max(y0, 0.0), min(x1, float(size[0])), min(y1, float(size[1]))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pairs.add_arguments(parser)
    parser.add_argument("--box-field", required=True, help="field of the box; dots for a field inside another")
    parser.add_argument(
        "--convention",
        required=True,
        choices=[*CONVENTIONS, AUTO],
        help="what its four numbers are; auto: what alone fits all rows, and a stop where that is not one",
    )
    parser.add_argument(
        "--boxes-before-exif", action="store_true", help="boxes refer to the stored image, before its EXIF orientation"
    )
    limits = Boxes("", "")
    for option, default, text in (
        ("--min-side", limits.min_side, "least side of a box in pixels"),
        ("--max-area-ratio", limits.max_area_ratio, "greatest share of the image that a box may have"),
        ("--zoom", limits.zoom, "by how much the recipe enlarges the crop"),
        ("--min-crop-side", limits.min_crop_side, "least side of the enlarged crop in pixels, as processors need it"),
        ("--max-aspect", limits.max_aspect, "greatest ratio of its sides, as processors allow it"),
        ("--clip", limits.clip, "cut a box at the border that it crosses by at most so many pixels"),
    ):
        parser.add_argument(option, type=float, default=default, help=f"{text} (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    boxes = Boxes(
        args.box_field,
        args.convention,
        args.boxes_before_exif,
        args.min_side,
        args.max_area_ratio,
        args.zoom,
        args.min_crop_side,
        args.max_aspect,
        args.clip,
    )
    pairs.run_with(args, "boxes", boxes)
