"""Members of tar and zip archives that nobody vouches for, one after the other. Nothing here writes a file.

An archive is good as a whole or refused as a whole: one that has a path out of its folder, a link or a device was not made
by packing images, and what else it has is not to be trusted either.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import stat
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from data_prep.rows import DataError

MAX_MEMBERS = 5_000_000
#: Unpacked bytes of one archive, and how many times its own size they may be (images hardly compress) beyond ``FREE``.
MAX_UNPACKED = 2**40
MAX_RATIO = 50
FREE = 2**28
#: Bytes of one tar member's headers: tarfile holds them in memory, and they may claim any length.
MAX_HEADER = 2**20
#: Tar is read in blocks of so many bytes.
BLOCK = 20 * 512
#: Others (bzip2, LZMA) unpack any number of bytes at once.
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

ENDING = r"\.(?:tar\.gz|tar|tgz|zip)"
#: images.tar, images.tar.gz.part-aa, images.zip.001, images.tar.ab
NAME = re.compile(
    rf"(?P<whole>.+?{ENDING})(?:\.part[-_]?(?P<named>\d+|[a-z]{{2,3}})|\.(?P<bare>\d+|[a-e][a-z]))?", re.IGNORECASE
)
UNKNOWN = re.compile(r".+\.(tar\.(zst|xz|bz2|lz4)|7z|rar|z\d\d)", re.IGNORECASE)


class ArchiveFault(DataError):
    """An archive cannot be used. The message names it, the member, and the reason."""


@dataclass(frozen=True)
class Archive:
    """One archive, in one file or in several.

    Attributes:
        name: Without a part's ending.
        parts: Its files, in order.
    """

    name: str
    parts: tuple[Path, ...]

    @property
    def size(self) -> int:
        return sum(part.stat().st_size for part in self.parts)

    @property
    def key(self) -> str:
        """Another one for another content, as far as names, sizes and times of change tell."""
        facts = [(part.name, part.stat().st_size, part.stat().st_mtime_ns) for part in self.parts]
        return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()

    @property
    def stem(self) -> str:
        """The name without its ending."""
        return re.sub(f"{ENDING}$", "", self.name, flags=re.IGNORECASE)


@dataclass(frozen=True)
class Member:
    """A regular file of an archive: its name (relative, ``/`` between parts), and its size in bytes."""

    name: str
    size: int


def find_archives(folder: Path) -> list[Archive]:
    """The archives that lie in a folder, split ones joined.

    Raises:
        ArchiveFault: A part is missing, or an archive lies there whole and in parts.
    """
    found: dict[str, dict[str, Path]] = {}
    for file in sorted(folder.iterdir()):
        match = NAME.fullmatch(file.name)
        if match and file.is_file():
            found.setdefault(match["whole"], {})[(match["named"] or match["bare"] or "").lower()] = file
    return [Archive(name, tuple(_in_order(folder / name, parts))) for name, parts in found.items()]


def of_unknown_kind(folder: Path) -> list[str]:
    """Names of what looks like an archive but is not read."""
    return sorted(file.name for file in folder.iterdir() if UNKNOWN.fullmatch(file.name))


def _in_order(name: Path, parts: dict[str, Path]) -> list[Path]:
    """Parts are numbered from 0 or 1, or lettered from aa, without a gap."""
    if set(parts) == {""}:
        return [parts[""]]
    if "" in parts:
        raise ArchiveFault(f"{name} lies there whole and in parts; remove one of the two")
    numbered = {_number(part): file for part, file in parts.items()}
    lettered = {part.isalpha() for part in parts}
    first = 1 if 0 not in numbered and lettered == {False} else 0
    expected = list(range(first, first + len(parts)))
    if len(lettered) > 1 or expected != sorted(numbered):
        raise ArchiveFault(
            f"{name}: its parts are {', '.join(file.name for file in parts.values())}, which are not all from the first "
            "on; is the download complete?"
        )
    return [numbered[number] for number in expected]


def _number(part: str) -> int:
    if part.isdigit():
        return int(part)
    number = 0
    for letter in part:
        number = number * 26 + ord(letter) - ord("a")
    return number


class Joined(io.RawIOBase):
    """Several files as one; can be read and sought, as zip needs it."""

    def __init__(self, parts: Sequence[Path]):
        self._files: list[IO[bytes]] = []
        self._ends: list[int] = []
        self._position = 0
        for part in parts:
            self._files.append(part.open("rb", buffering=0))
            self._ends.append((self._ends or [0])[-1] + part.stat().st_size)

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._ends[-1]}[whence]
        if start + offset < 0:
            raise ValueError(f"position {start + offset}")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        for number, end in enumerate(self._ends):
            if self._position < end:
                start = self._ends[number - 1] if number else 0
                self._files[number].seek(self._position - start)
                data = self._files[number].read(min(len(buffer), end - self._position))
                buffer[: len(data)] = data
                self._position += len(data)
                return len(data)
        return 0


class Volume:
    """Counts what an archive unpacks to, whatever it says of its sizes, and stops at a bomb."""

    def __init__(self, archive: Archive):
        self.archive, self.unpacked = archive.name, 0
        self._packed = archive.size

    def add(self, count: int) -> None:
        """Raises :class:`ArchiveFault` where more is unpacked than images could be."""
        self.unpacked += count
        if self.unpacked > MAX_UNPACKED or self.unpacked > max(FREE, MAX_RATIO * self._packed):
            raise ArchiveFault(
                f"{self.archive}: its {self._packed} bytes unpack to {self.unpacked} and more (at most {MAX_RATIO} times as "
                f"many and {MAX_UNPACKED >> 30} GB are), which images do not; {_BY_HAND}"
            )


_BY_HAND = "if you trust it, unpack it yourself into the source folder"


class Metered:
    """A stream that is counted, and of which no more is read than is allowed."""

    def __init__(self, file: IO[bytes], volume: Volume):
        self._file, self._volume = file, volume
        self._end: int | None = None

    def allow(self, count: int | None) -> None:
        """Until the next call, so many bytes may be read; None: any number."""
        self._end = None if count is None else self._volume.unpacked + count

    def read(self, count: int) -> bytes:
        data = self._file.read(count)
        self._volume.add(len(data))
        if self._end is not None and self._volume.unpacked > self._end:
            raise ArchiveFault(f"{self._volume.archive}: a member's header is longer than {MAX_HEADER >> 10} KB")
        return data


@contextmanager
def read_members(archive: Archive) -> Iterator[Iterator[tuple[Member, IO[bytes], int]]]:
    """Each regular file, its content (to be read before the next is asked for), and how far the archive has been read.

    Raises:
        ArchiveFault: It is damaged or a bomb, or a member is no file or folder, or its name leads out. Also where this
            is found out inside of the ``with`` block, by reading a content.
    """
    with closing(Joined(archive.parts)) as raw:
        try:
            kind = _zip if raw.read(2) == b"PK" else _tar
            raw.seek(0)
            yield ((member, content, raw.tell()) for member, content in kind(archive, raw))
        except ArchiveFault:
            raise
        except OSError as error:
            if error.errno is not None and not isinstance(error, gzip.BadGzipFile):  # of a disk
                raise
            raise _damaged(archive, error) from error
        except Exception as error:  # a damaged archive can raise nearly anything; RecursionError, too
            raise _damaged(archive, error) from error


def _damaged(archive: Archive, error: object) -> ArchiveFault:
    return ArchiveFault(f"{archive.name} is damaged ({error}); is the download complete?")


def _name(archive: Archive, name: str) -> str:
    """A member's name without ``.``, as rows write it.

    Raises:
        ArchiveFault: It leads out of the folder that it would be unpacked into.
    """
    parts = re.split(r"[/\\]", name)
    if not name or name[0] in "/\\" or re.match(r"[A-Za-z]:", name) or ".." in parts or "\0" in name:
        raise _refused(archive, name, "a path out of the folder")
    return "/".join(part for part in parts if part not in ("", "."))


def _refused(archive: Archive, name: str, what: str) -> ArchiveFault:
    return ArchiveFault(
        f"{archive.name}: its member {name!r:.200} is {what}; nothing of such an archive is used: {_BY_HAND}"
    )


_TAR_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
}


class _Strict(tarfile.TarInfo):
    """At a damaged or missing header tarfile would end in silence."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> Self:  # type: ignore[override]
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the mark of the end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error or 'no end'}") from error


