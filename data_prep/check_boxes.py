"""What is wrong with an evidence box, and what many boxes together suggest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from data_prep.check_images import Seen
from data_prep.faults import Finding

#: A box with this share of the image or more leaves the teacher without a privilege.
WHOLE = 0.9
#: A box with a side below this, in pixels, shows hardly anything.
TINY = 4.0
#: A box this far outside may be so by rounding; the message says it.
ROUNDING = 1.5
#: A box that reaches beyond the image by this factor, but not beyond 1000, is taken for thousandths of the sides.
FAR = 1.5
#: Boxes of other conventions that are needed before all are suspected.
SUSPECT_ROWS = 50


def box_findings(box: Sequence[Any] | None, image: Seen | None, needed: bool) -> list[Finding]:
    """Check a row's box against its (last) image.

    Args:
        box: x0, y0, x1, y1 in pixels of the upright image, right and bottom exclusive.
        image: None where it does not decode; then only the numbers are checked.
        needed: Whether a view draws with it. If not, only what no reader survives is a fault.
    """
    if box is None:
        return (
            [Finding("box_missing", "the recipe's views need an evidence box, and the row has none")] if needed else []
        )
    shown = list(box)
    if len(box) != 4 or any(value is None for value in box):
        return [Finding("box_length", f"bbox {shown} must be four numbers")]
    values = [float(value) for value in box]
    if not all(map(math.isfinite, values)):
        return [Finding("box_not_finite", f"bbox {shown} has a value that is not finite")]
    if not needed:
        return []
    x0, y0, x1, y1 = values
    if image is None:
        return [Finding("box_empty", f"bbox {shown} is empty")] if x1 <= x0 or y1 <= y0 else []
    return _placed((x0, y0, x1, y1), shown, image)


def _placed(box: tuple[float, float, float, float], shown: list[Any], image: Seen) -> list[Finding]:
    x0, y0, x1, y1 = box
    width, height = image.size
    said = f"bbox {shown} in the image of {width} x {height} pixels"
    if min(box) >= 0 and max(box) <= 1 and (width > 1 or height > 1):
        return [Finding("box_normalised", f"{said}: all values are between 0 and 1, as shares of the sides are")]
    if x1 <= x0 or y1 <= y0:
        if min(box) >= 0 and x1 > 0 and y1 > 0 and x0 + x1 <= width and y0 + y1 <= height:
            return [Finding("box_xywh", f"{said} is empty, but fits as x, y, width, height")]
        return [Finding("box_empty", f"{said} is empty")]
    if x0 < 0 or y0 < 0 or x1 > width or y1 > height:
        return [_outside(box, said, image)]
    share = (x1 - x0) * (y1 - y0) / (width * height)
    if share >= WHOLE:
        return [Finding("box_whole_image", f"{said} is {share:.0%} of it")]
    if min(x1 - x0, y1 - y0) < TINY:
        return [Finding("box_tiny", f"{said} is {x1 - x0:g} x {y1 - y0:g} pixels")]
    return []


def _outside(box: tuple[float, float, float, float], said: str, image: Seen) -> Finding:
    x0, y0, x1, y1 = box
    width, height = image.size
    by = max(-x0, -y0, x1 - width, y1 - height)
    if min(box) >= 0 and image.stored != image.size and x1 <= image.stored[0] and y1 <= image.stored[1]:
        stored = f"{image.stored[0]} x {image.stored[1]}"
        return Finding("box_stored_orientation", f"{said}: it fits only the stored {stored}, before EXIF turns it")
    if max(x1 / width, y1 / height) > FAR and min(box) >= 0 and max(box) <= 1000:
        return Finding("box_thousandths", f"{said} is outside, but fits in thousandths of the sides")
    hint = " (by rounding?)" if by <= ROUNDING else ""
    return Finding("box_outside", f"{said} is outside by {by:g} pixels{hint}")


class BoxStatistics:
    """Conventions that no single box gives away: valid as corners, each of them, and yet meant otherwise."""

    def __init__(self) -> None:
        self._corners = self._could_be_xywh = self._in_large = self._up_to_thousand = 0
        self._largest = 0.0

    def add(self, box: Sequence[float], image: Seen) -> None:
        """Count a box without error."""
        x0, y0, x1, y1 = map(float, box)
        width, height = image.size
        self._corners += 1
        self._could_be_xywh += x0 + x1 <= width and y0 + y1 <= height
        if min(width, height) > 1200:
            self._in_large += 1
            self._up_to_thousand += max(x1, y1) <= 1000
            self._largest = max(self._largest, x1, y1)

    def findings(self) -> list[Finding]:
        found = []
        if self._corners >= SUSPECT_ROWS and self._could_be_xywh == self._corners:
            found.append(
                Finding(
                    "boxes_xywh",
                    f"all {self._corners} boxes fit as x, y, width, height, too; of boxes that are corners, those in the "
                    "lower right would not",
                )
            )
        if self._in_large >= SUSPECT_ROWS and self._up_to_thousand == self._in_large and self._largest > 900:
            found.append(
                Finding(
                    "boxes_thousandths",
                    f"in {self._in_large} images with sides above 1200 pixels no box reaches beyond 1000 "
                    f"(largest value {self._largest:g})",
                )
            )
        return found
