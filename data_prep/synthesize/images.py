"""The folder of unlabelled images, and how each is shown to a model: downscaled, or the evidence enlarged."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from data_prep.rows import RowFault
from opd_recipes.view_steps import Box
from opd_recipes.views import crop

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
#: Decoders that a file may use whatever its name says: some others start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")
#: Longest to shortest side of evidence; Qwen's processors refuse 200 (smart_resize).
MAX_ASPECT = 100


@dataclass(frozen=True)
class Picture:
    """One readable image.

    Attributes:
        name: Path below the folder, with forward slashes.
        data: The file as it is.
        digest: sha256 of ``data``.
        pixels: sha256 of the decoded upright pixels: the same picture in another encoding has the same.
        size: Width and height in pixels, upright.
    """

    name: str
    data: bytes
    digest: str
    pixels: str
    size: tuple[int, int]

    def whole(self, max_side: int, multiple: int = 1) -> Shown:
        """The image with its longest side at most ``max_side`` and both sides multiples of ``multiple`` pixels."""
        return Shown(self, None, fitted(self.size, max_side, multiple))

    def evidence(self, box: Box, zoom: float, max_side: int) -> Shown:
        """The pixels in ``box`` (whole pixels of the upright image), enlarged ``zoom`` times, at most ``max_side``."""
        width, height = round((box[2] - box[0]) * zoom), round((box[3] - box[1]) * zoom)
        return Shown(self, box, fitted((max(1, width), max(1, height)), max_side), zoom)


@dataclass(frozen=True)
class Shown:
    """An image as a request shows it. The pixels are made when they are sent, and only then."""

    picture: Picture
    box: Box | None
    size: tuple[int, int]
    zoom: float = 1.0

    @property
    def identity(self) -> str:
        """What the pixels depend on; stable over versions of the encoder, unlike the encoded bytes."""
        return f"{self.picture.digest} {list(self.box) if self.box else 'whole'} {self.zoom:g} {list(self.size)}"

    def image(self) -> Image.Image:
        image = upright(self.picture.data)
        if self.box is not None:
            image, _ = crop(image, self.box, zoom=self.zoom)  # what training shows the teacher
        return image if image.size == self.size else image.resize(self.size, Image.Resampling.LANCZOS)

    def data_url(self) -> str:
        """Evidence without loss; a whole image as a JPEG of high quality, which is a tenth of the size."""
        buffer = io.BytesIO()
        if self.box is not None:
            self.image().save(buffer, format="PNG")
            kind = "png"
        else:
            self.image().save(buffer, format="JPEG", quality=95, subsampling=0)
            kind = "jpeg"
        return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def fitted(size: tuple[int, int], max_side: int, multiple: int = 1) -> tuple[int, int]:
    """``size`` scaled down, never up, to ``max_side``; each side then rounded to a multiple, at least one."""
    scale = min(1.0, max_side / max(size))
    width, height = (max(1, round(side * scale / multiple)) * multiple for side in size)
    return width, height


def upright(data: bytes) -> Image.Image:
    """Decode as upright RGB; transparency turns white, as in training.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: Damaged, no image, or too large.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # twice the limit is an error
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            image: Image.Image = ImageOps.exif_transpose(opened)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")


def list_images(folder: Path) -> tuple[list[str], int]:
    """Names of the image files below ``folder``, sorted, and how many other files there are.

    Links to folders are not followed, and what starts with a dot is left alone.
    """
    names: list[str] = []
    others = 0
    for parent, folders, files in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for file in files:
            if file.lower().endswith(SUFFIXES) and not file.startswith("."):
                names.append((Path(parent) / file).relative_to(folder).as_posix())
            else:
                others += 1
    return sorted(names), others


def read_picture(folder: Path, name: str) -> Picture:
    """Read and decode one image to its last row.

    Raises:
        RowFault: It is a link that leaves the folder, is damaged, or has a name that parquet cannot hold.
    """
    path = folder / name
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise RowFault("the file's name is not UTF-8; rename it") from error
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise RowFault("it is a link that leaves the folder; copy the file itself into it")
        if not path.is_file():
            raise RowFault("it is no regular file; remove it")
        data = path.read_bytes()
        image = upright(data)
    except RowFault:
        raise
    except UnidentifiedImageError as error:
        raise RowFault("it is damaged or none of JPEG, PNG, WebP, BMP, TIFF; replace it") from error
    except Exception as error:  # a damaged file can raise nearly anything in a decoder
        raise RowFault(f"it cannot be read ({error}); replace it") from error
    pixels = hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()
    return Picture(name, data, hashlib.sha256(data).hexdigest(), pixels, image.size)


def check_evidence(box: Box, size: tuple[int, int], max_ratio: float, min_side: int) -> None:
    """Judge an evidence box by its size.

    Raises:
        RowFault: It has ``max_ratio`` of the image's area or more, or a side below ``min_side`` pixels, or is a sliver.
    """
    width, height = box[2] - box[0], box[3] - box[1]
    ratio = width * height / (size[0] * size[1])
    if ratio >= max_ratio:
        raise RowFault(f"the box has {ratio:.3f} of the image's area, not less than {max_ratio:g} (--max-area-ratio)")
    if min(width, height) < min_side:
        raise RowFault(f"the box is {width:g} x {height:g} pixels, a side below {min_side} (--min-side)")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise RowFault(f"the box is {width:g} x {height:g} pixels, more than {MAX_ASPECT} times as long as wide")


def overlap(one: Box, other: Box) -> float:
    """Intersection over union of two boxes."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return both / (sum(areas) - both)
