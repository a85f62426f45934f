"""Rows of the table that measure whole updates: against the plain way, of a share of the rows, RP-OPSD against OPSD."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import engines
from benchmarks.engines import Rows, Shape
from benchmarks.measure import alternate, ratios, spread

SHARES = (0.1, 0.25, 0.5, 1.0)
TINY = Shape(512, 64, 128, 2, 2, 1, vision_hidden=32, vision_depth=2)


def measure(quick: bool, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """All three rows, by their keys in the results. Starts the engines' process group in this process."""
    import tests.conftest  # noqa: F401  verl's CPU platform, before verl is imported
    from tests import harness

    threads = torch.get_num_threads()
    harness.start()
    torch.set_num_threads(threads)
    shapes = {"tiny": TINY} if quick else {"Qwen3.5-4B": Shape(), "Qwen3.5-0.8B": Shape(vocab_size=15_872)}
    rows = Rows(4, 2, image=(4, 6), teacher_image=(4, 6), response=8, micro_rows=2) if quick else Rows()
    with tempfile.TemporaryDirectory() as folder:
        cases = {}
        for name, shape in shapes.items():
            say(f"whole updates: ours and plain, in the proportions of {name}")
            given = {"model": asdict(shape), "rows": asdict(rows), "dtype": "float32", "world_size": 1}
            model = engines.make_model(Path(folder) / name, shape)
            cases[name] = against_plain(model, rows, repeats) | {"inputs": given}
        first = next(iter(shapes))
        out = {"update_time_ratio": {**cases[first], "models": cases}}
        model, given = Path(folder) / first, cases[first]["inputs"]
        say("updates of a share of the rows")
        rows = replace(rows, count=24 if not quick else 4, response=24)
        out |= selected(model, rows, repeats, given | {"rows": asdict(rows)})
        say("RP-OPSD and OPSD")
        rows = replace(rows, count=8 if not quick else 2)
        out["rp_vs_opsd_step_ratio"] = rp_against_opsd(model, rows, repeats, given)
    return out


def against_plain(model: Path, rows: Rows, repeats: int) -> dict[str, Any]:
    """Plain over ours, at equal rows and micro-batches."""
    batch = engines.make_rows(rows)
    sides = {"plain": engines.plain_update(model, rows), "ours": engines.ours(model, rows)}
    seconds = alternate({name: lambda side=side: side(batch) for name, side in sides.items()}, repeats)  # type: ignore[misc]
    return {**spread(ratios(seconds["plain"], seconds["ours"])), "seconds": seconds}


def selected(model: Path, rows: Rows, repeats: int, given: dict[str, Any]) -> dict[str, Any]:
    """BAS-OPD's update of a share of the rows, over the update of all rows by a recipe that selects nothing.

    The share is one of every prompt's rows: fewer rows then share an image, as where a selection takes some rollouts of
    each prompt. The recipe's utilities are computed.
    """
    batch = engines.make_rows(rows)
    whole = engines.ours(model, rows)
    some = engines.ours(model, rows, "opd/selection=random", "opd.divergence.tail=renormalise")
    counts = {share: max(1, round(share * len(batch))) for share in SHARES}
    sides: dict[str, Callable[[], Any]] = {"all": lambda: whole(batch)}
    chosen = {share: [batch[i * len(batch) // count] for i in range(count)] for share, count in counts.items()}
    sides |= {str(share): lambda picked=picked: some(picked) for share, picked in chosen.items()}  # type: ignore[misc]
    seconds = alternate(sides, repeats)
    fractions = {str(share): spread(ratios(seconds[str(share)], seconds["all"])) for share in SHARES}
    return {
        "bas25_update_fraction": {**fractions["0.25"], "shares": fractions, "seconds": seconds, "inputs": given},
    }


def rp_against_opsd(model: Path, rows: Rows, repeats: int, given: dict[str, Any]) -> dict[str, Any]:
    """OPSD's update (student and teacher on the full image) over RP-OPSD's (student at half width and height).

    The same responses on both sides; generation, where the smaller prompt helps as well, is left out.
    """
    high, wide = rows.image
    half = replace(rows, image=(high // 2, wide // 2))
    bias_corrected = ["opd/divergence=bc_reverse_kl", "opd.objective.aggregation=token_mean"]
    sides = {
        "opsd": (engines.ours(model, rows), engines.make_rows(rows)),
        "rp_opsd": (engines.ours(model, rows, *bias_corrected), engines.make_rows(half)),
    }
    seconds = alternate({name: lambda side=side: side[0](side[1]) for name, side in sides.items()}, repeats)  # type: ignore[misc]
    inputs = given | {"rows": {"opsd": asdict(rows), "rp_opsd": asdict(half)}, "generation": "left out"}
    return {**spread(ratios(seconds["opsd"], seconds["rp_opsd"])), "seconds": seconds, "inputs": inputs}