def _tar(archive: Archive, raw: Joined) -> Iterator[tuple[Member, IO[bytes]]]:
    start = raw.read(2)
    raw.seek(0)
    buffered: Any = io.BufferedReader(raw, 2**20)
    plain: Any = gzip.GzipFile(fileobj=buffered) if start == b"\x1f\x8b" else buffered
    stream, count = Metered(plain, Volume(archive)), 0
    stream.allow(MAX_HEADER)
    with tarfile.open(fileobj=stream, mode="r|", bufsize=BLOCK, tarinfo=_Strict) as tar:  # type: ignore[call-overload]
        while member := tar.next():
            tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
            stream.allow(None)
            count += 1
            if count > MAX_MEMBERS:
                raise ArchiveFault(f"{archive.name}: it has more than {MAX_MEMBERS} members")
            name = _name(archive, member.name)
            if what := _TAR_KINDS.get(member.type):
                raise _refused(archive, name, what)
            if member.issparse() or not (member.isreg() or member.isdir()):
                raise _refused(archive, name, "neither a plain file nor a folder")
            if member.isreg() and (content := tar.extractfile(member)) is not None:
                yield Member(name, member.size), content
            stream.allow(member.size + MAX_HEADER + BLOCK)  # what is left of it is skipped on the way to the next
    stream.allow(None)
    while stream.read(2**20):  # the checksum of gzip is at the end
        pass


def _zip(archive: Archive, raw: Joined) -> Iterator[tuple[Member, IO[bytes]]]:
    with zipfile.ZipFile(io.BufferedReader(raw, 2**16)) as file:
        members, volume = file.infolist(), Volume(archive)
        if len(members) > MAX_MEMBERS:
            raise ArchiveFault(f"{archive.name}: it has more than {MAX_MEMBERS} members")
        for member in sorted(members, key=lambda member: member.header_offset):
            name = _name(archive, member.orig_filename)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind == stat.S_IFLNK:
                raise _refused(archive, name, "a symbolic link")
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused(archive, name, "a device or a pipe")
            if member.is_dir():
                continue
            if member.flag_bits & 1:
                raise _refused(archive, name, "encrypted")
            if member.compress_type not in METHODS:
                raise _refused(archive, name, f"compressed by method {member.compress_type}, which is not read")
            yield Member(name, member.file_size), _Lazy(file, member, volume)  # type: ignore[misc]


class _Lazy:
    """A zip member that is opened at the first read: those that nobody reads cost nothing."""

    def __init__(self, file: zipfile.ZipFile, member: zipfile.ZipInfo, volume: Volume):
        self._file, self._member, self._volume = file, member, volume
        self._content: IO[bytes] | None = None

    def read(self, count: int) -> bytes:
        if self._content is None:
            self._content = self._file.open(self._member)
        data = self._content.read(count)
        self._volume.add(len(data))
        return data
