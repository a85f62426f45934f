"""Time and peak memory of a piece of code: alternated repetitions in one process, and one process for each memory reading."""

from __future__ import annotations

import ctypes
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def alternate(sides: dict[str, Callable[[], Any]], repeats: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of each side, ``repeats`` times, one after the other, so that a slow minute of the machine hits all of them.

    Each side runs once before, unmeasured.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, run in sides.items():
            synchronize(device)
            began = time.perf_counter()
            run()
            synchronize(device)
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Of neighbouring repetitions."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, lowest and highest, for the table; and the values."""
    return {
        "median": round(statistics.median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
        "values": [round(value, 4) for value in values],
    }


class Peak:
    """Filled in by :func:`peak_memory`: ``bytes`` above what was there at the start."""

    bytes: int = 0


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Peak memory of the block above what was resident before it.

    On a GPU by torch's allocator; on CPU by the kernel's high-water mark of resident memory, which is set back at the start
    (Linux). glibc gives tensors of more than 32 MB back to the kernel when they are freed, so what counts is what was alive;
    and what it kept of smaller ones is given back before, since the block's tensors could come from it uncounted.
    """
    peak = Peak()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.bytes = torch.cuda.max_memory_allocated() - before
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        yield peak
        peak.bytes = _status("VmHWM") - before


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text())
    assert found, f"{STATUS} has no {key}"
    return int(found[1]) * 1024


def in_child(module: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run ``python -m module SETTINGS`` and return the JSON object of its last line: a process without a history.

    Raises:
        RuntimeError: It failed; the message has what it wrote. Killed (-9) usually means that memory ran out.
    """
    command = [sys.executable, "-m", module, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
