"""What a killed run leaves on a host, removed by the next one there: shared memory, and the files of sockets.

A vLLM server with workers of its own (``distributed_executor_backend=mp``, verl's default) holds buffers of some hundred MB
under /dev/shm; NCCL's and torch's are there, too. Whoever made one removes it, unless it is killed, as Ray ends its workers.

A file is removed only where all of this holds:

- a :class:`Keeper` on this host had seen processes of its own run, descendants of the run's raylet, hold it, and has recorded
  it with their numbers and start times;
- none of them lives. That is asked only where they would be visible: same boot, same PID namespace;
- no other process that this user may look into has it mapped or open now;
- it is still the same file (inode), this user's, and its name is of one of the kinds below, which are not for files that stay.

Records lie beside what they describe, in /dev/shm: who does not see the one does not see the other. What was held only between
two looks is not recorded, and stays.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED_MEMORY = Path("/dev/shm")
PROC = Path("/proc")
LOOK_SECONDS = 2.0
#: So long a run that has ended waits for its processes.
END_SECONDS = 5.0
#: Python's segments and semaphores, verl's weights, NCCL's and torch's buffers.
_SEGMENT = re.compile(r"psm_[0-9a-f]+|sem\.mp-\w+|verl_weights_[0-9a-f]+|nccl-\w+|torch_\d+_\d+_\d+")
#: vLLM's, between the processes of a server.
_SOCKET = re.compile(r"/.*/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass
class Removed:
    """What :func:`remove` has removed."""

    segments: int = 0
    sockets: int = 0
    bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.segments or self.sockets)

    def __str__(self) -> str:
        return (
            f"{self.segments} files of shared memory ({self.bytes / 1e6:.0f} MB) and {self.sockets} of sockets, "
            "which runs that have ended had left on this host"
        )


def start() -> list[Any]:
    """Put a keeper on every node of the Ray cluster, from a Ray worker.

    Returns:
        They live as long as this is held.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    remote = ray.remote(num_cpus=0)(Keeper)
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in others]
    return [Keeper(), *(remote.options(scheduling_strategy=place).remote() for place in places)]


def end_ray() -> None:
    """Leave Ray; where this process has started it, wait for its processes, and remove what they have left."""
    import ray

    table = processes() if (PROC / "self" / "stat").exists() else {}
    ours = {str(pid): table[pid][1] for pid in descendants(os.getpid(), table) - {os.getpid()}}
    ray.shutdown()
    end = time.monotonic() + END_SECONDS
    while ours and _lives(ours, processes()) and time.monotonic() < end:
        time.sleep(0.1)
    remove()


class Keeper:
    """Removes what earlier runs have left on this host, and records what this one would leave.

    Args:
        root: The process from which the run's processes descend; by default the parent of this one, which for a Ray worker is
            the raylet.
        watch: Whether to look by itself, in a thread.
    """

    def __init__(self, root: int | None = None, watch: bool = True):
        self._root = os.getppid() if root is None else root
        self._judged: set[str] = set()
        self._record: dict[str, Any] = {"visible": _visible(), "files": {}}
        if not (PROC / "self" / "stat").exists() or not SHARED_MEMORY.is_dir():
            return
        if removed := remove():
            print(f"opd_recipes: removed {removed}", flush=True)
        if watch:
            threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self) -> None:
        try:
            while True:
                self.look()
                time.sleep(LOOK_SECONDS)
        except OSError as error:  # no reason to end a run
            print(f"opd_recipes: what this run may leave in {SHARED_MEMORY} is not recorded: {error}", flush=True)

    def look(self) -> None:
        """Record what has come since the last look and is held by the run."""
        found = {str(SHARED_MEMORY / name) for name in os.listdir(SHARED_MEMORY) if _SEGMENT.fullmatch(name)}
        sockets = bound_sockets()
        found |= {path for path in sockets.values() if _SOCKET.fullmatch(path)}
        new = found - self._judged
        self._judged = found  # so that a name that comes again is looked at again
        if not new:
            return
        table = processes()
        files: dict[str, Any] = {}
        for pid in descendants(self._root, table):
            for path in new & held(pid, sockets):
                with suppress(OSError):
                    file = files.setdefault(path, {"inode": os.lstat(path).st_ino, "owners": {}})
                    file["owners"][str(pid)] = table[pid][1]
        if files:
            self._record["files"].update(files)
            _write(_records() / f"{os.getpid()}-{table[os.getpid()][1]}.json", self._record)


