"""Rows for the checker's tests: a sound one, the many ways in which one can be broken, and odd ones that are right.

A case makes a row from its number and a folder, and names the kinds of faults that must be found: these and no others.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZE = (96, 64)
BOX = [20.0, 12.0, 68.0, 44.0]
QUESTION = "<image>What is in the red box?"
ORIENTATION = 0x0112


def picture(number: int, size: tuple[int, int] = SIZE) -> Image.Image:
    """Noise, another for each number."""
    values = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(values)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def row(number: int, **changes: Any) -> dict[str, Any]:
    """A sound row in the columns of training; ``changes`` replace columns."""
    return {
        "data_source": "test",
        "prompt": asked(QUESTION),
        "images": [entry(encoded(picture(number)))],
        "bbox": BOX,
        "bbox_images": [entry(encoded(picture(number + 10_000)))],
        "ability": "vqa",
        "reward_model": answer("red"),
        "extra_info": {"split": "train", "index": number, "question": "What?", "answer": "red"},
        **changes,
    }


def entry(data: bytes | None, path: str | None = None) -> dict[str, Any]:
    return {"bytes": data, "path": path}


def asked(text: str | None, role: str | None = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": text}]


def answer(text: str | None) -> dict[str, Any]:
    return {"style": "rule", "ground_truth": text}


@dataclass(frozen=True)
class Case:
    name: str
    kinds: frozenset[str]
    make: Callable[[int, Path], dict[str, Any]]


def case(name: str, kinds: str, **changes: Any) -> Case:
    """A row with changed columns."""
    return Case(name, frozenset(kinds.split()), lambda number, _: row(number, **changes))


def imaged(name: str, kinds: str, make: Callable[[Image.Image], bytes], box: list[float] | None = None) -> Case:
    """A row whose image is encoded in another way."""

    def build(number: int, _: Path) -> dict[str, Any]:
        return row(number, images=[entry(make(picture(number)))], bbox=box or BOX)

    return Case(name, frozenset(kinds.split()), build)


def sized(name: str, kinds: str, size: tuple[int, int], box: list[float]) -> Case:
    return Case(
        name,
        frozenset(kinds.split()),
        lambda number, _: row(number, images=[entry(encoded(picture(number, size)))], bbox=box),
    )


def named(name: str, kinds: str, path: Callable[[Path], str]) -> Case:
    """A row whose image is only named."""
    return Case(name, frozenset(kinds.split()), lambda number, folder: row(number, images=[entry(None, path(folder))]))


# Encodings


def with_alpha(alpha: int | None) -> Callable[[Image.Image], bytes]:
    """An opacity for all pixels, or None: half of them transparent."""

    def make(image: Image.Image) -> bytes:
        mask = Image.new("L", image.size, 0 if alpha is None else alpha)
        if alpha is None:
            mask.paste(255, (0, 0, image.width // 2, image.height))
        image = image.copy()
        image.putalpha(mask)
        return encoded(image)

    return make


def palette(transparent: bool) -> Callable[[Image.Image], bytes]:
    def make(image: Image.Image) -> bytes:
        indexed = image.quantize(16)
        return encoded(indexed, transparency=0) if transparent else encoded(indexed)

    return make


def grey_alpha(image: Image.Image) -> bytes:
    grey = image.convert("LA")
    grey.putpixel((3, 3), (7, 0))
    return encoded(grey)


def deep(image: Image.Image) -> bytes:
    return encoded(Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257))


def shallow(image: Image.Image) -> bytes:
    """16 bits a pixel, of which 8 are used."""
    return encoded(Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16)))


def floats(image: Image.Image) -> bytes:
    return encoded(Image.fromarray(np.asarray(image.convert("L")).astype(np.float32) / 255), "TIFF")


def turned(image: Image.Image) -> bytes:
    """Upright 64 x 96, stored as 96 x 64."""
    tags = Image.Exif()
    tags[ORIENTATION] = 6
    return encoded(image, "JPEG", exif=tags)


def animated(kind: str) -> Callable[[Image.Image], bytes]:
    return lambda image: encoded(image, kind, save_all=True, append_images=[image.rotate(180)])


def damaged(image: Image.Image) -> bytes:
    """A PNG whose pixels fail their checksum."""
    data = bytearray(encoded(image))
    at = data.index(b"IDAT")
    length = struct.unpack(">I", data[at - 4 : at])[0]
    data[at + 4 : at + 12] = b"\xff" * 8
    data[at + 4 + length] ^= 0xFF
    return bytes(data)


def bomb(_: Image.Image) -> bytes:
    """A PNG of a few bytes that announces 60000 x 60000 pixels."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def fixed(data: bytes) -> Callable[[Image.Image], bytes]:
    return lambda _: data


