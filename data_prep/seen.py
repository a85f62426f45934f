"""Images that decoded before: what makes a run that was killed, or stopped at a bad row, go on where it was.

Kept by the content of the encoded file, so that it holds whatever else has changed: rows are read again, pixels are not.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Self

from data_prep.images import Facts, check_decodes

#: In the output folder, until a run ends well. A change of what is checked needs another number.
NAME = ".decoded-images-2"
RECORD = struct.Struct("<16sIIB16s32s")  # hash of the file, width, height, orientation, digest of the pixels, look
CHECKSUM = struct.Struct("<I")


class DecodedImages:
    """The facts of images by their encoded bytes, in a file that is appended to. Safe to use from several threads.

    Args:
        path: The file; None remembers for this run only.
        base: What another one knew already: not in :meth:`records`.
    """

    def __init__(self, path: Path | None = None, base: Mapping[bytes, bytes] | None = None):
        self.path = path
        self._base = base or {}
        self._known: dict[bytes, bytes] = {}
        self._file: BinaryIO | None = None
        self._lock = Lock()

    def __enter__(self) -> Self:
        if self.path is not None:
            self._load(self.path)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __len__(self) -> int:
        return len(self._known)

    def records(self) -> list[bytes]:
        """What was found out by this one, to be sent back."""
        return [key + record for key, record in self._known.items()]

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process it goes as what it knows."""
        return DecodedImages, (None, {**self._base, **self._known})

    def _load(self, path: Path) -> None:
        length = RECORD.size + CHECKSUM.size
        if not path.exists():
            return
        with path.open("r+b") as file:
            sound = 0
            while len(record := file.read(length)) == length:
                if CHECKSUM.pack(zlib.crc32(record[: RECORD.size])) != record[RECORD.size :]:
                    break
                self._known[record[:16]] = record[16 : RECORD.size]
                sound += length
            file.truncate(sound)  # what a kill has torn

    def facts(self, data: bytes, field: str, name: str | None) -> Facts:
        """As :func:`data_prep.images.check_decodes`, which is asked only about an image that is new.

        Raises:
            RowFault: It does not decode.
        """
        key = hashlib.blake2b(data, digest_size=16).digest()
        known = self._known.get(key) or self._base.get(key)
        if known is None:
            found = check_decodes(data, field, name)
            self.remember([RECORD.pack(key, *found.size, found.orientation, found.digest, found.look)])
            return found
        _, width, height, orientation, digest, look = RECORD.unpack(key + known)
        return Facts((width, height), orientation, digest, look if any(look) else b"")  # no look is 256 zeros

    def remember(self, records: Iterable[bytes]) -> None:
        """Add what was found out here, or on another machine: what :meth:`records` gave there."""
        with self._lock:
            for record in records:
                if record[:16] not in self._known:
                    self._known[record[:16]] = record[16:]
                    if self._file is not None:
                        self._file.write(record + CHECKSUM.pack(zlib.crc32(record)))

    def forget(self) -> None:
        """Remove the file: the run ended well."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
