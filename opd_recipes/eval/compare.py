"""``opd_recipes eval compare``: paired tests between two folders of results, on the same questions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_prep.synthesize.driver import write_whole
from opd_recipes.eval import statistics
from opd_recipes.eval.benchmarks import BENCHMARKS
from opd_recipes.eval.page import interval, markdown, percent
from opd_recipes.eval.question import Reply
from opd_recipes.eval.results import folder_of, read_results, read_scored
from opd_recipes.registry import RecipeError

SUMMARY = "paired tests between two folders of results (A is the baseline), benchmark by benchmark"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="OUT_A", help="folder of the baseline's results")
    parser.add_argument("b", type=Path, metavar="OUT_B", help="folder of the other model's results")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write compare.json and compare.md there")
    parser.add_argument(
        "--common",
        action="store_true",
        help="where one has questions that the other lacks, compare those that both have",
    )
    parser.add_argument("--judged", action="store_true", help="by the verdicts with the judge, which both must have")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; return the exit code.

    Raises:
        RecipeError: The folders have no benchmark in common, or other questions in one.
    """
    found = compare(args.a, args.b, args.common, args.judged)
    text = as_markdown(found, args.a, args.b)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_whole(args.out / "compare.json", json.dumps(found, indent=1) + "\n")
        write_whole(args.out / "compare.md", text + "\n")
    print(text)
    return 0


def compare(a: Path, b: Path, common: bool = False, judged: bool = False) -> dict[str, Any]:
    """Comparisons by benchmark.

    Args:
        common: Leave out the questions that only one of the two has.
        judged: By the verdicts with the judge instead of the rules'.

    Raises:
        RecipeError: No benchmark is in both, or questions differ.
    """
    results, others = read_results(a), read_results(b)
    names = [name for name in results if name in others]
    if not names:
        raise RecipeError(f"{a} and {b} have no benchmark in common: {', '.join(results)}; {', '.join(others)}")
    found = {}
    for name in names:
        ours, theirs = (read_scored(folder_of(out, name), judged) for out in (a, b))
        if common:
            ours, theirs = shared(ours, theirs)
        try:
            found[name] = statistics.compare(BENCHMARKS[results[name]["benchmark"]], ours, theirs).to_json()
        except RecipeError as error:
            raise RecipeError(f"{name}: {error}; --common compares the questions that both have") from error
    return found


def shared(ours: list[Reply], theirs: list[Reply]) -> tuple[list[Reply], list[Reply]]:
    """The replies to questions that both have, in the first one's order."""
    by_id = {reply.question.id: reply for reply in theirs}
    kept = [reply for reply in ours if reply.question.id in by_id]
    return kept, [by_id[reply.question.id] for reply in kept]


def as_markdown(found: Mapping[str, Any], a: Path, b: Path) -> str:
    """The comparison as a page: an overview, then every category."""
    header = [
        "benchmark",
        "A",
        "B",
        "B - A",
        "95% interval",
        "p",
        "questions",
        "only A right",
        "only B right",
        "McNemar p",
    ]
    parts = [
        "# Comparison",
        f"A: {a}, B: {b}. The interval and p are of a paired bootstrap, which draws as one what belongs together (pairs, "
        "cycles, pictures); McNemar's test is exact and takes questions as independent. Undecided replies count as wrong.",
        markdown(header, [_row(name, one) for name, one in found.items()]),
    ]
    for name, one in found.items():
        rows = [[key, percent(d["value"]), interval(d)] for key, d in one["differences"].items() if key != "overall"]
        if rows:
            parts += [f"## {name}", markdown(["", "B - A", "95% interval"], rows)]
    return "\n\n".join(parts)


def _row(name: str, one: Mapping[str, Any]) -> list[str]:
    difference = one["differences"]["overall"]
    return [
        name,
        percent(one["a"]["overall"]),
        percent(one["b"]["overall"]),
        percent(difference["value"]),
        interval(difference),
        "-" if one["p"] is None else f"{one['p']:.4f}",
        str(one["n"]),
        str(one["only_a"]),
        str(one["only_b"]),
        f"{one['p_mcnemar']:.4f}",
    ]