# Paths


def missing(folder: Path) -> str:
    return str(folder / "gone.png")


def link_out(folder: Path) -> str:
    secret, link = folder.parent / "secret.png", folder / "link.png"
    picture(1).save(secret)
    if not link.is_symlink():
        link.symlink_to(secret)
    return "link.png"


def pipe(folder: Path) -> str:
    if not (folder / "pipe.png").exists():
        os.mkfifo(folder / "pipe.png")
    return "pipe.png"


def directory(folder: Path) -> str:
    (folder / "folder.png").mkdir(exist_ok=True)
    return "folder.png"


def there(folder: Path) -> str:
    picture(4321).save(folder / "there.png")
    return "there.png"


#: Against the toy's ``vision_opd``: a red box for the student, a crop around the box for the teacher.
BAD_IMAGES = [
    case("no images", "image_missing placeholders", images=[]),
    case("null in the place of images", "image_missing placeholders", images=None),
    case("neither bytes nor path", "image_missing", images=[entry(None)]),
    case("an empty path", "image_missing", images=[entry(None, "")]),
    case("null in the place of an image", "image_missing", images=[None]),
    case("no bytes", "image_empty", images=[entry(b"", "a.png")]),
    imaged("text", "image_unreadable", fixed(b"not an image")),
    imaged(
        "a git-lfs pointer", "image_unreadable", fixed(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    ),
    imaged("a web page", "image_unreadable", fixed(b"<!DOCTYPE html><html><body>404</body></html>")),
    imaged("a PNG of 10 bytes", "image_unreadable", lambda image: encoded(image)[:10]),
    imaged("half a PNG", "image_truncated", lambda image: encoded(image)[:9000]),
    imaged("half a JPEG", "image_truncated", lambda image: encoded(image, "JPEG")[:2000]),
    imaged("half a BMP", "image_truncated", lambda image: encoded(image, "BMP")[:9000]),
    imaged("half a WebP", "image_damaged", lambda image: encoded(image, "WEBP")[:2000]),
    imaged("a PNG with a wrong checksum", "image_damaged", damaged),
    imaged("a decompression bomb", "image_bomb", bomb),
    imaged("EPS, which is a program", "image_format", lambda image: encoded(image, "EPS")),
    imaged("SVG", "image_format", fixed(b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>')),
    imaged("PDF", "image_format", lambda image: encoded(image, "PDF")),
    imaged("HEIC", "image_format", fixed(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")),
    imaged("a video", "image_format", fixed(b"\0\0\0\x20ftypisom\0\0\2\0isomiso2avc1mp41")),
    imaged("a format that is not opened", "image_unreadable", lambda image: encoded(image, "PCX")),
    imaged("16 bits a pixel", "image_deep", deep),
    imaged("floats from 0 to 1", "image_deep", floats),
    imaged("all transparent", "image_invisible", with_alpha(0)),
    imaged("half transparent", "image_transparent", with_alpha(None)),
    imaged("a palette with a transparent colour", "image_transparent", palette(True)),
    imaged("grey with a transparent pixel", "image_transparent", grey_alpha),
    imaged("CMYK", "image_cmyk", lambda image: encoded(image.convert("CMYK"), "JPEG")),
    imaged("an animated GIF", "image_animated", animated("GIF")),
    imaged("an animated WebP", "image_animated", animated("WEBP")),
    imaged("an animated PNG", "image_animated", animated("PNG")),
    imaged("a TIFF with two pages", "image_animated", animated("TIFF")),
    imaged("one colour", "image_blank", lambda _: encoded(Image.new("RGB", SIZE, (9, 9, 9)))),
    named("an address", "image_address", lambda _: "https://example.com/a.png"),
    named("a bucket", "image_address", lambda _: "s3://bucket/a.png"),
    named("a path that is not there", "image_path_missing", missing),
    named("a path with a null character", "image_path_missing", lambda _: "a\0.png"),
    named("a pipe", "image_path_missing", pipe),
    named("a folder", "image_path_missing", directory),
    named("a path out of the folder", "image_outside", lambda _: "../secret.png"),
    named("an absolute path elsewhere", "image_outside", lambda _: "/etc/hostname"),
    named("a device", "image_outside", lambda _: "/dev/zero"),
    named("a link out of the folder", "image_outside", link_out),
    sized("500 to 1", "image_aspect", (4000, 8), [0.0, 0.0, 8.0, 8.0]),
    sized("fewer pixels than the processor's minimum", "image_small", (40, 40), [5.0, 5.0, 30.0, 30.0]),
    sized("a crop below the minimum", "image_small crop_small", (20, 500), [0.0, 100.0, 20.0, 110.0]),
    sized("more pixels than the processor's maximum", "image_shrunk", (400, 300), [50.0, 50.0, 100.0, 100.0]),
]

BAD_BOXES = [
    case("no box", "box_missing", bbox=None),
    case("an empty list", "box_length", bbox=[]),
    case("three numbers", "box_length", bbox=[10.0, 10.0, 20.0]),
    case("five numbers", "box_length", bbox=[10.0, 10.0, 20.0, 20.0, 1.0]),
    case("a null among the numbers", "box_length", bbox=[10.0, 10.0, None, 20.0]),
    case("not a number", "box_not_finite", bbox=[10.0, 10.0, float("nan"), 20.0]),
    case("infinity", "box_not_finite", bbox=[10.0, 10.0, float("inf"), 20.0]),
    case("corners in the wrong order", "box_empty", bbox=[90.0, 50.0, 10.0, 20.0]),
    case("no width, at the right edge", "box_empty", bbox=[96.0, 10.0, 96.0, 60.0]),
    case("x, y, width, height", "box_xywh", bbox=[50.0, 10.0, 20.0, 30.0]),
    case("shares of the sides", "box_normalised", bbox=[0.1, 0.2, 0.5, 0.6]),
    case("the whole image in shares", "box_normalised", bbox=[0.0, 0.0, 1.0, 1.0]),
    case("thousandths of the sides", "box_thousandths", bbox=[100.0, 200.0, 600.0, 800.0]),
    case("over the right edge", "box_outside", bbox=[80.0, 10.0, 120.0, 30.0]),
    case("over the left edge", "box_outside", bbox=[-5.0, 10.0, 30.0, 30.0]),
    case("over the lower edge by rounding", "box_outside", bbox=[10.0, 10.0, 60.0, 64.5]),
    case("far outside", "box_outside", bbox=[2000.0, 2000.0, 2100.0, 2100.0]),
    imaged("a box of the stored orientation", "box_stored_orientation", turned, [60.0, 10.0, 90.0, 40.0]),
    case("the whole image", "box_whole_image", bbox=[0.0, 0.0, 96.0, 64.0]),
    case("nearly the whole image", "box_whole_image", bbox=[1.0, 1.0, 95.0, 63.0]),
    case("two pixels wide", "box_tiny", bbox=[10.0, 10.0, 12.0, 30.0]),
]

BAD_TEXT = [
    case("no prompt", "prompt_missing", prompt=None),
    case("no messages", "prompt_missing", prompt=[]),
    case("a null message", "content_type", prompt=[None]),
    case("no role", "role no_question", prompt=asked(QUESTION, None)),
    case("a role of another format", "role no_question", prompt=asked(QUESTION, "human")),
    case("no content", "content_missing", prompt=asked(None)),
    case("no text behind the image", "question_empty", prompt=asked("<image> \n")),
    case("no placeholder", "placeholders", prompt=asked("What is in the red box?")),
    case("two placeholders for one image", "placeholders", prompt=asked("<image><image>What?")),
    case("a video's placeholder", "other_media", prompt=asked("<image><video>What?")),
    case("an audio's placeholder", "other_media", prompt=asked("<image>What is heard? <audio>")),
    case("an image token of the model", "special_token", prompt=asked("<image>What is <|image_pad|>?")),
    case("the end of a turn", "special_token", prompt=asked("<image>What?<|im_end|>")),
    case("a token of another model", "foreign_token", prompt=asked("<image>What?<|eot_id|>")),
    case("a bell", "control_characters", prompt=asked("<image>What\x07?")),
    case("a null character", "control_characters", prompt=asked("<image>What\0?")),
    case("the mark of a failed decoding", "control_characters", prompt=asked("<image>Wh\ufffdt?")),
    case("a byte order mark", "control_characters", prompt=asked("\ufeff<image>What?")),
    case("a bell in the answer", "control_characters", reward_model=answer("re\x07d")),
    case("the answer as the last message", "no_question", prompt=[*asked(QUESTION), *asked("red", "assistant")]),
    case("a system message alone", "no_question question_empty", prompt=asked("<image>Be brief.", "system")),
    case("more tokens than fit", "prompt_too_long", prompt=asked("<image>" + "What is this? " * 60)),
    case("an answer that no response can give", "answer_too_long", reward_model=answer("one two three four five six")),
    case("no data source", "data_source", data_source=None),
    case("a blank data source", "data_source", data_source=" "),
    case("another spelling of the data source", "data_source_variants", data_source="Test "),
    case("an id that is there already", "duplicate_id", extra_info={"split": "train", "index": 0}),
    case("the image and the question of row 0", "duplicate_row", images=[entry(encoded(picture(0)))]),
    case("the same, encoded anew", "duplicate_row", images=[entry(encoded(picture(0), "WEBP", lossless=True))]),
]

SOUND = [
    case("as it should be", ""),
    case("no answer, which training does not read", "", reward_model=None),
    case("an empty answer", "", reward_model=answer("")),
    case("no extra_info", "", extra_info=None),
    case("a box at the right and lower edge", "", bbox=[56.0, 40.0, 96.0, 64.0]),
    case("a box one pixel from the edge", "", bbox=[1.0, 1.0, 40.0, 40.0]),
    case("a box of fractions of pixels", "", bbox=[10.25, 10.5, 40.75, 40.125]),
    case("a box of the least size", "", bbox=[10.0, 10.0, 14.0, 14.0]),
    case("several images, the box in the last", "", prompt=asked("<image><image>Which differs?"),
         images=[entry(encoded(picture(70_000))), entry(encoded(picture(70_001)))]),
    case("the image of row 0 with another question", "", images=[entry(encoded(picture(0)))], prompt=asked("<image>Why?")),
    case("a placeholder behind the text", "", prompt=asked("What is in this? <image>")),
    case("unicode", "", prompt=asked("<image>ما هذا؟ 这是什么 👩‍👩‍👧 ¿qué?")),
    case("tabs and lines", "", prompt=asked("<image>What?\n\tA. red\r\n\tB. blue")),
    case("angle brackets", "", prompt=asked("<image>Is a <b> or <|x a tag?")),
    case("a system message and an earlier turn", "",
         prompt=[*asked("Be brief.", "system"), *asked(QUESTION), *asked("red", "assistant"), *asked("And now?")]),
    imaged("grey", "", lambda image: encoded(image.convert("L"))),
    imaged("a palette without transparency", "", palette(False)),
    imaged("an opaque alpha channel", "", with_alpha(255)),
    imaged("a black and white scan", "", lambda image: encoded(image.convert("1"))),
    imaged("16 bits a pixel with 8 in use", "", shallow),
    imaged("a progressive JPEG", "", lambda image: encoded(image, "JPEG", progressive=True)),
    imaged("a JPEG with a preview, as cameras make them", "", animated("MPO")),
    imaged("WebP", "", lambda image: encoded(image, "WEBP")),
    imaged("BMP", "", lambda image: encoded(image, "BMP")),
    imaged("AVIF", "", lambda image: encoded(image, "AVIF")),
    imaged("a turned image with a box of the upright one", "", turned, [10.0, 50.0, 50.0, 90.0]),
    named("a path in the file's folder", "", there),
]  # fmt: skip
