"""The results as a table, as ``benchmarks.json`` and as ``benchmarks.md``."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

#: Key, what it says, its target or None, whether more is better.
ROWS: tuple[tuple[str, str, float | None, bool], ...] = (
    ("head_memory_ratio", "peak memory of head and loss, plain / ours", 10.0, True),
    ("head_time_ratio", "time of head and loss, plain / ours", 4.0, True),
    ("model_memory_ratio", "peak memory of a model with head and loss, plain / ours", None, True),
    ("model_time_ratio", "time of a model with head and loss, plain / ours", None, True),
    ("update_time_ratio", "time of a whole update, plain / ours", 1.6, True),
    ("bas25_update_fraction", "update of 25% of the rows / of all rows", 0.35, False),
    ("rp_vs_opsd_step_ratio", "update of OPSD / of RP-OPSD", 1.8, True),
)
#: Rows about time, and what they call it.
TIMES = (
    ("update_time_ratio", "Whole update"),
    ("model_time_ratio", "Model with head and loss"),
    ("head_time_ratio", "Head and loss"),
)
PACKAGES = ("torch", "transformers", "verl", "opd_recipes")


def table(results: dict[str, Any]) -> str:
    """Markdown: one line for each row that was measured."""
    lines = ["| | median | lowest to highest | target | |", "|---|---|---|---|---|"]
    for key, text, target, more in ROWS:
        if key not in results:
            continue
        for label, row in _cases(text, results[key]):
            met = target is None or (row["median"] >= target if more else row["median"] <= target)
            wanted = "" if target is None else f"{'>=' if more else '<='} {target}"
            spread = f"{row['low']:.2f} to {row['high']:.2f}" if len(row["values"]) > 1 else "one reading"
            lines.append(f"| {label} | {row['median']:.2f} | {spread} | {wanted} | {'' if met else 'missed'} |")
        for share, row in results[key].get("shares", {}).items():
            if share != "0.25":
                label = f"update of {float(share):.0%} of the rows / of all rows"
                lines.append(f"| {label} | {row['median']:.2f} | {row['low']:.2f} to {row['high']:.2f} | | |")
    return "\n".join([*lines, "", *growth_table(results)]).rstrip()


def _cases(text: str, row: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for vocabulary, case in row.get("vocabularies", {}).items():
        yield f"{text}, vocabulary {int(vocabulary):,}", case
    for model, case in row.get("models", {}).items():
        yield f"{text}, {model}'s proportions", case
    if "vocabularies" not in row and "models" not in row:
        yield text, row


def growth_table(results: dict[str, Any]) -> list[str]:
    if "growth" not in results:
        return []
    lines = ["| slope (log-log) of head and loss with | time, plain | time, ours | memory, plain | memory, ours |"]
    lines.append("|---|---|---|---|---|")
    for name, sides in results["growth"]["slopes"].items():
        cells = [sides[side][measure] for measure in ("seconds", "bytes") for side in ("plain", "ours")]
        label = {"response": "response length", "topk": "K"}.get(name, name)
        lines.append(f"| {label} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return lines


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write(folder: Path, results: dict[str, Any], arguments: Sequence[str], args: argparse.Namespace) -> None:
    """``benchmarks.json`` and ``benchmarks.md``; on another device than the CPU with its name (``benchmarks_cuda.json``)."""
    about = {
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks", *arguments]),
        "machine": machine(args.device),
        "versions": versions(),
    }
    stem = "benchmarks" if args.device == "cpu" else f"benchmarks_{args.device}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps({**about, **results}, indent=1) + "\n")
    (folder / f"{stem}.md").write_text(page(results, about))


def page(results: dict[str, Any], about: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = ["# Benchmarks", "", f"`{about['command']}` on {about['date']}, {about['machine']}, {packages}.", ""]
    lines += [table(results), "", "## How to read it", ""]
    lines += [
        *explanations(results),
        "",
        "What each row measures and what is plain about the plain way: [../benchmarks.md](../benchmarks.md).",
    ]
    return "\n".join(lines) + "\n"


def explanations(results: dict[str, Any]) -> list[str]:
    """The sizes behind each row, as a list."""
    lines = []
    if "head_memory_ratio" in results:
        for case in results["head_memory_ratio"]["vocabularies"].values():
            size, gigabytes = case["inputs"], {side: value / 2**30 for side, value in case["bytes"].items()}
            lines.append(
                f"- Memory, vocabulary {size['vocabulary']:,}: {size['prompt']} prompt and {size['response']} response tokens, "
                f"{size['hidden']} numbers each, {size['dtype']}: {gigabytes['plain']:.2f} GiB plain, "
                f"{gigabytes['ours']:.2f} GiB ours, with the head's gradient in both."
            )
    for key, what in TIMES:
        if key in results:
            seconds = results[key]["seconds"]
            middle = {side: sorted(values)[len(values) // 2] for side, values in seconds.items()}
            lines.append(f"- {what}: {middle['plain']:.2f} s plain, {middle['ours']:.2f} s ours.")
    for key in ("model_time_ratio", "update_time_ratio"):
        if key in results:
            rows = results[key]["inputs"]["rows"]
            lines.append(
                f"- Rows of the {'update' if key.startswith('update') else 'model'}: {rows['count']}, {rows['rollouts']} of a "
                f"prompt and so with one image; {rows['micro_rows']} fit in a micro-batch."
            )
    if "rp_vs_opsd_step_ratio" in results:
        lines.append("- RP-OPSD against OPSD: teacher and update, equal responses; generation is left out.")
    return lines
