"""Where a row's images are read from, and how one is decoded.

A row holds an image's bytes, or names it: by a path or by an address of a remote file system (``s3://``, ``gs://``,
``hf://``, ...). A row is data that somebody else may have written, so it can only name what lies in folders that the user
has named: the folder of the row's file, or ``data.image_root``.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from urllib.parse import unquote

from PIL import Image, ImageOps, UnidentifiedImageError

from opd_recipes.views import Box, View, ViewError

#: The longest encoded image that is read by name; longer ones are no images, or too large to train on.
MAX_ENCODED_BYTES = 512 * 2**20

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True)
class ImageRoot:
    """The folders in which rows may name images. Relative paths start at the first. Small, so that it travels with a row.

    Args:
        folders: Absolute local folders, or addresses of remote ones; none: only images in bytes can be read.
    """

    folders: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: str | os.PathLike[str], setting: str | Sequence[str] | None = None) -> ImageRoot:
        """What rows of ``file`` may name.

        Args:
            file: The rows' file, a path or an address.
            setting: ``data.image_root``: a folder or several, in the place of the file's own.
        """
        if not setting:
            return cls((_folder(os.path.dirname(_local(os.fspath(file)))),))
        return cls(tuple(_folder(_local(folder)) for folder in ([setting] if isinstance(setting, str) else setting)))

    def open(self, name: str) -> BinaryIO:
        """The encoded image that a row names.

        Raises:
            ViewError: It lies outside the folders, or cannot be read.
        """
        address = self.find(name)
        try:
            return _open_remote(address) if _ADDRESS.match(address) else _open_local(address)
        except Exception as error:  # each remote file system has errors of its own
            cause = getattr(error, "strerror", None) or error or type(error).__name__
            raise ViewError(f"{name!r:.200} cannot be read: {cause} ({address:.200})") from error

    def find(self, name: str) -> str:
        """The absolute path, or the remote address, of what a row names; nothing is read but links on the way.

        Raises:
            ViewError: It lies outside the folders.
        """
        if not self.folders:
            raise ViewError(f"{name!r:.200} cannot be read: no folder is named from which images may be read")
        address, start = _local(name), self.folders[0]
        if not _ADDRESS.match(address) and _ADDRESS.match(start) and not address.startswith("/"):
            address = f"{start.rstrip('/')}/{address}"
        if _ADDRESS.match(address):
            return self._check_remote(name, address)
        try:
            path = os.path.realpath(os.path.join(start, address))  # links followed: a link may not lead out either
        except (OSError, ValueError) as error:
            raise ViewError(f"{name!r:.200} cannot be read: {error}") from error
        allowed = [os.path.realpath(folder) for folder in self.folders if not _ADDRESS.match(folder)]
        if not any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in allowed):
            raise ViewError(
                f"{name!r:.200} cannot be read: it leads to {path}, outside {' and '.join(self.folders)}. If rows may read "
                "there, name the folder in data.image_root (a list: the first is where relative paths start)"
            )
        return path

    def _check_remote(self, name: str, address: str) -> str:
        parts = re.split(r"[/\\]", unquote(address.split("://", 1)[1]))
        if "::" in address or ".." in parts or "." in parts:  # "::" chains file systems in fsspec
            raise ViewError(f"{name!r:.200} cannot be read: an address may have no '..', '.' or '::'")
        if not any(address.startswith(folder.rstrip("/") + "/") for folder in self.folders):
            raise ViewError(
                f"{name!r:.200} cannot be read: rows may read from {' and '.join(self.folders)} alone, and nothing else is "
                f"fetched. If this is right, name the folder in data.image_root, e.g. {address.rsplit('/', 1)[0]:.200}"
            )
        return address


def _local(name: str) -> str:
    return name.removeprefix("file://")


def _folder(name: str) -> str:
    return name if _ADDRESS.match(name) else os.path.abspath(os.path.expanduser(name))


def _open_local(path: str) -> BinaryIO:
    if not os.path.isfile(path):  # a pipe would hang, a device never ends
        raise FileNotFoundError("a folder or a device, not a file" if os.path.exists(path) else "no such file")
    return open(path, "rb")


def _open_remote(address: str) -> BinaryIO:
    """Read as a whole: decoders seek, and each seek would be a request."""
    from fsspec.core import url_to_fs

    system, path = url_to_fs(address)
    with system.open(path, "rb") as file:
        data = file.read(MAX_ENCODED_BYTES + 1)
    if len(data) > MAX_ENCODED_BYTES:
        raise ValueError(f"it is longer than {MAX_ENCODED_BYTES // 2**20} MiB")
    return io.BytesIO(data)


def decode(source: Any, root: ImageRoot | None = None) -> Image.Image:
    """Open one image (``{"bytes": ...}``, ``{"path": ...}`` or a path) as upright RGB; transparency turns white.

    Args:
        source: The image. Where it has bytes, its path is only a name.
        root: The folders in which it may be named; None where the caller has chosen the local path itself.

    Raises:
        ViewError: It is missing, may not be read, is not an image, or is damaged.
    """
    stream = encoded(source, root)
    try:
        with Image.open(stream) as opened:
            if opened.format == "EPS":
                raise ValueError("EPS is a program, which is not run; convert it to PNG")
            image: Image.Image = ImageOps.exif_transpose(opened)
            if image.has_transparency_data:
                image = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
            return image.convert("RGB")
    except Exception as error:  # a damaged file can raise nearly anything in a decoder
        raise ViewError(f"{_name(source)} cannot be read as an image: {_cause(error)}") from error
    finally:
        stream.close()


def pixels(source: Any, root: ImageRoot | None = None) -> int:
    """Width times height of an image, from its header alone.

    Raises:
        ViewError: As :func:`decode`.
    """
    stream = encoded(source, root)
    try:
        with Image.open(stream) as image:
            return image.width * image.height
    except Exception as error:  # as above
        raise ViewError(f"{_name(source)} cannot be read as an image: {_cause(error)}") from error
    finally:
        stream.close()


def encoded(source: Any, root: ImageRoot | None = None) -> BinaryIO:
    """The encoded image behind what a row holds; close it.

    Raises:
        ViewError: It has neither bytes nor a path, may not be read, or is not there.
    """
    data = source.get("bytes") if isinstance(source, dict) else None
    if data is not None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ViewError(f"an image's bytes are {type(data).__name__}: {data!r:.80}")
        return io.BytesIO(data)
    path = source.get("path") if isinstance(source, dict) else source
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ViewError(f"an image has neither bytes nor a path: {source!r:.80}")
    if root is not None:
        return root.open(os.fspath(path))
    try:
        return _open_local(os.fspath(path))
    except (OSError, ValueError) as error:
        raise ViewError(f"{_name(source)} cannot be read: {error}") from error


def _cause(error: Exception) -> object:
    # PIL's message names an object in memory.
    return "it is none, or its start is damaged" if isinstance(error, UnidentifiedImageError) else error


def _name(source: Any) -> str:
    path = source.get("path") if isinstance(source, dict) else source
    return f"{path!r:.200}" if path else "the image's bytes"


@dataclass
class RowImages:
    """What a row has to see: encoded images, its evidence box, ready-made evidence images. Small enough to travel.

    Args:
        images: Bytes or names, as :func:`opd_recipes.images.decode` takes them.
        box: Evidence box in pixels of the last image.
        evidence: Ready-made evidence images, one for each of ``images``.
        root: The folders in which images may be named; without it, only bytes can be read.
    """

    images: list[Any]
    box: Box | None = None
    evidence: list[Any] = field(default_factory=list)
    root: ImageRoot = ImageRoot()
    _pixels: int | None = field(default=None, init=False, repr=False, compare=False)

    def render(self, view: View) -> list[Image.Image]:
        """Decode and draw one view; several are cheaper by :meth:`rendered`.

        Raises:
            ViewError: An image cannot be decoded, or the view cannot be drawn from this row.
        """
        return dict(self.rendered({"": view}))[""]

    def rendered(self, views: Mapping[str, View]) -> Iterator[tuple[str, list[Image.Image]]]:
        """Draw views one after the other. Each image is decoded once, however many views show it, and kept no longer.

        The box belongs to the last image; the others are shown as they are.

        Args:
            views: Views by name.

        Yields:
            Name and images of each view.

        Raises:
            ViewError: An image cannot be decoded, or a view cannot be drawn from this row.
        """
        decoded: dict[bool, list[Image.Image]] = {}
        for name, view in views.items():
            if view.provided not in decoded:
                decoded[view.provided] = self._evidence() if view.provided else self._images()
            shown, box = decoded[view.provided], None if view.provided else self.box
            yield name, [*shown[:-1], view(shown[-1], box)] if shown else []

    def _images(self) -> list[Image.Image]:
        decoded = [decode(source, self.root) for source in self.images]
        if decoded:
            self._pixels = decoded[-1].width * decoded[-1].height
        return decoded

    def _evidence(self) -> list[Image.Image]:
        if not self.evidence:
            raise ViewError("the view 'provided' needs evidence images, but 'bbox_images' is missing or empty")
        if len(self.evidence) != len(self.images):
            raise ViewError(f"{len(self.evidence)} images in 'bbox_images' for {len(self.images)} in 'images'")
        return [decode(source, self.root) for source in self.evidence]

    def size(self) -> tuple[int, int]:
        """Width and height of the last image."""
        with decode(self.images[-1], self.root) as image:
            return image.size

    def area_ratio(self, views: Mapping[str, list[Image.Image]]) -> float:
        """The evidence's share of the image: of the box, else of the ready-made evidence, else of what the two views show.

        Args:
            views: What :meth:`rendered` gave for ``student`` and ``teacher``.
        """
        student, teacher = views["student"][-1], views["teacher"][-1]
        if self.box is None:
            return teacher.width * teacher.height / (student.width * student.height)
        if self._pixels is None:
            self._pixels = pixels(self.images[-1], self.root)
        x0, y0, x1, y1 = self.box
        return (x1 - x0) * (y1 - y0) / self._pixels
