"""What is wrong with one encoded image. It is decoded by the function that training decodes with."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from threading import Lock
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from data_prep.faults import Finding
from data_prep.looks import look
from data_prep.rows import show
from opd_recipes.images import MAX_ENCODED_BYTES, ImageRoot, decode
from opd_recipes.views import ViewError

#: What is opened (MPO is JPEG to PIL). Other decoders can start programs (EPS starts Ghostscript) or are rarely tested.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")

#: First bytes of what is often mistaken for an image that can be read, and what it is.
_KNOWN = (
    (re.compile(rb"%!PS"), "EPS"),
    (re.compile(rb"%PDF"), "PDF"),
    (re.compile(rb"(\xef\xbb\xbf)?\s*<(\?xml|svg|!DOCTYPE svg)", re.IGNORECASE), "SVG or XML"),
    (re.compile(rb"....ftyp(?!.{0,40}avi[fs])(heic|heix|hevc|mif1|msf1)", re.DOTALL), "HEIC"),
    (re.compile(rb"....ftyp(?!.{0,40}avi[fs])", re.DOTALL), "a video (MP4, MOV)"),
    (re.compile(rb"8BPS"), "Photoshop"),
)
_TEXT = (
    (re.compile(rb"version https://git-lfs"), "a git-lfs pointer: fetch it with git lfs pull"),
    (re.compile(rb"\s*<(!DOCTYPE html|html)", re.IGNORECASE), "a web page, such as a server sends for an error"),
)

#: Images with more pixels than this are decoded one at a time, so that memory stays bounded.
LARGE_PIXELS = 2**25
_one_large_image = Lock()

#: Names that are addresses (http://, s3://) and no paths.
ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://|data:")


@dataclass(frozen=True)
class Seen:
    """An image that decodes.

    Args:
        size: Width and height of the upright image.
        stored: The same before its EXIF orientation is applied.
        bytes_digest: Of the encoded bytes.
        pixels_digest: Of the upright RGB pixels, so that it survives another lossless encoding.
        look: Of the same; nearly the same in a lossy encoding or another size (:mod:`data_prep.looks`).
    """

    size: tuple[int, int]
    stored: tuple[int, int]
    bytes_digest: bytes
    pixels_digest: bytes
    look: bytes = b""


def inspect_image(source: Any, name: str, root: ImageRoot) -> tuple[Seen | None, list[Finding]]:
    """Look at one entry of ``images`` or ``bbox_images``.

    Args:
        source: ``{"bytes": ..., "path": ...}`` or a path.
        name: What messages call it, e.g. ``images[0]``.
        root: The folders in which rows may name images.

    Returns:
        What it shows (None unless it decodes), and what is wrong.
    """
    data, found = _read(source, name, root)
    if data is None:
        return None, found
    if not data:
        return None, [*found, Finding("image_empty", f"{name} has 0 bytes")]
    stored, more = _header(data, name)
    found += more
    if stored is None:
        return None, found
    if stored[0] * stored[1] > LARGE_PIXELS:
        with _one_large_image:
            return _pixels(data, name, stored, found)
    return _pixels(data, name, stored, found)


def _read(source: Any, name: str, root: ImageRoot) -> tuple[bytes | None, list[Finding]]:
    data = source.get("bytes") if isinstance(source, dict) else None
    path = source.get("path") if isinstance(source, dict) else source
    if isinstance(data, bytes):
        return data, []
    if data is not None or not isinstance(path, str) or not path:
        return None, [Finding("image_missing", f"{name} is {show(source)}: neither bytes nor a path")]
    if "\0" in path:
        return None, [Finding("image_path_missing", f"{name} names {show(path)}, which is no path")]
    try:
        root.find(path)
    except ViewError as error:
        return None, [Finding("image_address" if ADDRESS.match(path) else "image_outside", f"{name}: {error}")]
    try:
        with root.open(path) as stream:
            data = stream.read(MAX_ENCODED_BYTES + 1)
    except (ViewError, OSError) as error:
        return None, [Finding("image_path_missing", f"{name}: {error}")]
    if len(data) > MAX_ENCODED_BYTES:
        longest = f"{MAX_ENCODED_BYTES >> 20} MiB"
        return None, [Finding("image_unreadable", f"{name} names {show(path)}, a file of more than {longest}")]
    return data, []


def _header(data: bytes, name: str) -> tuple[tuple[int, int] | None, list[Finding]]:
    """The stored size, and what is known before pixels are decoded."""
    for pattern, what in _KNOWN:
        if pattern.match(data):
            return None, [Finding("image_format", f"{name} is {what}, not one of {', '.join(FORMATS)}")]
    for pattern, what in _TEXT:
        if pattern.match(data):
            return None, [Finding("image_unreadable", f"{name} is {what}")]
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.size, _of_header(image, name)
    except Image.DecompressionBombError as error:
        return None, [Finding("image_bomb", f"{name}: {error}")]
    except UnidentifiedImageError:
        return None, [Finding("image_unreadable", f"{name} is no image, or its start is damaged ({len(data)} bytes)")]
    except Exception as error:  # a damaged file can raise nearly anything in a decoder
        return None, [_broken(name, error)]


def _of_header(image: Image.Image, name: str) -> list[Finding]:
    found = []
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # cameras put a preview behind the photograph
        found.append(Finding("image_animated", f"{name} has {frames} frames ({image.format})"))
    if image.mode == "CMYK":
        found.append(Finding("image_cmyk", f"{name} is CMYK ({image.format})"))
    limit = Image.MAX_IMAGE_PIXELS
    if limit and image.width * image.height > limit:
        found.append(Finding("image_huge", f"{name} has {image.width} x {image.height} pixels"))
    return found


def _pixels(data: bytes, name: str, stored: tuple[int, int], found: list[Finding]) -> tuple[Seen | None, list[Finding]]:
    try:
        found += _of_values(data, name)
        upright = decode({"bytes": data, "path": None})
    except ViewError as error:
        return None, [*found, _broken(name, error.__cause__ or error)]
    except Exception as error:
        return None, [*found, _broken(name, error)]
    worse = any(finding.is_error for finding in found)
    if not worse and upright.width * upright.height > 1 and upright.getcolors(1) is not None:
        found.append(Finding("image_blank", f"{name}: all pixels are {show(upright.getpixel((0, 0)))}"))
    digest = hashlib.blake2b(repr(upright.size).encode(), digest_size=16)
    digest.update(upright.tobytes())
    encoded = hashlib.blake2b(data, digest_size=16).digest()
    return Seen(upright.size, stored, encoded, digest.digest(), look(upright)), found


def _of_values(data: bytes, name: str) -> list[Finding]:
    """What only pixels tell of images that are not plain RGB or grey: values that are cut off, and transparency."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.mode in ("RGB", "L", "1", "CMYK", "YCbCr") and not image.has_transparency_data:
            return []
        image.load()
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            low, high = (float(value) for value in image.getextrema())  # type: ignore[arg-type]
            cut = high > 255 or low < 0 or (image.mode == "F" and high <= 1 and high > low)
            reason = f"{name} has values from {low:g} to {high:g} (mode {image.mode})"
            return [Finding("image_deep", reason)] if cut else []
        if not image.has_transparency_data:
            return []
        alpha = ImageOps.exif_transpose(image).convert("RGBA").getchannel("A")
    histogram = alpha.histogram()
    hidden = 1 - histogram[255] / sum(histogram)
    if histogram[0] == sum(histogram):
        return [Finding("image_invisible", f"{name}: every pixel is transparent")]
    if hidden > 0:
        return [Finding("image_transparent", f"{name}: {hidden:.1%} of the pixels are not opaque")]
    return []


def _broken(name: str, error: BaseException) -> Finding:
    text = str(error)
    if isinstance(error, Image.DecompressionBombError):
        return Finding("image_bomb", f"{name}: {text}")
    cut = "truncated" in text.lower() or "not processed" in text or "unexpected end" in text.lower()
    return Finding("image_truncated" if cut else "image_damaged", f"{name} cannot be decoded: {text}")