def remove() -> Removed:
    """Remove what recorded runs that have ended have left here; see the module for the rule."""
    removed = Removed()
    folder = SHARED_MEMORY / _folder_name()
    if not folder.is_dir() or not _is_ours(folder.lstat()):
        return removed
    table, sockets = processes(), bound_sockets()
    in_use: set[str] | None = None
    for file in sorted(folder.glob("*.json")):
        record = _read(file)
        if record is None or not record["visible"] or record["visible"] != _visible():
            continue
        stays = {path: one for path, one in record["files"].items() if _lives(one["owners"], table)}
        for path, one in record["files"].items():
            if path in stays:
                continue
            if in_use is None:
                in_use = set(sockets.values()).union(*(held(pid, sockets) for pid in table))
            if path in in_use:
                stays[path] = one
            else:
                _remove(path, one["inode"], removed)
        if not stays:
            file.unlink(missing_ok=True)
        elif len(stays) < len(record["files"]):
            _write(file, {**record, "files": stays})
    return removed


def _lives(owners: dict[str, int], table: dict[int, tuple[int, int]]) -> bool:
    return any(int(pid) in table and table[int(pid)][1] == begun for pid, begun in owners.items())


def _remove(path: str, inode: int, removed: Removed) -> None:
    with suppress(FileNotFoundError):
        now = os.lstat(path)
        if now.st_ino != inode or not _is_ours(now):
            return
        folder, name = os.path.split(path)
        if stat.S_ISREG(now.st_mode) and folder == str(SHARED_MEMORY) and _SEGMENT.fullmatch(name):
            os.unlink(path)
            removed.segments += 1
            removed.bytes += now.st_blocks * 512
        elif stat.S_ISSOCK(now.st_mode) and _SOCKET.fullmatch(path):
            os.unlink(path)
            removed.sockets += 1


# Records


def _folder_name() -> str:
    return f"opd_recipes.{os.geteuid()}"


def _records() -> Path:
    """The folder of this user's records.

    Raises:
        PermissionError: Somebody else has made it.
    """
    folder = SHARED_MEMORY / _folder_name()
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(folder.lstat()) or not stat.S_ISDIR(folder.lstat().st_mode):
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def _write(file: Path, record: dict[str, Any]) -> None:
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(record))
    unfinished.replace(file)


def _read(file: Path) -> dict[str, Any] | None:
    """None for what is no record of ours."""
    try:
        if not _is_ours(file.lstat()):
            return None
        record = json.loads(file.read_text())
        return record if {"visible", "files"} <= record.keys() else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid()


def _visible() -> list[str]:
    """Of two processes with the same value each sees whether the other lives."""
    with suppress(OSError):
        return [(PROC / "sys/kernel/random/boot_id").read_text().strip(), os.readlink(PROC / "self/ns/pid")]
    return []


# What the kernel shows (Linux)


def processes() -> dict[int, tuple[int, int]]:
    """pid -> (parent, start) of every process but dead children that wait for their parents."""
    table = {}
    for name in os.listdir(PROC):
        if name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                words = (PROC / name / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if words[0] not in "ZX":
                    table[int(name)] = (int(words[1]), int(words[19]))
    return table


def descendants(root: int, table: dict[int, tuple[int, int]]) -> set[int]:
    """``root``, where it lives, and everything below it."""
    found: set[int] = set()
    grown = {root} & table.keys()
    while grown:
        found |= grown
        grown = {pid for pid, (parent, _) in table.items() if parent in grown} - found
    return found


def bound_sockets() -> dict[str, str]:
    """Inode -> path of every socket that is bound in the file system."""
    with suppress(OSError):
        rows = [line.split(None, 7) for line in (PROC / "net/unix").read_text(errors="replace").splitlines()[1:]]
        return {row[6]: row[7] for row in rows if len(row) == 8 and row[7].startswith("/")}
    return {}


def held(pid: int, sockets: dict[str, str]) -> set[str]:
    """Paths in /dev/shm that a process has mapped or open, and of the sockets that it has open; none where it is not ours."""
    found: set[str] = set()
    with suppress(OSError):
        found |= set(_shared(line.split(None, 5)[-1] for line in _lines(pid)))
        opened = list(open_files(pid))
        found |= set(_shared(opened))
        inodes = (name[len("socket:[") : -1] for name in opened if name.startswith("socket:["))
        found |= {sockets[inode] for inode in inodes if inode in sockets}
    return found


def open_files(pid: int) -> Iterator[str]:
    """What each open file of a process is."""
    for entry in os.scandir(PROC / str(pid) / "fd"):
        with suppress(OSError):
            yield os.readlink(entry.path)


def _lines(pid: int) -> list[str]:
    maps = (PROC / str(pid) / "maps").read_text(errors="replace")
    return [line for line in maps.splitlines() if str(SHARED_MEMORY) in line]


def _shared(names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if name.startswith(f"{SHARED_MEMORY}/") and not name.endswith(" (deleted)"))
