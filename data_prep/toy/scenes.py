"""A procedural scene: six small coloured shapes on a noisy background, one of them the subject of a question.

Which one is shown by a red box, which the *view* draws (``STUDENT_VIEW``), not the scene. The teacher sees the same
marked image, cut out around the box and enlarged (``TEACHER_VIEW``): both need one skill, "read the colour in the red
box", and the cut-out makes it easy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

QUESTION = "What colour is the object in the red box?"

#: No red: the red box is the only red thing in the image.
COLOURS = {
    "green": (40, 160, 50),
    "blue": (30, 80, 205),
    "yellow": (240, 220, 30),
    "purple": (140, 60, 180),
    "orange": (255, 140, 0),
    "cyan": (30, 200, 220),
    "pink": (255, 130, 190),
}

BOX_WIDTH = 2
STUDENT_VIEW = {"kind": "redbox", "width": BOX_WIDTH, "expand": 0.0}
#: A cut-out of 48 px, twice enlarged to 96 px, with the red box in it.
TEACHER_VIEW = [STUDENT_VIEW, {"kind": "crop", "zoom": 2.0, "padding": 0.25, "min_size": 48}]

SIDE = 192
OBJECTS = 6
#: Object sides in pixels. Even, so that the 48 px cut-out centres on whole pixels and every crop has the same size.
OBJECT_SIDES = (10, 12, 14, 16)
BOX_MARGIN = 4
#: Background between two objects, and between an object and the image's edge: room for the red box of either.
CLEARANCE = BOX_MARGIN + BOX_WIDTH + 2

COLOUR_JITTER = 12
NOISE_GRAIN = 2
NOISE_AMPLITUDE = 16

Rectangle = tuple[int, int, int, int]


@dataclass(frozen=True)
class SceneObject:
    colour: str
    #: Tight box in pixels: x0, y0, x1, y1 with exclusive right and bottom edges.
    box: Rectangle


@dataclass(frozen=True)
class Scene:
    #: RGB, ``SIDE`` x ``SIDE``, without the red box.
    image: Image.Image
    #: The subject's tight box plus ``BOX_MARGIN`` on each side; right and bottom edges exclusive.
    bbox: Rectangle
    #: The subject's colour name.
    answer: str
    #: All objects; the subject is the first one.
    objects: tuple[SceneObject, ...]


def scene_rng(stream: str, seed: int, index: int) -> random.Random:
    """The random source of one scene. Streams of different names share no scenes; a scene depends on no other one."""
    return random.Random(f"toy/{stream}/{seed}/{index}")


def make_scene(rng: random.Random) -> Scene:
    """Draw one scene; the same state of ``rng`` gives the same pixels."""
    image = _background(rng)
    draw = ImageDraw.Draw(image)
    objects = [SceneObject(rng.choice(list(COLOURS)), box) for box in _place(rng)]
    for thing in objects:
        _draw(draw, thing, rng)
    x0, y0, x1, y1 = objects[0].box
    bbox = (x0 - BOX_MARGIN, y0 - BOX_MARGIN, x1 + BOX_MARGIN, y1 + BOX_MARGIN)
    return Scene(image, bbox, objects[0].colour, tuple(objects))


def _background(rng: random.Random) -> Image.Image:
    """A light colour with grey noise. The grain is coarse so that the PNG stays small."""
    cells = SIDE // NOISE_GRAIN
    # Noise from randbytes, not from numpy: its stream is the same in every version.
    noise = Image.frombytes("L", (cells, cells), rng.randbytes(cells * cells)).resize(
        (SIDE, SIDE), Image.Resampling.NEAREST
    )
    levels = 2 * NOISE_AMPLITUDE + 1
    bands = []
    for _ in range(3):
        darkest = rng.randint(190, 235) - NOISE_AMPLITUDE
        bands.append(noise.point([min(255, darkest + value * levels // 256) for value in range(256)]))
    return Image.merge("RGB", bands)


def _place(rng: random.Random) -> list[Rectangle]:
    """Boxes of ``OBJECTS`` objects, anywhere in the image, at least ``CLEARANCE`` apart."""
    boxes: list[Rectangle] = []
    while len(boxes) < OBJECTS:
        side = rng.choice(OBJECT_SIDES)
        x = rng.randint(CLEARANCE, SIDE - CLEARANCE - side)
        y = rng.randint(CLEARANCE, SIDE - CLEARANCE - side)
        box = (x, y, x + side, y + side)
        if not any(_near(box, other) for other in boxes):
            boxes.append(box)
    return boxes


def _near(a: Rectangle, b: Rectangle) -> bool:
    """Whether less than ``CLEARANCE`` pixels separate the boxes along both axes."""
    apart_x = max(a[0], b[0]) - min(a[2], b[2])
    apart_y = max(a[1], b[1]) - min(a[3], b[3])
    return max(apart_x, apart_y) < CLEARANCE


def _draw(draw: ImageDraw.ImageDraw, thing: SceneObject, rng: random.Random) -> None:
    rgb = tuple(min(255, max(0, v + rng.randint(-COLOUR_JITTER, COLOUR_JITTER))) for v in COLOURS[thing.colour])
    x0, y0, x1, y1 = thing.box
    shape = rng.choice((draw.ellipse, draw.rectangle))
    # ImageDraw's right and bottom edges are inclusive.
    shape((x0, y0, x1 - 1, y1 - 1), fill=rgb)
