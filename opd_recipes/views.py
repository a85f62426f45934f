"""Views: what the student and the teachers see of one image.

A view is a list of steps, each ``(image, box, *, option=...) -> (image, box)``: a PIL RGB image and the evidence box in
that image's pixels (``x0, y0, x1, y1``, right and bottom edges exclusive), or ``None`` where the row has no box. A step
that moves pixels returns the box in the new image's pixels, so that steps compose. Steps are pure: the same row gives
the same view on every worker and on every rollout, and the image that comes in is never changed. Steps that hide pixels
are in :mod:`opd_recipes.masks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image, ImageDraw

import opd_recipes.masks  # noqa: F401  (registers its steps)
from opd_recipes.registry import RecipeError
from opd_recipes.view_steps import (
    EDGE,
    VIEWS,
    Box,
    Color,
    ViewError,
    check_box,
    check_color,
    check_not_negative,
    check_positive,
)

__all__ = ["NEEDS_BOX", "VIEWS", "Box", "View", "ViewError", "check_box", "crop", "original", "redbox", "resize"]

#: Steps that cannot work on a row without an evidence box.
NEEDS_BOX = {"redbox", "crop", "mask_box"}


@VIEWS.register("original")
def original(image: Image.Image, box: Box | None) -> tuple[Image.Image, Box | None]:
    """The image as it is in the row."""
    return image, box


@VIEWS.register("redbox")
def redbox(
    image: Image.Image,
    box: Box | None,
    *,
    width: int = 5,
    expand: float = 0.05,
    color: Color = (255, 0, 0),
) -> tuple[Image.Image, Box | None]:
    """Draw the evidence box (Vision-OPD, arXiv 2605.18740: 5 px wide, the box expanded by 5%).

    Args:
        width: Line width in pixels, drawn outside the expanded box so that it covers no evidence.
        expand: Fraction of the box's side added to it, half on each end.
        color: RGB.
    """
    check_positive(width=width)
    check_not_negative(expand=expand)
    x0, y0, x1, y1 = check_box(box, image.size)
    dx, dy = (x1 - x0) * expand / 2, (y1 - y0) * expand / 2
    # ImageDraw's right and bottom edges are inclusive, a box's are exclusive.
    edges = (x0 - dx - width, y0 - dy - width, x1 + dx + width - 1, y1 + dy + width - 1)
    marked = image.copy()
    ImageDraw.Draw(marked).rectangle([round(v) for v in edges], outline=check_color(color), width=width)
    return marked, box


@VIEWS.register("crop")
def crop(
    image: Image.Image,
    box: Box | None,
    *,
    zoom: float = 2.0,
    padding: float = 0.0,
    min_size: int = 1,
) -> tuple[Image.Image, Box | None]:
    """Cut out the evidence and enlarge it (Vision-OPD: enlarged twice).

    Args:
        zoom: Factor on both sides of the cut-out, Lanczos.
        padding: Context added on each end, as a fraction of the box's side.
        min_size: Least side of the cut-out in source pixels; a smaller one grows around the box. The cut-out is
            shifted to stay inside the image.
    """
    check_positive(zoom=zoom, min_size=min_size)
    check_not_negative(padding=padding)
    x0, y0, x1, y1 = check_box(box, image.size)
    left, right = _span(x0, x1, padding, min_size, image.width)
    top, bottom = _span(y0, y1, padding, min_size, image.height)
    size = (max(1, round((right - left) * zoom)), max(1, round((bottom - top) * zoom)))
    zoomed = image.crop((left, top, right, bottom)).resize(size, Image.Resampling.LANCZOS)
    sx, sy = size[0] / (right - left), size[1] / (bottom - top)
    return zoomed, _moved((x0 - left, y0 - top, x1 - left, y1 - top), sx, sy, size)


@VIEWS.register("resize")
def resize(
    image: Image.Image, box: Box | None, *, scale: float, restore: bool = False
) -> tuple[Image.Image, Box | None]:
    """Scale both sides, Lanczos (RP-OPSD, arXiv 2607.24447: 0.5 for the student, a quarter of the pixels).

    The processor must not undo it: see the warning in :mod:`opd_recipes.dataset`.

    Args:
        scale: Factor on both sides.
        restore: Enlarge again to the original size, Lanczos: the detail is lost, the number of image tokens is not (the
            ablation "canvas restored" of RP-OPSD).
    """
    check_positive(scale=scale)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    scaled = image.resize(size, Image.Resampling.LANCZOS)
    if restore:
        return scaled.resize(image.size, Image.Resampling.LANCZOS), box
    if box is None:
        return scaled, None
    return scaled, _moved(box, size[0] / image.width, size[1] / image.height, size)


def _moved(box: Box, sx: float, sy: float, size: tuple[int, int]) -> Box:
    """A box scaled into an image of ``size``; rounding must not carry it over the edge, where the next step refuses it."""
    x0, y0, x1, y1 = box[0] * sx, box[1] * sy, box[2] * sx, box[3] * sy
    return max(x0, 0.0), max(y0, 0.0), min(x1, float(size[0])), min(y1, float(size[1]))


def _span(low: float, high: float, padding: float, min_size: int, limit: int) -> tuple[int, int]:
    """The padded, grown and shifted interval of ``crop`` along one axis, in whole pixels."""
    side = max((high - low) * (1 + 2 * padding), float(min_size))
    start = (low + high - side) / 2
    first, last = math.floor(start + EDGE), math.ceil(start + side - EDGE)
    length = min(last - first, limit)
    first = min(max(0, first), limit - length)
    return first, first + length


class View:
    """One configured view: ``view(image, box) -> image``.

    Args:
        spec: A step name, a ``{"kind": name, option: value}`` mapping, or a list of these applied in order. ``provided``,
            which must be the first, starts from the row's ``bbox_images`` column; no box is known in these.
        where: The configuration key, for messages.
    """

    def __init__(self, spec: Any, where: str = "opd.views"):
        steps = [spec] if isinstance(spec, str | Mapping) else list(spec or [])
        known = ["provided", *VIEWS.names()]
        if not steps:
            raise RecipeError(f"{where}: name at least one step; known: {', '.join(known)}")
        self.spec = [{"kind": step} if isinstance(step, str) else dict(step) for step in steps]
        self.kinds = [step if isinstance(step, str) else step.get("kind") for step in steps]
        for kind in self.kinds:
            if kind not in known:
                raise RecipeError(f"{where}: unknown value {kind!r}; known: {', '.join(known)}")
        self.provided = self.kinds[0] == "provided"
        if "provided" in self.kinds[1:]:
            raise RecipeError(
                f"{where}: 'provided' is where a view starts: make it the first step, and the only such one"
            )
        drawn = steps[1:] if self.provided else steps
        self._steps: list[Callable] = [VIEWS.build(step, where) for step in drawn]
        if self.provided and self.needs_box:
            blind = sorted(NEEDS_BOX.intersection(self.kinds))
            raise RecipeError(
                f"{where}: {', '.join(blind)} behind 'provided': no evidence box is known in ready-made images; "
                "use a step that needs none, e.g. mask_rectangle"
            )
        try:  # on a blank image, so that an option out of range is told before any row is read
            self(Image.new("RGB", (64, 64)), (16, 16, 48, 48))
        except ViewError as error:
            raise RecipeError(f"{where}: {error}") from error

    @property
    def needs_box(self) -> bool:
        return bool(NEEDS_BOX.intersection(self.kinds))

    def __call__(self, image: Image.Image, box: Box | None) -> Image.Image:
        for step in self._steps:
            image, box = step(image, box)
        return image
