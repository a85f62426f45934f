"""Pictures of traced rollouts as they stand on the page: small, encoded anew, with the evidence box on top."""

from __future__ import annotations

import base64
import io
import os
from dataclasses import dataclass
from functools import cache

from PIL import Image

from opd_recipes.images import ImageRoot, decode
from opd_recipes.report.reading import TRACES
from opd_recipes.report.traces import Rollout, Traces
from opd_recipes.report.words import printable
from opd_recipes.views import ViewError

#: Longest side, and most encoded bytes, of a picture.
SIDE, BYTES = 640, 90_000
#: Longest side up to which a picture keeps its very pixels, and up to which it is shown larger, pixel by pixel.
LOSSLESS, ENLARGED = 256, 200
#: How far the shapes of view and original may differ for the box to be drawn on the view: a crop has another shape.
SAME_SHAPE = 0.05
WORDS = {
    "student": "what the student saw",
    "teacher": "what the teacher saw",
    "negative": "the teacher's second view, without the evidence",
}


@dataclass(frozen=True)
class Picture:
    """One view of a rollout.

    Args:
        view: ``student``, ``teacher`` or ``negative``.
        alt: What it is, for who cannot see it.
        source: A data address; empty where the picture cannot be shown, and ``fault`` says why.
        width, height: Pixels of the encoded picture, the units of ``box``.
        shown: Width at which it is shown.
        box: x, y, width and height of the evidence in the encoded picture; None: it is not drawn.
    """

    view: str
    alt: str
    source: str = ""
    width: int = 0
    height: int = 0
    shown: int = 0
    box: tuple[float, float, float, float] | None = None
    fault: str = ""


def pictures_of(rollout: Rollout, traces: Traces) -> list[Picture]:
    """The views of a rollout. A name that leads out of the traces folder, or a file that is none, gives the reason instead."""
    root = ImageRoot((str(traces.folder.resolve()),))
    return [_picture(view, name, rollout, root) for view, name in rollout.images.items()]


def _picture(view: str, name: str, rollout: Rollout, root: ImageRoot) -> Picture:
    words = WORDS[view]
    try:
        modified = _modified(root.find(name))
        source, (width, height), (first_width, first_height) = _encoded(name, root, modified)
    except ViewError as error:
        # The page may be sent to somebody: where the run lies on this machine is of no use there.
        return Picture(view, words, fault=printable(str(error).replace(root.folders[0], TRACES), 300))
    box = _box(rollout, width, height) if view == "student" else None
    said = f", evidence box at {', '.join(f'{x:g}' for x in rollout.box)}" if box and rollout.box else ""
    alt = f"{words.capitalize()}, {first_width} by {first_height} pixels{said}"
    factor = max(1, ENLARGED // max(width, height))
    return Picture(view, alt, source, width, height, width * factor, box)


def _modified(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@cache  # a page that is written again and again encodes each picture once
def _encoded(name: str, root: ImageRoot, modified: int) -> tuple[str, tuple[int, int], tuple[int, int]]:
    image = decode(name, root)
    small = image.copy()
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    data, kind = _bytes(small)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}", small.size, image.size


def _bytes(image: Image.Image) -> tuple[bytes, str]:
    if max(image.size) <= LOSSLESS and len(data := _encode(image, "PNG")) <= BYTES:
        return data, "png"
    for quality in (85, 70, 55, 40, 25):
        if len(data := _encode(image, "JPEG", quality=quality)) <= BYTES:
            break
    return data, "jpeg"


def _encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _box(rollout: Rollout, width: int, height: int) -> tuple[float, float, float, float] | None:
    """The evidence in a view that shows the whole original, at whatever size."""
    if rollout.box is None or rollout.original is None or min(rollout.original) <= 0:
        return None
    across, down = width / rollout.original[0], height / rollout.original[1]
    if abs(across / down - 1) > SAME_SHAPE:
        return None
    x0, y0, x1, y1 = rollout.box
    if not (0 <= x0 < x1 <= rollout.original[0] and 0 <= y0 < y1 <= rollout.original[1]):
        return None
    return round(x0 * across, 1), round(y0 * down, 1), round((x1 - x0) * across, 1), round((y1 - y0) * down, 1)
