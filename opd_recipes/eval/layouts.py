"""What the loaders of the benchmarks share: images of rows, boxes, letters, sub-sets."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd_recipes.eval.question import ImageSource
from opd_recipes.eval.tables import Row, missing
from opd_recipes.images import ImageRoot
from opd_recipes.registry import RecipeError
from opd_recipes.view_steps import ViewError

Box = tuple[float, float, float, float]

#: What many benchmarks add behind the options (LLaVA's wording).
LETTER_ONLY = "Answer with the option's letter from the given choices directly."

#: Options of a question whose texts could not be read, or are in the picture: only letters then answer it.
UNREAD = dict.fromkeys("ABCD", "")

_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]{64,}\Z")


def image_of(value: Any, row: Row, folders: Sequence[Path] = ()) -> ImageSource:
    """An image as a row holds it: bytes, base64, ``{"bytes": ..., "path": ...}``, or a path in one of ``folders``.

    Raises:
        RecipeError: It is none of these, lies outside the folders, or is not there.
    """
    if isinstance(value, Mapping):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes | bytearray | memoryview):
        return ImageSource(bytes(value), f"image of {row}")
    if isinstance(value, str) and (value.startswith("data:") or _BASE64.match(value[:4096])):
        return ImageSource(value, f"image of {row}")
    if not isinstance(value, str) or not value:
        raise RecipeError(f"{row}: expected an image (bytes, base64 or a path), got {value!r:.80}")
    tried = [inside(folder, value, row) for folder in folders]
    for file in tried:
        if file.is_file():
            return ImageSource(file, f"image of {row}")
    raise RecipeError(
        f"{row}: its image {value!r:.120} is not there; looked for {' and '.join(map(str, tried)) or 'none'}"
    )


def inside(folder: Path, name: str, row: Row) -> Path:
    """The file that a row names in a folder. Links may lead to the files of a Hugging Face cache, and nowhere else.

    Raises:
        RecipeError: It lies outside.
    """
    blobs = [parent / "blobs" for parent in folder.absolute().parents if parent.name.startswith("datasets--")]
    try:
        return Path(ImageRoot((str(folder), *map(str, blobs))).find(name))
    except ViewError as error:
        raise RecipeError(f"{row}: {error}") from error


def union(boxes: Any, row: Row, form: str = "xyxy") -> Box | None:
    """The least box around one or several, in pixels, right and bottom exclusive; None where there is none.

    Args:
        boxes: Four numbers, a list of such, or either as text.
        form: ``xyxy``, or ``xywh``: left, top, width, height.

    Raises:
        RecipeError: Something else, or a box without area.
    """
    if isinstance(boxes, str) and boxes.strip():
        try:
            boxes = ast.literal_eval(boxes)
        except (ValueError, SyntaxError) as error:
            raise RecipeError(f"{row}: the box {boxes[:80]!r} cannot be read") from error
    if missing(boxes) or len(boxes) == 0:
        return None
    several = boxes if isinstance(boxes[0], Sequence) else [boxes]
    corners = []
    for box in several:
        if len(box) != 4:
            raise RecipeError(f"{row}: expected four numbers for a box, got {box!r:.80}")
        x, y, a, b = map(float, box)
        corners.append((x, y, x + a, y + b) if form == "xywh" else (x, y, a, b))
    left, top, right, bottom = (f(c) for f, c in zip((min, min, max, max), zip(*corners, strict=True), strict=True))
    if not (right > left and bottom > top):
        raise RecipeError(f"{row}: the box {boxes!r:.80} has no area")
    return left, top, right, bottom


def columns_of(row: Row, letters: str = "ABCDEFGH") -> dict[str, str]:
    """Options that stand in columns A, B, C, ...; a column without text is no option."""
    return {letter: str(row.values[letter]).strip() for letter in letters if not missing(row.values.get(letter))}


def listed(options: Mapping[str, str], form: str = "{}. {}") -> str:
    """The options as lines of a prompt."""
    return "\n".join(form.format(letter, text) for letter, text in options.items())


def chosen(split: str | None, known: Collection[str], name: str) -> str | None:
    """``split``, checked.

    Raises:
        RecipeError: It is none of ``known``.
    """
    if split is not None and split not in known:
        raise RecipeError(f"{name}: unknown split {split!r}; known: {', '.join(known) or 'none'}")
    return split
