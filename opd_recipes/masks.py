"""View steps that hide pixels: masks of a part of the image, blank and noise images.

They make negative teachers (OPD-V, arXiv 2608.05131; EAD, arXiv 2609.34672) and controls. Size and box pass through
unchanged. A random choice is made from a seed, ``rng`` says which:

- ``fixed``: the generator starts from ``seed`` for every image, so images of one shape have the same mask;
- ``per_sample``: from ``seed`` and the image's own pixels, so each image has its own mask, the same one every time.
"""

from __future__ import annotations

import hashlib
import math
import random

from PIL import Image, ImageFilter, ImageStat

from opd_recipes.view_steps import (
    EDGE,
    VIEWS,
    Box,
    Color,
    ViewError,
    check_box,
    check_color,
    check_positive,
    check_share,
)

#: Width over height of a random rectangle lies between these (OPD-V).
ASPECTS = (0.5, 2.0)

BLACK = (0, 0, 0)


@VIEWS.register("mask_rectangle")
def mask_rectangle(
    image: Image.Image,
    box: Box | None,
    *,
    area: float = 1 / 3,
    rng: str = "fixed",
    seed: int = 42,
    color: Color = BLACK,
) -> tuple[Image.Image, Box | None]:
    """Fill one random rectangle, the negative teacher of OPD-V; its released code re-seeds on every call, as ``fixed`` does.

    Args:
        area: The rectangle's share of the image, above 0 and up to 1. A side that would be longer than the image's is
            cut to it, so in long images the rectangle can be smaller.
        rng, seed: See the module.
        color: RGB.
    """
    place = _random_rectangle(image.size, area, _generator(image, rng, seed))
    masked = image.copy()
    masked.paste(check_color(color), place)
    return masked, box


@VIEWS.register("mask_blur")
def mask_blur(image: Image.Image, box: Box | None, *, radius: float = 15.0) -> tuple[Image.Image, Box | None]:
    """Blur the whole image with a Gaussian of ``radius`` pixels (its standard deviation)."""
    check_positive(radius=radius)
    return image.filter(ImageFilter.GaussianBlur(radius)), box


@VIEWS.register("mask_blurred_rectangles")
def mask_blurred_rectangles(
    image: Image.Image,
    box: Box | None,
    *,
    count: int = 3,
    area: float = 1 / 9,
    radius: float = 15.0,
    rng: str = "fixed",
    seed: int = 42,
) -> tuple[Image.Image, Box | None]:
    """Show random rectangles as :func:`mask_blur` would; they may overlap.

    Args:
        count: Number of rectangles.
        area: Share of the image of each; OPD-V does not say it. The default hides at most what ``mask_rectangle`` does.
        radius: Of the blur, in pixels.
        rng, seed: See the module.
    """
    check_positive(count=count)
    blurred, _ = mask_blur(image, box, radius=radius)
    generator = _generator(image, rng, seed)
    masked = image.copy()
    for _ in range(count):
        place = _random_rectangle(image.size, area, generator)
        masked.paste(blurred.crop(place), place)
    return masked, box


@VIEWS.register("mask_patches")
def mask_patches(
    image: Image.Image,
    box: Box | None,
    *,
    patch: int = 14,
    low: float = 0.3,
    high: float = 0.6,
    rng: str = "fixed",
    seed: int = 42,
    color: Color = BLACK,
) -> tuple[Image.Image, Box | None]:
    """Fill a random share of the cells of a grid (OPD-V: cells of 14 pixels, a share between 0.3 and 0.6).

    Args:
        patch: Side of a cell in pixels; the grid starts at the top left, its last column and row may be cut off.
        low, high: The share of cells that are filled is drawn uniformly between these.
        rng, seed: See the module.
        color: RGB.
    """
    check_positive(patch=patch)
    check_share(low=low, high=high)
    if low > high:
        raise ViewError(f"low must not be above high, got low={low} and high={high}")
    columns, rows = math.ceil(image.width / patch), math.ceil(image.height / patch)
    generator = _generator(image, rng, seed)
    cells = bytearray(columns * rows)
    for cell in generator.sample(range(len(cells)), round(generator.uniform(low, high) * len(cells))):
        cells[cell] = 255
    grid = Image.frombytes("L", (columns, rows), bytes(cells))
    grid = grid.resize((columns * patch, rows * patch), Image.Resampling.NEAREST)
    masked = image.copy()
    masked.paste(check_color(color), (0, 0, *image.size), grid.crop((0, 0, *image.size)))
    return masked, box


