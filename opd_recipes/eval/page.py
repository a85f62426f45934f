"""Results as Markdown: an overview, then what is behind each number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Results = Mapping[str, Mapping[str, Any]]


def overview(results: Results) -> str:
    """One row for each benchmark."""
    header = [
        "benchmark",
        "score",
        "95% interval",
        "metric",
        "questions",
        "undecided",
        "truncated",
        "failed",
        "tokens in / out",
        "minutes",
    ]
    rows = []
    for name, result in results.items():
        rows.append(_row(name, result))
        if judge := result.get("judge"):
            rows.append(_judged_row(name, judge))
    return markdown(header, rows)


def _judged_row(name: str, judge: Mapping[str, Any]) -> list[str]:
    scores, told = judge["scores"], [f"{name}, with judge {judge['model']}", percent(judge["scores"]["overall"])]
    kappa = judge["agreement"]["kappa"]
    agreed = "" if kappa is None else f"; kappa with the rules {kappa:.2f} on {judge['agreement']['both_decided']}"
    told += [interval(judge["intervals"].get("overall")), f"{scores['metric']}{agreed}", f"{judge['asked']} judged"]
    return [*told, str(scores["undecided"]), "", f"{judge['failed']}", "", ""]


def _row(name: str, result: Mapping[str, Any]) -> list[str]:
    scores, spent = result["scores"], result["spent"]
    tokens = f"{spent['prompt_tokens']:,} / {spent['completion_tokens']:,}"
    limited = f" (first {result['limit']})" if result["limit"] else ""
    return [
        name,
        percent(scores["overall"]),
        interval(result["intervals"].get("overall")),
        scores["metric"],
        f"{result['questions']}{limited}",
        str(scores["undecided"]),
        str(result["truncated"]),
        str(result["failed"]),
        tokens + (f" ({spent['uncounted']} uncounted)" if spent["uncounted"] else ""),
        f"{spent['seconds'] / 60:.1f}",
    ]


def page(results: Results) -> str:
    """The whole results file."""
    return (
        "\n\n".join(["# Results", overview(results), _notes(results), *(_details(*item) for item in results.items())])
        + "\n"
    )


def _notes(results: Results) -> str:
    settings = next(iter(results.values()))["settings"] or {}
    thinks = "thinking" if settings.get("thinking") else "not thinking"
    lines = [
        f"Model `{settings.get('model')}`, {thinks}, greedy, seed {settings.get('seed')}. Undecided replies, from which no "
        "answer can be read, count as wrong. Failed questions have no reply and are in no score; the same command asks them "
        "again. Minutes: while at least one question was under way."
    ]
    for name, result in results.items():
        if result["failed"]:
            lost = f"{result['failed']} of {result['questions']} questions have no reply"
            lines.append(f"**{name} is incomplete: {lost}.** The score is of the others.")
    return "\n\n".join(lines)


def _details(name: str, result: Mapping[str, Any]) -> str:
    scores, intervals = result["scores"], result["intervals"]
    rows = [
        [
            kind,
            category,
            percent(c["value"]),
            interval(intervals.get(f"{kind}/{category}")),
            str(c["n"]),
            str(c["undecided"]),
        ]
        for kind, entries in scores["categories"].items()
        for category, c in entries.items()
    ]
    rows += [
        ["", extra, percent(value), interval(intervals.get(f"extra/{extra}")), "", ""]
        for extra, value in scores["extra"].items()
    ]
    parts = [
        f"## {name}",
        f"{result['title']}; {scores['metric']}; replies of at most {(result['settings'] or {}).get('max_tokens')} tokens.",
    ]
    if rows:
        parts.append(markdown(["", "", "score", "95% interval", "questions", "undecided"], rows))
    for title, reasons in (("Undecided", result["undecided_reasons"]), ("Failed", result["failures"])):
        if reasons:
            parts.append(
                markdown(
                    [title, "replies" if title == "Undecided" else "questions"],
                    [[why, str(n)] for why, n in reasons.items()],
                )
            )
    return "\n\n".join(parts)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; what cells hold cannot break it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def interval(found: Mapping[str, Any] | None) -> str:
    if not found or found["low"] is None:
        return "-"
    return f"{100 * found['low']:.2f} to {100 * found['high']:.2f}"
