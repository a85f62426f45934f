"""The report: how many items each stage took in, kept, rejected and left unfinished, and what the calls cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from data_prep.synthesize.calls import Spent
from data_prep.synthesize.pipeline import STAGES, Outcome

EXAMPLES = 20


@dataclass(frozen=True)
class Prices:
    """Money for a million tokens, in the user's currency; None: not known."""

    prompt: float | None = None
    completion: float | None = None

    def cost(self, spent: Spent) -> float | None:
        """What the calls of a stage cost by these prices; None when a price is missing."""
        if self.prompt is None or self.completion is None:
            return None
        return (spent.prompt_tokens * self.prompt + spent.completion_tokens * self.completion) / 1e6


@dataclass
class Tally:
    """The sums over all images."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    kept: int = 0
    unfinished: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.counts.update(outcome.counts)
        self.kept += len(outcome.kept)
        room = EXAMPLES - len(self.unfinished)
        self.unfinished += outcome.unfinished[: max(0, room)]

    @property
    def left_open(self) -> int:
        """Items that a call was given up for."""
        return sum(number for (_, what), number in self.counts.items() if what == "unfinished")

    def stages(self) -> dict[str, dict[str, int]]:
        """Each stage that saw an item; ``in`` is ``out`` + ``rejected`` + ``unfinished``."""
        rows = {
            stage: {what: self.counts[stage, what] for what in ("in", "out", "rejected", "unfinished")}
            for stage in STAGES
        }
        return {stage: row for stage, row in rows.items() if row["in"]}


def make_report(
    tally: Tally, spent: dict[str, Spent], prices: dict[str, Prices], wall: float, about: dict[str, Any]
) -> dict[str, Any]:
    """What goes into report.json.

    Args:
        tally: Sums of the items.
        spent: Calls by stage. Those that an earlier run paid for are in it: tokens and cost are of the whole data set.
        prices: By stage; a stage without any costs "unknown" (None).
        wall: Seconds of this run.
        about: Further entries, such as the settings.
    """
    calls = {
        stage: {**asdict(one), "seconds": round(one.seconds, 3), "cost": prices.get(stage, Prices()).cost(one)}
        for stage, one in spent.items()
    }
    names = ("recorded", "asked", "refused", "failed", "prompt_tokens", "completion_tokens", "uncounted", "seconds")
    total: dict[str, Any] = {name: sum(one[name] for one in calls.values()) for name in names}
    total["seconds"] = round(total["seconds"], 3)
    costs = [one["cost"] for one in calls.values()]
    total["cost"] = None if None in costs else round(sum(costs), 6)
    return {
        **about,
        "kept": tally.kept,
        "complete": tally.left_open == 0,
        "stages": tally.stages(),
        "unfinished": tally.unfinished,
        "calls": calls,
        "total": total,
        "wall_seconds": round(wall, 3),
    }


def table(report: dict[str, Any]) -> str:
    """The report for a person."""
    lines = [
        f"{'stage':<10} {'in':>8} {'out':>8} {'rejected':>8} {'open':>6}  {'calls':>8} {'new':>8} {'tokens':>11} {'s/call':>6}"
    ]
    for stage, row in report["stages"].items():
        calls = report["calls"].get(stage)
        paid = ""
        if calls:
            number = calls["recorded"] + calls["asked"]
            tokens = calls["prompt_tokens"] + calls["completion_tokens"]
            paid = f"  {number:>8} {calls['asked']:>8} {tokens:>11} {calls['seconds'] / max(1, number):>6.2f}"
        lines.append(
            f"{stage:<10} {row['in']:>8} {row['out']:>8} {row['rejected']:>8} {row['unfinished']:>6}{paid}  {STAGES[stage]}"
        )
    total = report["total"]
    cost = "unknown (--price-in, --price-out)" if total["cost"] is None else f"{total['cost']:.4f}"
    uncounted = f"; {total['uncounted']} replies came without a count of tokens" if total["uncounted"] else ""
    lines.append(
        f"tokens: {total['prompt_tokens']} in, {total['completion_tokens']} out{uncounted}; cost: {cost}; "
        f"calls: {total['asked']} now, {total['recorded']} from the ledger; {report['wall_seconds']:.0f} s"
    )
    return "\n".join(lines)