@VIEWS.register("mask_box")
def mask_box(
    image: Image.Image, box: Box | None, *, fill: str = "black", width: int = 10
) -> tuple[Image.Image, Box | None]:
    """Fill the evidence box: every pixel that it touches.

    Before a ``crop`` it hides the box in the image; behind one it fills the box where the crop has moved it, which is the
    same but for the pixels around the edge that the enlargement has mixed.

    Args:
        fill: ``black``, or ``mean_around``: the mean colour of a frame around the box (EAD), within the image.
        width: Width of that frame in pixels; EAD does not say it.
    """
    check_positive(width=width)
    x0, y0, x1, y1 = check_box(box, image.size)
    place = (math.floor(x0 + EDGE), math.floor(y0 + EDGE), math.ceil(x1 - EDGE), math.ceil(y1 - EDGE))
    if fill == "black":
        color = BLACK
    elif fill == "mean_around":
        color = _mean_around(image, place, width)
    else:
        raise ViewError(f"fill: unknown value {fill!r}; known: black, mean_around")
    masked = image.copy()
    masked.paste(color, place)
    return masked, box


@VIEWS.register("blank")
def blank(image: Image.Image, box: Box | None, *, color: Color = (127, 127, 127)) -> tuple[Image.Image, Box | None]:
    """One colour in the image's size: a view that says nothing."""
    return Image.new("RGB", image.size, check_color(color)), box


@VIEWS.register("noise")
def noise(image: Image.Image, box: Box | None, *, seed: int = 42) -> tuple[Image.Image, Box | None]:
    """Uniform random RGB in the image's size, each image its own: a control whose teacher must bring about nothing."""
    data = _generator(image, "per_sample", seed).randbytes(3 * image.width * image.height)
    return Image.frombytes("RGB", image.size, data), box


def _generator(image: Image.Image, rng: str, seed: int) -> random.Random:
    if rng == "fixed":
        return random.Random(seed)
    if rng != "per_sample":
        raise ViewError(f"rng: unknown value {rng!r}; known: fixed, per_sample")
    digest = hashlib.blake2b(repr((seed, image.size)).encode(), digest_size=8)
    digest.update(image.tobytes())
    return random.Random(int.from_bytes(digest.digest(), "big"))


def _random_rectangle(size: tuple[int, int], area: float, generator: random.Random) -> tuple[int, int, int, int]:
    """A rectangle of ``area`` of the image, aspect and place uniform, at least a pixel: x0, y0, x1, y1, inside it."""
    if not 0 < area <= 1:
        raise ViewError(f"area must be above 0 and at most 1, got {area}")
    aspect = generator.uniform(*ASPECTS)
    pixels = area * size[0] * size[1]
    width = min(max(1, round(math.sqrt(pixels * aspect))), size[0])
    height = min(max(1, round(math.sqrt(pixels / aspect))), size[1])
    x, y = (round(generator.random() * free) for free in (size[0] - width, size[1] - height))
    return x, y, x + width, y + height


def _mean_around(image: Image.Image, place: tuple[int, int, int, int], width: int) -> Color:
    """The mean colour of the pixels that are at most ``width`` from ``place`` but not in it."""
    x0, y0, x1, y1 = place
    outer = (max(x0 - width, 0), max(y0 - width, 0), min(x1 + width, image.width), min(y1 + width, image.height))
    if outer == place:
        raise ViewError(
            f"fill=mean_around: the box {list(place)} covers the whole image of {image.width} x {image.height} pixels, so "
            "nothing is around it; use fill=black, or a crop with padding"
        )
    surroundings = image.crop(outer)
    frame = Image.new("L", surroundings.size, 255)
    frame.paste(0, (x0 - outer[0], y0 - outer[1], x1 - outer[0], y1 - outer[1]))
    red, green, blue = (round(mean) for mean in ImageStat.Stat(surroundings, frame).mean)
    return red, green, blue
