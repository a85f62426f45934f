"""The ledger: every finished call, so that a run that is killed and started again pays for none of them twice.

One JSON object a line, appended and on disk (fsync) before the reply is used. A line's ``key`` is the hash of all that the
reply depends on, so that a changed prompt asks again what depends on it and nothing else. No secret is written: a key of a
server is in no line.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from data_prep.rows import DataError
from data_prep.synthesize.replies import Reply

NAME = "ledger.jsonl"


class Ledger:
    """Calls by key. In memory is, for each call, its key and where its line starts; the replies stay in the file.

    Use as a context manager: one process at a time can hold the file.

    Args:
        path: The file; made when it does not exist.

    Raises:
        DataError: Another run holds it, or a line other than an unfinished last one is damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self._starts: dict[str, int] = {}
        self._waiting: list[tuple[str, bytes]] = []
        self._turn = asyncio.Lock()

    def __enter__(self) -> Ledger:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError as error:
            self._file.close()
            raise DataError(f"{self.path}: another run is writing to this folder; wait for it or stop it") from error
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, key: str) -> bool:
        return key in self._starts

    def get(self, key: str) -> Reply:
        """The reply of a finished call.

        Raises:
            KeyError: There is none.
        """
        with self.path.open("rb") as file:
            file.seek(self._starts[key])
            return _reply(json.loads(file.readline()))

    async def append(self, key: str, reply: Reply, **about: Any) -> None:
        """Write a call; return when it is on disk. Calls that finish meanwhile share one fsync.

        Args:
            key: The hash of what the reply depends on.
            reply: What came.
            about: Whatever else helps a person who reads the file.

        Raises:
            DataError, OSError: It could not be written.
        """
        line = json.dumps({"key": key, **about, **asdict(reply)}, ensure_ascii=True, allow_nan=False) + "\n"
        self._waiting.append((key, line.encode()))
        async with self._turn:
            if self._waiting:
                batch, self._waiting = self._waiting, []
                # Shielded: a cancelled waiter must not leave the others' lines unaccounted for.
                await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._write, batch))
        if key not in self._starts:
            raise DataError(f"{self.path}: the call could not be recorded; is the disk full?")

    def _write(self, batch: list[tuple[str, bytes]]) -> None:
        start = self._file.seek(0, os.SEEK_END)
        data = b"".join(line for _, line in batch)
        if self._file.write(data) != len(data):  # the disk is full
            os.ftruncate(self._file.fileno(), start)
            raise DataError(f"{self.path}: the disk is full; free some space and run the same command again")
        os.fsync(self._file.fileno())
        for key, line in batch:
            self._starts[key] = start
            start += len(line)

    def _read(self) -> None:
        """Index the lines; cut off an unfinished last one, which is what a kill in the middle of a write leaves."""
        self._file.seek(0)
        start = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    os.ftruncate(self._file.fileno(), start)
                    break
                try:
                    record = json.loads(line)
                    _reply(record)
                    self._starts[record["key"]] = start
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(
                        f"{self.path}, line {number} is damaged; remove this line (its call is asked again)"
                    ) from error
                start += len(line)


def _reply(record: dict[str, Any]) -> Reply:
    return Reply(**{field.name: record[field.name] for field in fields(Reply)})
