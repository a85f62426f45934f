"""What a picture looks like, in 256 bits that survive lossy encoding and scaling, and an index of many.

A perceptual hash by the discrete cosine transform ("pHash"): the signs of the lowest 16 x 16 frequencies of the brightness,
against their median. A thin box that is drawn on a photograph leaves it near; a crop, a mirrored or a turned picture is
another one to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cache
from typing import Any, Generic, TypeVar

from PIL import Image

SIDE = 16
BITS = SIDE * SIDE
GRID = 64
#: Two pictures with at most so many different bits look the same. Measured: JPEG of quality 40, half size or a palette
#: change at most 20; of 2,000 toy scenes (small shapes on noise), any two differ in 48 or more, of two photographs in ~100.
NEAR = 20
#: At least one band of two near hashes is equal, since there are more bands than bits that differ.
BANDS = NEAR + 1
BAND_BITS = BITS // BANDS
#: Of the hashes that share a band's value, so many are compared: the first, so that a search stays short where thousands do.
#: Copies beyond them are found by the other bands, and by each other through the first.
CROWDED = 256
#: A picture whose brightness varies by less (standard deviation, of 255) has no look: its bits would be noise.
PLAIN = 1.0

Value = TypeVar("Value")


@cache
def _cosines() -> Any:
    """The lowest frequencies of the discrete cosine transform (type II), one in each row."""
    import numpy as np

    frequency, position = np.arange(SIDE)[:, None], np.arange(GRID)[None]
    return np.cos(np.pi * frequency * (2 * position + 1) / (2 * GRID))


def look(image: Image.Image) -> bytes:
    """The hash of an upright RGB image: 32 bytes; none for one without features."""
    import numpy as np

    grid = image.convert("L").resize((GRID, GRID), Image.Resampling.BOX)
    values = np.asarray(grid, dtype=np.float64)
    if values.std() < PLAIN:
        return b""
    waves = (_cosines() @ values @ _cosines().T).ravel()
    waves[0] = 0  # the mean brightness
    return np.packbits(waves > np.median(waves)).tobytes()


def distance(one: bytes, other: bytes) -> int:
    """Bits in which two looks differ."""
    return (int.from_bytes(one) ^ int.from_bytes(other)).bit_count()


class Looks(Generic[Value]):
    """Looks that can be asked for near ones: each is compared with those alone that share a band with it."""

    def __init__(self) -> None:
        import numpy as np

        self._known: dict[bytes, int] = {}
        self._hashes = np.zeros((1024, BITS // 64), np.uint64)
        self._values: list[Value] = []
        self._bands: list[dict[int, array[int]]] = [{} for _ in range(BANDS)]

    def __len__(self) -> int:
        return len(self._values)

    def add(self, one: bytes, value: Value) -> None:
        """Remember a look; the same look again keeps the value that it had. One without features is not kept."""
        import numpy as np

        if not one or one in self._known:
            return
        position = self._known[one] = len(self._values)
        if position == len(self._hashes):
            self._hashes = np.concatenate([self._hashes, np.zeros_like(self._hashes)])
        self._hashes[position] = np.frombuffer(one, np.uint64)
        self._values.append(value)
        for band, part in zip(self._bands, _parts(one), strict=True):
            bucket = band.setdefault(part, array("I"))
            if len(bucket) < CROWDED:
                bucket.append(position)

    def near(self, one: bytes) -> list[tuple[int, Value]]:
        """Distance and value of each look that is at most :data:`NEAR` away, in the order in which they were added."""
        import numpy as np

        if not one:
            return []
        buckets = [band[part] for band, part in zip(self._bands, _parts(one), strict=True) if part in band]
        parts = [np.frombuffer(bucket, np.uint32) for bucket in buckets]
        if one in self._known:
            parts.append(np.array([self._known[one]], np.uint32))
        if not parts:
            return []
        positions = np.concatenate(parts)
        bits = np.bitwise_count(self._hashes[positions] ^ np.frombuffer(one, np.uint64)).sum(axis=1)
        found = dict(zip(positions[bits <= NEAR].tolist(), bits[bits <= NEAR].tolist(), strict=True))
        return [(found[position], self._values[position]) for position in sorted(found)]


def _parts(one: bytes) -> Iterator[int]:
    """The value of each band."""
    key = int.from_bytes(one)
    for band in range(BANDS):
        yield key >> band * BAND_BITS & (1 << BAND_BITS) - 1
