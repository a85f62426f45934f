"""Images of a source folder: as files, or still in the archives that the folder came with.

From archives only the images that rows name are unpacked, into a hidden folder of the output, until a run ends well. A
file there is called by a digest of its name, so nothing that an archive or a row says decides where anything is written.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO

from tqdm import tqdm

from data_prep.archives import Archive, ArchiveFault, Member, find_archives, of_unknown_kind, read_members
from data_prep.images import check_inside, read_inside
from data_prep.rows import RowFault
from opd_recipes.images import MAX_ENCODED_BYTES

FOLDER = ".unpacked-images-1"
CHUNK = 2**20


class SourceImages:
    """Reads images by the names that rows give them. Small, so that it travels.

    Args:
        source: The folder; what lies in it as a file is read there.
        out: The output folder.
    """

    def __init__(self, source: Path, out: Path):
        self.source = source
        self.folder = out / FOLDER
        self._archives: list[Archive] = []
        self._found: dict[str, Path] = {}
        self._first: list[str] = []

    def unpack(self, names: Iterable[str]) -> list[str]:
        """Unpack what ``names`` the folder does not have as files. Goes on where an earlier run was stopped.

        Args:
            names: As rows have them; those that lead out of the folder are passed over.

        Returns:
            Lines to print.

        Raises:
            ArchiveFault: An archive is refused; nothing of any is kept.
        """
        wanted = self._absent(names)
        if not wanted:
            return []
        self._archives = find_archives(self.source)
        try:
            for archive in self._archives:
                self._unpack(archive, wanted)
        except ArchiveFault:
            self.forget()
            raise
        if not self._archives:
            return []
        told = ", ".join(archive.name for archive in self._archives)
        return [f"{len(self._found)} of {len(wanted)} images that are no files were found in {told}"]

    def read(self, name: str, field: str) -> bytes:
        """The encoded bytes of an image.

        Raises:
            RowFault: The name leads out of the folder, or it is neither there nor in an archive.
        """
        path = self._found.get(_plain(name))
        if path is not None:
            return path.read_bytes()
        try:
            return read_inside(self.source, name, field)
        except RowFault as fault:
            hint = self._hint()
            if not hint or "no such file" not in str(fault):
                raise
            raise RowFault(f"'{field}' names {name!r}, which is neither a file nor in an archive ({hint})") from fault

    def forget(self) -> None:
        """Remove what was unpacked: the rows hold it, or it is not to be trusted."""
        self._found.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _hint(self) -> str:
        seen = [
            f"{archive.name} begins with {first!r:.100}"
            for archive, first in zip(self._archives, self._first, strict=False)
        ]
        unread = of_unknown_kind(self.source)
        return "; ".join([*seen, *([f"{', '.join(unread)}: unpack such archives yourself"] if unread else [])])

    def _absent(self, names: Iterable[str]) -> set[str]:
        absent = set()
        for name in names:
            try:
                check_inside(name, "")
                if not (self.source / name).exists():
                    absent.add(_plain(name))
            except (RowFault, OSError, ValueError):  # told when its row is read
                continue
        return absent

    def _unpack(self, archive: Archive, wanted: set[str]) -> None:
        """One archive; a mark is left when all of it was read, and then it is not read again."""
        digest = hashlib.blake2b("\n".join(sorted(wanted)).encode(errors="surrogatepass"), digest_size=16).hexdigest()
        mark = self.folder / f"{archive.key}-{digest}"
        stored = {name: self._path(archive, name) for name in wanted}
        if mark.is_file():
            first = mark.read_text(encoding="utf-8", errors="surrogatepass")
            here = [name for name, path in stored.items() if path.is_file()]
        else:
            first, here = self._read(archive, stored)
        for name in here:
            if name in self._found:
                raise ArchiveFault(f"{name!r:.200} is in {archive.name} and in another archive; remove one of the two")
            self._found[name] = stored[name]
        self._first.append(first)
        self.folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(first, encoding="utf-8", errors="surrogatepass")

    def _read(self, archive: Archive, stored: dict[str, Path]) -> tuple[str, list[str]]:
        """Name of the archive's first file, and which images it has."""
        first, here = "", set()
        progress = tqdm(total=archive.size, desc=f"unpacking {archive.name}", unit="B", unit_scale=True, mininterval=1)
        with progress, read_members(archive) as members:
            for member, content, position in members:
                progress.update(max(0, position - progress.n))
                first = first or member.name
                name = member.name if member.name in stored else f"{archive.stem}/{member.name}"
                if name not in stored:
                    continue
                if name in here:
                    raise ArchiveFault(
                        f"{archive.name}: it has {member.name!r:.200} twice; which is meant is not known"
                    )
                here.add(name)
                if not stored[name].is_file():
                    _store(archive, member, content, stored[name])
        return first, sorted(here)

    def _path(self, archive: Archive, name: str) -> Path:
        key = hashlib.blake2b(f"{archive.key} {name}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
        return self.folder / key[:2] / key


def _plain(name: str) -> str:
    """A row's name without ``.`` and doubled ``/``, as members are called."""
    return str(PurePosixPath(name))


def _store(archive: Archive, member: Member, content: IO[bytes], path: Path) -> None:
    """Write one image; the file appears when it is whole."""
    if member.size > MAX_ENCODED_BYTES:
        raise ArchiveFault(
            f"{archive.name}: {member.name!r:.200} is longer than {MAX_ENCODED_BYTES >> 20} MB; is it an image?"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    written = 0
    try:
        with unfinished.open("wb") as file:
            while data := content.read(CHUNK):
                file.write(data)
                written += len(data)
        if written != member.size:
            raise ArchiveFault(f"{archive.name} breaks off in {member.name!r:.200}; is the download complete?")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
