"""Validation accuracy of a run by data source and view, and the gap between the two views."""

from __future__ import annotations

import re
from dataclasses import dataclass

from opd_recipes.report.reading import Run

Series = list[tuple[int, float]]

_KEY = re.compile(r"val-core/(?P<source>.+)@(?P<view>[^@/]+)/(?P<score>acc|reward)/mean@\d+")

#: Names of the student's view and of the teacher's: the recipes' own, and those that the study and the comparators give.
PAIRS = (("student", "teacher"), ("full", "crop"))
WORDS = {
    "student": "full image (student's view)",
    "teacher": "crop (teacher's view)",
    "full": "full image",
    "crop": "crop",
}


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on one data source, as fractions.

    Args:
        source: Its name.
        views: By view.
        of: Words for a title where a run has several sources; else empty.
    """

    source: str
    views: dict[str, Series]
    of: str = ""

    @property
    def full(self) -> Series:
        """The student's view; empty where there is none."""
        return self._first(0)

    @property
    def crop(self) -> Series:
        """The teacher's view; empty where there is none."""
        return self._first(1)

    def _first(self, side: int) -> Series:
        return next((self.views[pair[side]] for pair in PAIRS if pair[side] in self.views), [])

    @property
    def gap(self) -> Series:
        """Crop less full, at the steps that have both."""
        crop = dict(self.crop)
        return [(step, crop[step] - value) for step, value in self.full if step in crop]

    @property
    def closed(self) -> float | None:
        """(full after - full before) / (crop before - full before), as the demo counts it; None without a gap."""
        full, gap = self.full, self.gap
        if len(gap) < 2 or gap[0][1] <= 0:
            return None
        before, after = dict(full)[gap[0][0]], dict(full)[gap[-1][0]]
        return (after - before) / gap[0][1]


def accuracies(run: Run) -> list[Accuracy]:
    """Every data source of a run's validation, by name."""
    found: dict[str, dict[str, Series]] = {}
    for key in run.names():
        if (match := _KEY.fullmatch(key)) and (series := run.finite(key)):
            found.setdefault(match["source"], {}).setdefault(match["view"], series)
    several = len(found) > 1
    order = [view for pair in PAIRS for view in pair]
    return [
        Accuracy(
            source,
            dict(sorted(views.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))),
            f" on {source}" if several else "",
        )
        for source, views in sorted(found.items())
    ]
