"""What the steps of a view share: their table, the evidence box, and the checks of box and options.

The steps themselves are in :mod:`opd_recipes.views` (marks, cut-outs, sizes) and :mod:`opd_recipes.masks` (what hides pixels).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from opd_recipes.registry import Registry

Box = tuple[float, float, float, float]
Color = tuple[int, int, int]

VIEWS = Registry("opd.views")

#: A box edge this near to a whole pixel is that pixel: what a moved box gains by rounding.
EDGE = 1e-6


class ViewError(ValueError):
    """A row whose image or box cannot give the view that the recipe asks for."""


def check_box(box: Sequence[float] | None, size: tuple[int, int]) -> Box:
    """Return the box as four floats; raise :class:`ViewError` unless it is non-empty and inside the image."""
    if box is None:
        raise ViewError("the row has no evidence box ('bbox': [x0, y0, x1, y1] in pixels)")
    if len(box) != 4:
        raise ViewError(f"bbox {list(box)} must have four numbers: x0, y0, x1, y1 in pixels")
    x0, y0, x1, y1 = (float(v) for v in box)
    if not all(map(math.isfinite, (x0, y0, x1, y1))):
        raise ViewError(f"bbox {list(box)} has a value that is not finite")
    if x1 <= x0 or y1 <= y0:
        raise ViewError(f"bbox {list(box)} is empty: x0 < x1 and y0 < y1 must hold (is it x, y, width, height?)")
    if x0 < 0 or y0 < 0 or x1 > size[0] or y1 > size[1]:
        raise ViewError(f"bbox {list(box)} lies outside the image of {size[0]} x {size[1]} pixels")
    return x0, y0, x1, y1


def check_positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ViewError(f"{name} must be above 0, got {value}")


def check_not_negative(**options: float) -> None:
    for name, value in options.items():
        if not value >= 0:
            raise ViewError(f"{name} must not be negative, got {value}")


def check_share(**options: float) -> None:
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise ViewError(f"{name} must be between 0 and 1, got {value}")


def check_color(color: Color) -> Color:
    """Return RGB as a tuple (YAML gives a list)."""
    if not all(0 <= channel <= 255 for channel in color):
        raise ViewError(f"color must be red, green, blue from 0 to 255, got {list(color)}")
    red, green, blue = color
    return red, green, blue
