"""Images of a source: read from inside one root only, decoded to the last row, and named by their content.

Nothing that a row says makes a file outside the root open, an address load, or a decoder start another program.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image, UnidentifiedImageError

from data_prep.looks import look
from data_prep.rows import DataError, RowFault, image_field, show
from opd_recipes.images import MAX_ENCODED_BYTES, decode
from opd_recipes.view_steps import ViewError

#: Formats that PIL reads by itself; others (EPS) would start a program. Not each build of PIL has all of these.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
ORIENTATION = 0x0112  # the EXIF tag
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,")


@dataclass(frozen=True)
class Facts:
    """What is known of an image that decodes.

    Attributes:
        size: Width and height in pixels as stored, before the EXIF orientation is applied.
        orientation: The EXIF orientation, 1 to 8.
        digest: Of the pixels that training sees: the same for the same picture in another lossless encoding.
        look: Nearly the same for the same picture in a lossy encoding or another size (:mod:`data_prep.looks`).
    """

    size: tuple[int, int]
    orientation: int
    digest: bytes
    look: bytes = b""

    @property
    def upright_size(self) -> tuple[int, int]:
        width, height = self.size
        return (height, width) if self.orientation >= 5 else (width, height)


class SourceRoot:
    """The folder, or the remote address that the user named, that image paths are relative to.

    Args:
        root: A local folder, or an address that fsspec opens (``s3://bucket/folder``, ``hf://datasets/name``).
        allow_outside: Let rows name local files anywhere. Meant for one's own files only.

    Raises:
        DataError: The address is of no kind that is installed.
    """

    def __init__(self, root: str | Path, allow_outside: bool = False):
        self.root = root
        self.allow_outside = allow_outside
        self._remote: Any = None
        if str(root).startswith("file://"):
            self.root = str(root).removeprefix("file://")
        elif "://" in str(root):
            import fsspec

            try:
                self._remote, self._prefix = fsspec.core.url_to_fs(str(root))
            except (ImportError, ValueError, OSError) as error:
                raise DataError(f"{root} cannot be opened ({error}); install what fsspec needs for it") from error

    def read(self, entry: Any, field: str) -> tuple[bytes, str | None]:
        """The encoded bytes of one entry of a row's images, and its name.

        Args:
            entry: A path, ``{"bytes": ..., "path": ...}``, bytes, an image in base64 as a data URL, or a PIL image.
            field: What the source calls it, for messages.

        Raises:
            RowFault: It is none of these, leaves the root, or cannot be read.
        """
        if isinstance(entry, dict):
            data, name = entry.get("bytes"), entry.get("path")
            if data is not None:
                return self.read(data, field)[0], name if isinstance(name, str) else None
            entry = name
        if isinstance(entry, bytes):
            return entry, None
        if isinstance(entry, Image.Image):
            buffer = io.BytesIO()
            entry.save(buffer, format="PNG")
            return buffer.getvalue(), None
        if not isinstance(entry, str) or not entry:
            raise RowFault(f"'{field}' has the entry {show(entry)}; it must be the path or the bytes of an image")
        if start := DATA_URL.match(entry):
            return _from_base64(entry[start.end() :], field), None
        if ADDRESS.match(entry):
            raise RowFault(
                f"'{field}' names {entry!r:.200}; addresses are not fetched: copy the images, and name them by path"
            )
        return (self._read_remote(entry, field) if self._remote else self._read_local(entry, field)), entry

    def _read_local(self, name: str, field: str) -> bytes:
        root = Path(self.root)
        return read_inside(root, name, field) if not self.allow_outside else _read_file(root / name, name, field)

    def _read_remote(self, name: str, field: str) -> bytes:
        check_inside(name, field)
        try:  # the file system of the root reads a path, so a row cannot name another address
            data = self._remote.cat_file(f"{self._prefix.rstrip('/')}/{name}")
        except FileNotFoundError as error:
            raise RowFault(f"'{field}' names {name!r}, which {self.root} does not have; mend the path") from error
        except Exception as error:  # each file system has errors of its own
            raise RowFault(f"'{field}' names {name!r}, which cannot be read from {self.root} ({error})") from error
        return data


def read_inside(root: Path, name: str, field: str) -> bytes:
    """The bytes of a file that lies inside ``root``, links followed.

    Raises:
        RowFault: The path leaves the folder, or there is no file that can be read.
    """
    check_inside(name, field)
    try:
        inside = (root / name).resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a name that is none
        raise _unreadable(name, field, error) from error
    if not inside:
        raise RowFault(
            f"'{field}' names {name!r}, a link that leaves the source folder; copy the files themselves into it "
            "(for a download from a hub: into a local folder, not the hub's cache)"
        )
    return _read_file(root / name, name, field)


def check_inside(name: str, field: str) -> None:
    """Refuse a path that leaves its folder by what it says; links are looked at when it is opened.

    Raises:
        RowFault: It does.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise RowFault(f"'{field}' names {name!r}, which leaves the source folder; use a path inside it, without '..'")


def _read_file(path: Path, name: str, field: str) -> bytes:
    try:
        found = path.resolve().is_file()  # no pipe, no device: those may never end
        if found and path.stat().st_size <= MAX_ENCODED_BYTES:
            return path.read_bytes()
    except (OSError, RuntimeError, ValueError) as error:
        raise _unreadable(name, field, error) from error
    if found:
        raise RowFault(f"'{field}' names {name!r}, which is larger than {MAX_ENCODED_BYTES >> 20} MB; is it an image?")
    raise RowFault(f"'{field}' names {name!r}, but there is no such file; unpack the set's images or remove the row")


def _unreadable(name: str, field: str, error: Exception) -> RowFault:
    cause = getattr(error, "strerror", None) or error
    return RowFault(f"'{field}' names {name!r}, which cannot be read ({cause}); mend the path or its rights")


def _from_base64(text: str, field: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowFault(f"'{field}' has an image whose base64 is damaged ({error}); write it again") from error


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def check_decodes(data: bytes, field: str, name: str | None) -> Facts:
    """Decode an image to its last row.

    Raises:
        RowFault: It is damaged, empty, too large or no image.
    """
    what = f"'{field}' names {name!r}, which" if name else f"'{field}' has an image which"
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            size, orientation = image.size, int(image.getexif().get(ORIENTATION, 1))
        # What training does with it, so that it cannot fail there.
        upright = decode({"bytes": data})
        return Facts(size, orientation if 1 <= orientation <= 8 else 1, _digest(upright), look(upright))
    except UnidentifiedImageError as error:
        pointer = data.startswith(b"version https://git-lfs")
        hint = "fetch it with git lfs pull" if pointer else "download it again, or convert it to PNG or JPEG"
        raise RowFault(f"{what} is damaged or no image ({len(data)} bytes); {hint}") from error
    except Image.DecompressionBombError as error:
        raise RowFault(f"{what} is too large to decode ({error}); scale it down") from error
    except Exception as error:  # a damaged file can raise nearly anything in a decoder
        cause = error.__cause__ if isinstance(error, ViewError) else error
        raise RowFault(f"{what} cannot be decoded ({cause}); download it again") from error


def _digest(image: Image.Image) -> bytes:
    return hashlib.blake2b(repr(image.size).encode() + image.tobytes(), digest_size=16).digest()


def loaded(root: SourceRoot, entries: list[Any], field: str) -> list[dict[str, Any]]:
    """All images of a row as ``images`` holds them.

    Raises:
        RowFault: As :meth:`SourceRoot.read`.
    """
    return [image_field(*root.read(entry, field)) for entry in entries]
