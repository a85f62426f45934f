"""What is wrong between rows: repeated ids and rows, validation images in training, spellings, conventions of boxes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from data_prep.check_boxes import BoxStatistics
from data_prep.check_rows import Checked
from data_prep.faults import Finding
from data_prep.looks import BITS, Looks

Place = tuple[str, int]


class ValidationImages:
    """Digests and looks of the validation rows' images: less than 1 KB and a place for each."""

    def __init__(self) -> None:
        self._bytes: dict[bytes, Place] = {}
        self._pixels: dict[bytes, Place] = {}
        self._looks: Looks[Place] = Looks()

    def add(self, place: Place, checked: Checked) -> None:
        for image in checked.images:
            if image is not None:
                self._bytes.setdefault(image.bytes_digest, place)
                self._pixels.setdefault(image.pixels_digest, place)
                self._looks.add(image.look, place)

    def findings(self, checked: Checked) -> list[Finding]:
        """The first image of a training row that is a validation image, too."""
        for number, image in enumerate(checked.images):
            if image is None:
                continue
            if place := self._bytes.get(image.bytes_digest):
                return [Finding("leak_bytes", f"image {number} is the file of {_said(place)}")]
            if place := self._pixels.get(image.pixels_digest):
                return [Finding("leak_pixels", f"image {number} has the pixels of {_said(place)}, encoded anew")]
            if near := min(self._looks.near(image.look), default=None):
                bits, place = near
                reason = f"image {number} looks like that of {_said(place)} ({bits} of {BITS} bits differ)"
                return [Finding("leak_similar", reason)]
        return []


class SetState:
    """What is remembered of the rows of one set (training or validation) while they stream by.

    Attributes:
        rows: Rows seen.
        bad: Rows with an error.
        tokens: View -> prompt tokens of each row whose view could be drawn.
    """

    def __init__(self) -> None:
        self.rows = self.bad = 0
        self.tokens: dict[str, array[int]] = {}
        self._ids: dict[tuple[str, str, Any], int] = {}
        self._seen: dict[bytes, Place] = {}
        self._sources: dict[str, str] = {}
        self._boxes = BoxStatistics()

    def findings(self, place: Place, row: Mapping[str, Any], checked: Checked) -> list[Finding]:
        """Compare a row with those before it, and remember it. A bad one will be removed, so it repeats nothing."""
        found = self._repeated_ids(place, row) + self._spelling(row)
        if checked.is_bad:
            return found
        found += self._repeated_row(place, checked)
        if checked.box is not None and checked.images and checked.images[-1] is not None:
            self._boxes.add(checked.box, checked.images[-1])
        return found

    def count(self, checked: Checked) -> None:
        self.rows += 1
        self.bad += checked.is_bad
        for view, tokens in checked.tokens.items():
            self.tokens.setdefault(view, array("l")).append(tokens)

    def closing(self) -> list[Finding]:
        """What only all rows together show."""
        return self._boxes.findings()

    def _repeated_ids(self, place: Place, row: Mapping[str, Any]) -> list[Finding]:
        file, number = place
        extra = row.get("extra_info")
        named = {f"extra_info.{key}": extra.get(key) for key in ("index", "id")} if isinstance(extra, dict) else {}
        named |= {key: row.get(key) for key in ("id", "uid")}
        found = []
        for name, value in named.items():
            if not isinstance(value, str | int) or value == "":
                continue
            first = self._ids.setdefault((file, name, value), number)
            if first != number:
                found.append(Finding("duplicate_id", f"{name} is {value!r}, as in row {first}"))
        return found

    def _repeated_row(self, place: Place, checked: Checked) -> list[Finding]:
        if not checked.images or None in checked.images:
            return []
        key = b"".join([checked.question, *(image.pixels_digest for image in checked.images if image is not None)])
        first = self._seen.setdefault(key, place)
        return [Finding("duplicate_row", f"image and question are those of {_said(first)}")] if first != place else []

    def _spelling(self, row: Mapping[str, Any]) -> list[Finding]:
        source = row.get("data_source")
        if not isinstance(source, str) or not source.strip():
            return []
        folded = "".join(character for character in source.casefold() if character.isalnum())
        first = self._sources.setdefault(folded, source)
        if first == source:
            return []
        return [Finding("data_source_variants", f"data_source is {source!r} here and {first!r} in earlier rows")]


def _said(place: Place) -> str:
    return f"{place[0]}, row {place[1]}"
