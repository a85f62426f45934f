"""What the check says on the screen, and what the JSON file says behind the faults."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_prep.check_sets import SetState
from data_prep.faults import ERROR, KINDS, Report


def token_summary(counts: Sequence[int]) -> dict[str, float]:
    """Minimum, mean, 95th percentile (the nearest rank) and maximum."""
    ordered = sorted(counts)
    rank = max(0, -(-95 * len(ordered) // 100) - 1)
    return {
        "rows": len(ordered),
        "min": ordered[0],
        "mean": round(sum(ordered) / len(ordered), 1),
        "p95": ordered[rank],
        "max": ordered[-1],
    }


def summary(states: dict[str, SetState], memory: dict[str, Any] | None, limited: int | None) -> dict[str, Any]:
    """The numbers of a check, for the JSON file."""
    return {
        "limit": limited,
        "sets": {
            name: {
                "rows": state.rows,
                "rows_with_errors": state.bad,
                "tokens": {view: token_summary(counts) for view, counts in state.tokens.items()},
            }
            for name, state in states.items()
        },
        "memory": memory,
    }


def text(report: Report, numbers: dict[str, Any]) -> str:
    """A table of kinds with their first examples, tokens of each view, and memory."""
    lines = _kinds(report)
    lines += _tokens(numbers["sets"])
    if numbers["memory"] is not None:
        lines += _memory(numbers["memory"])
    for name, values in numbers["sets"].items():
        bad = values["rows_with_errors"]
        lines.append(f"{name}: {values['rows']} rows checked, {bad} with errors")
    if numbers["limit"] is not None:
        lines.append(f"only the first {numbers['limit']} rows of each file were looked at (--limit)")
    lines.append(f"{report.errors} errors, {report.warnings} warnings")
    return "\n".join(lines)


def _kinds(report: Report) -> list[str]:
    if not report.counts:
        return []
    width = max(len(kind) for kind in report.counts)
    lines = [f"{'kind':{width}}  severity  faults"]
    for kind in sorted(report.counts, key=lambda kind: (KINDS[kind][0] != ERROR, -report.counts[kind], kind)):
        severity, remedy = KINDS[kind]
        lines.append(f"{kind:{width}}  {severity:8}  {report.counts[kind]:6}  {remedy}")
        lines += [f"    {fault.place}: {fault.reason}" for fault in report.examples[kind]]
        if (more := report.counts[kind] - len(report.examples[kind])) > 0:
            lines.append(f"    ... and {more} more")
    return [*lines, ""]


def _tokens(sets: dict[str, Any]) -> list[str]:
    rows = [(f"{name}, {view}", values) for name, of in sets.items() for view, values in of["tokens"].items()]
    if not rows:
        return []
    width = max(len(name) for name, _ in rows)
    lines = [f"{'prompt tokens':{max(width, 13)}}     min    mean     p95     max"]
    width = max(width, 13)
    for name, of in rows:
        lines.append(f"{name:{width}} {of['min']:7} {of['mean']:7.0f} {of['p95']:7} {of['max']:7}")
    return [*lines, ""]


def _memory(memory: dict[str, Any]) -> list[str]:
    parts = {"state": "state_bytes", "activations": "activation_bytes", "head": "head_bytes"}
    told = ", ".join(f"{name} {memory[key] / 1e9:.2f} GB" for name, key in parts.items() if memory[key] is not None)
    total = "" if memory["total_bytes"] is None else f", together {memory['total_bytes'] / 1e9:.2f} GB"
    parameters = "" if memory["parameters"] is None else f"{memory['parameters'] / 1e6:.0f} M parameters, "
    return [
        f"memory for training on each of {memory['devices']} devices (estimate; {parameters}"
        f"micro-batches of {memory['micro_batch_tokens']} tokens): {told}{total}",
        "",
    ]
