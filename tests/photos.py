"""A small set of real photographs in the layout of the published Vision-OPD-6K.

The photographs come from packages of the ``dev`` extra, read as files (the packages themselves are not imported):

- scikit-image (BSD-3-Clause), ``skimage/data``: ``coffee.png`` (Rachel Michetti, CC0), ``chelsea.png`` (Stefan van der
  Walt, CC0), ``camera.png`` (Lav Varshney, CC0), ``astronaut.png`` and ``hubble_deep_field.jpg`` (NASA, public domain),
  ``rocket.jpg`` (SpaceX, public domain), ``coins.png`` (Brooklyn Museum, no known copyright restrictions).
- matplotlib (PSF-based licence), ``sample_data/grace_hopper.jpg`` (James S. Davis, United States Navy, public domain).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from opd_recipes.views import View

STUDENT_VIEW = View([{"kind": "redbox"}])
TEACHER_VIEW = View([{"kind": "crop", "zoom": 2.0}])
ORIENTATION = 0x0112  # the EXIF tag

Box = tuple[int, int, int, int]


def _as_is(image: Image.Image) -> tuple[Image.Image, dict[str, Any]]:
    return image, {}


def _greyscale(image: Image.Image) -> tuple[Image.Image, dict[str, Any]]:
    return image.convert("L"), {}


def _palette(image: Image.Image) -> tuple[Image.Image, dict[str, Any]]:
    return image.quantize(64), {}


def _transparent_corners(image: Image.Image) -> tuple[Image.Image, dict[str, Any]]:
    """Opaque inside an ellipse, transparent at the corners."""
    alpha = Image.new("L", image.size, 0)
    ImageDraw.Draw(alpha).ellipse((0, 0, image.width - 1, image.height - 1), fill=255)
    image = image.copy()
    image.putalpha(alpha)
    return image, {}


def _lying(image: Image.Image) -> tuple[Image.Image, dict[str, Any]]:
    """Stored as a camera held sideways does: turned, with the orientation that turns it back."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return image.transpose(Image.Transpose.ROTATE_90), {"exif": exif}


@dataclass(frozen=True)
class Photo:
    """One row: a photograph, the part of it that is used, and the evidence box in that part's pixels."""

    file: str
    box: Box
    problem: str
    answer: str | None
    part: Box | None = None
    suffix: str = ".jpg"
    store: Callable[[Image.Image], tuple[Image.Image, dict[str, Any]]] = _as_is
    as_dict: bool = False

    def load(self) -> Image.Image:
        """The upright RGB photograph, without a box."""
        package = "matplotlib" if self.file.startswith("matplotlib") else "scikit-image"
        with Image.open(str(distribution(package).locate_file(self.file))) as image:
            return image.convert("RGB").crop(self.part) if self.part else image.convert("RGB")


_HOPPER = "matplotlib/mpl-data/sample_data/grace_hopper.jpg"

PHOTOS = (
    Photo("skimage/data/coffee.png", (320, 230, 410, 330), "<image>What is in the box?\nA. a fork\nB. a spoon", "B"),
    Photo(
        "skimage/data/astronaut.png",
        (132, 348, 212, 428),
        "<image>\nWhich shape has the patch?\nA. round\nB. square",
        "A",
        suffix=".png",
    ),
    # A strip of 80 x 427 pixels.
    Photo(
        "skimage/data/rocket.jpg",
        (25, 125, 55, 190),
        "What stands in the middle?\nA. a tower\nB. a rocket",
        "B",
        part=(285, 0, 365, 427),
    ),
    Photo(
        "skimage/data/chelsea.png",
        (130, 75, 210, 150),
        "What colour is this eye?",
        "green",
        suffix=".png",
        store=_transparent_corners,
    ),
    Photo(_HOPPER, (75, 480, 175, 520), "<image>What is pinned to the jacket?", "a name badge", store=_lying),
    Photo(
        "skimage/data/camera.png",
        (250, 130, 330, 190),
        "<image>What does the man look into?",
        "a camera",
        suffix=".png",
        store=_greyscale,
        as_dict=True,
    ),
    Photo("skimage/data/coins.png", (312, 150, 380, 218), "How many coins?", "1", suffix=".png", store=_palette),
    # A band of 1000 x 200 pixels, and a row without an answer.
    Photo(
        "skimage/data/hubble_deep_field.jpg", (380, 40, 440, 110), "<image>What is this?", None, part=(0, 0, 1000, 200)
    ),
    # A second question about an image of another row.
    Photo("skimage/data/coffee.png", (320, 230, 410, 330), "<image>Of what is the object made?", "metal"),
    # Evidence of 24 x 16 pixels.
    Photo("skimage/data/rocket.jpg", (310, 146, 334, 162), "<image>What is drawn on the nose?", "a logo"),
)


def make_vision_opd_6k(folder: Path) -> Path:
    """Write ``train.jsonl``, ``images/`` and ``teacher_images/``: one row for each of :data:`PHOTOS`, in order.

    Raises:
        importlib.metadata.PackageNotFoundError: A package of the ``dev`` extra is not installed.
    """
    fields = {"images": STUDENT_VIEW, "teacher_images": TEACHER_VIEW}
    for field in fields:
        (folder / field).mkdir(parents=True, exist_ok=True)
    with (folder / "train.jsonl").open("w", encoding="utf-8") as lines:
        for number, photo in enumerate(PHOTOS, start=1):
            row: dict[str, Any] = {"problem": photo.problem, "bbox": photo.box}
            if photo.answer is not None:
                row["answer"] = photo.answer
            for field, view in fields.items():
                name = f"{field}/{number:06d}{photo.suffix}"
                image, options = photo.store(view(photo.load(), photo.box))
                image.save(folder / name, **options)
                row[field] = [{"path": name} if photo.as_dict else name]
            lines.write(json.dumps(row) + "\n")
    return folder
