"""How time and peak memory of head and loss grow with response length, vocabulary and K: slopes on log-log axes.

1 is proportional growth, 0 is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks import head
from benchmarks.head import Size

#: What is varied, and by which factors of the smallest.
FACTORS = {"response": (1, 2, 4), "vocabulary": (1, 2, 4), "topk": (1, 10, 100)}


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Least-squares slope of log value over log size."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def measure(smallest: Size, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Slopes of both sides, and what they were computed from."""
    out: dict[str, Any] = {"inputs": asdict(smallest), "slopes": {}, "points": []}
    for name, factors in FACTORS.items():
        say(f"growth with {name}")
        found: dict[str, dict[str, list[float]]] = {side: {"seconds": [], "bytes": []} for side in head.SIDES}
        values = [getattr(smallest, name) * factor for factor in factors]
        for value in values:
            size = replace(smallest, **{name: value})
            seconds = head.seconds(size, repeats)
            for side in head.SIDES:
                found[side]["seconds"].append(min(seconds[side]))
                found[side]["bytes"].append(head.peak(side, size))
                out["points"].append(
                    {"varied": name, "value": value, "side": side}
                    | {measure: found[side][measure][-1] for measure in ("seconds", "bytes")}
                )
        out["slopes"][name] = {
            side: {measure: round(slope(values, found[side][measure]), 3) for measure in ("seconds", "bytes")}
            for side in head.SIDES
        }
    return out
