"""The processes of a run as the kernel shows them (Linux): what they are, hold and leave behind.

A run is everything that descends from its command. Whoever was seen once stays known when its parent dies, and its children
with it. What only lives between two looks is not seen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.startup import PROCESSES
from opd_recipes.leftovers import PROC, bound_sockets, descendants, held, open_files, processes

_SESSION = re.compile(r"/[^\s=]*/session_[\d_-]+")
_ACTOR = re.compile(r"ray::(?!IDLE|DashboardAgent|RuntimeEnvAgent)")


@dataclass(frozen=True)
class Who:
    """A process; its number alone may come again.

    Args:
        start: When it began, in the kernel's ticks since boot.
    """

    pid: int
    start: int


@dataclass(frozen=True)
class Sample:
    """One process at one time: bytes resident, and its proportional part of them; open files and how many are sockets."""

    who: Who
    kind: str
    rss: int
    pss: int
    files: int
    sockets: int


@dataclass
class Watch:
    """What descends from ``root``.

    Attributes:
        known: Every process that was seen, with the title that it had last.
        segments: Files under /dev/shm that one of them had mapped or open.
        paths: Of the sockets in the file system that they had open.
        sessions: Folders of Ray.
    """

    root: int
    known: dict[Who, str] = field(default_factory=dict)
    segments: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    sessions: set[str] = field(default_factory=set)

    def look(self) -> list[Who]:
        """Find children of who is known; those of the run that live now."""
        table = processes()
        roots = {
            pid
            for pid, (_, start) in table.items()
            if Who(pid, start) in self.known or (not self.known and pid == self.root)
        }
        alive = set().union(*(descendants(pid, table) for pid in roots))
        here = [Who(pid, table[pid][1]) for pid in sorted(alive) if pid in table]
        for who in here:
            if title := _title(who.pid):
                self.known[who] = title
                self.sessions.update(_SESSION.findall(title))
            else:
                self.known.setdefault(who, "")
        return here

    def actors(self, alive: Iterable[Who]) -> int:
        """How many of them are Ray actors."""
        return sum(bool(_ACTOR.match(self.known[who])) for who in alive)

    def find(self, pattern: str, alive: Iterable[Who]) -> Who | None:
        return next((who for who in alive if re.search(pattern, self.known[who])), None)

    def measure(self, alive: Iterable[Who]) -> list[Sample]:
        """Memory and files of each, and what they hold by name."""
        bound = bound_sockets()
        samples = []
        for who in alive:
            with suppress(OSError, ValueError):
                rss, pss = memory(who.pid)
                files = list(open_files(who.pid))
                for path in held(who.pid, bound):
                    (self.segments if path.startswith("/dev/shm/") else self.paths).add(path)
                sockets = sum(name.startswith("socket:") for name in files)
                samples.append(Sample(who, kind(self.known[who]), rss, pss, len(files), sockets))
        return samples

    def left_segments(self) -> dict[str, int]:
        """Bytes of the segments that are still there: in memory, not their length."""
        left = {}
        for name in sorted(self.segments):
            with suppress(FileNotFoundError):
                left[name] = os.stat(name).st_blocks * 512
        return left

    def left_sockets(self) -> list[str]:
        return sorted(path for path in self.paths if os.path.lexists(path) and not _within(path, self.sessions))


def kind(title: str) -> str:
    """One of :data:`benchmarks.startup.PROCESSES`, or what the others are."""
    return next((name for name, (pattern, _) in PROCESSES.items() if re.search(pattern, title)), "others")


def memory(pid: int) -> tuple[int, int]:
    """Resident bytes, and the proportional set size."""
    fields = dict(line.split(":", 1) for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Rss"].split()[0]) * 1024, int(fields["Pss"].split()[0]) * 1024


def _title(pid: int) -> str:
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def _within(path: str, folders: Iterable[str]) -> bool:
    return any(path.startswith(folder + "/") for folder in folders)
