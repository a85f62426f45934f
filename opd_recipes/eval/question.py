"""What a benchmark asks, what a model replied, and what came out: the types that loaders, runner and scoring share."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from opd_recipes.registry import RecipeError

if TYPE_CHECKING:
    from opd_recipes.eval.extraction import Extracted

Kind = Literal["choice", "yes_no", "number", "short"]

KINDS: tuple[Kind, ...] = ("choice", "yes_no", "number", "short")


@dataclass(frozen=True, repr=False)
class ImageSource:
    """One encoded image (PNG, JPEG, ...), read only when it is asked for.

    Args:
        content: The encoded file as bytes, its base64 as text, or its path.
        name: What messages call it.
    """

    content: bytes | str | Path
    name: str = "image"

    def read(self) -> bytes:
        """The encoded file.

        Raises:
            RecipeError: It cannot be read, or its base64 is damaged.
        """
        if isinstance(self.content, bytes):
            return self.content
        if isinstance(self.content, Path):
            try:
                return self.content.read_bytes()
            except OSError as error:
                raise RecipeError(f"{self.name}: {self.content} cannot be read: {error.strerror}") from error
        try:
            return base64.b64decode(self.content.rpartition("base64,")[2], validate=True)
        except (binascii.Error, ValueError) as error:
            raise RecipeError(f"{self.name}: the base64 is damaged: {error}") from error

    def __repr__(self) -> str:
        return f"ImageSource({self.name})"


@dataclass(frozen=True)
class Question:
    """One question of a benchmark, ready to be asked.

    Args:
        id: Unique within its benchmark and the same on every load. Results are keyed and compared by it.
        images: In the order in which they precede the text. Empty where the benchmark was loaded with ``images=False``.
        text: The user's turn exactly as it is sent behind the images, options and instructions included.
        kind: How the answer is read from a reply: ``choice`` (a letter), ``yes_no``, ``number`` or ``short``.
        answer: Every accepted answer: letters for ``choice``, ``yes`` or ``no``, numbers as text, or texts.
        options: Letter to text, for ``choice``; else None.
        category: Names of the groups in which scores are reported, e.g. ``{"task": "direct_attributes"}``.
        group: What is drawn together when the sampling error is estimated: the pair, the cycle, or the picture.
        bbox: Evidence box x0, y0, x1, y1 in pixels of the (last) image, right and bottom exclusive; or None.
        tolerance: For ``number``: greatest difference from the answer that still counts, relative to the answer.
    """

    id: str
    images: tuple[ImageSource, ...]
    text: str
    kind: Kind
    answer: tuple[str, ...]
    options: Mapping[str, str] | None = None
    category: Mapping[str, str] = field(default_factory=dict)
    group: str = ""
    bbox: tuple[float, float, float, float] | None = None
    tolerance: float = 0.0

    def without_images(self) -> Question:
        """The same question without its pictures, so that it can be kept."""
        return replace(self, images=())


@dataclass(frozen=True)
class Reply:
    """A model's reply to a question, read.

    Args:
        text: The reply as it came.
        extracted: The answer that was read from it; its ``value`` is None where none could be.
        correct: Whether it agrees with the question's answer; None: undecided. Undecided counts as wrong in every score
            and is counted on its own, with its reasons.
    """

    question: Question
    text: str
    extracted: Extracted
    correct: bool | None


@dataclass(frozen=True)
class Category:
    """The score of one category: ``value`` (0 to 1), of ``n`` questions, of which ``undecided`` had no readable answer."""

    value: float
    n: int
    undecided: int


@dataclass(frozen=True)
class Scores:
    """What came out of a benchmark. Every number is a share from 0 to 1, or a count.

    Args:
        overall: The number that the benchmark's authors report first; NaN where nothing was asked.
        metric: What it is, in words.
        n: Questions that were answered.
        undecided: Replies from which no answer could be read.
        categories: By kind of category, then by its name: ``{"task": {"direct_attributes": Category(...)}}``.
        extra: Further numbers that the benchmark's authors, or its users, look at.
    """

    overall: float
    metric: str
    n: int
    undecided: int
    categories: Mapping[str, Mapping[str, Category]] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``json.dumps``; a number that does not exist (no question, division by 0) is None."""
        return {
            "overall": _finite(self.overall),
            "metric": self.metric,
            "n": self.n,
            "undecided": self.undecided,
            "categories": {
                kind: {
                    name: {"value": _finite(c.value), "n": c.n, "undecided": c.undecided} for name, c in entries.items()
                }
                for kind, entries in self.categories.items()
            },
            "extra": {name: _finite(value) for name, value in self.extra.items()},
        }


def _finite(value: float) -> float | None:
    return None if value != value or value in (float("inf"), float("-inf")) else float(value)
