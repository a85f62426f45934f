"""How each benchmark turns right and wrong into its numbers.

Every number is a function of sums over groups of replies (a pair, a cycle, the questions of one picture). So the error of
each can be estimated by drawing groups anew, without reading a reply twice: see :mod:`opd_recipes.eval.statistics`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from opd_recipes.eval.question import Category, Reply, Scores

#: Sums by name: one number each, or one for each draw.
Sums = Mapping[str, Any]


def share(sums: Sums, part: str, whole: str) -> Any:
    """``part`` / ``whole``; NaN where the whole is 0 or was never counted."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.float64(1) * sums.get(part, 0) / sums.get(whole, np.nan)


def mean(*values: Any) -> Any:
    """NaN where one is: a mean over parts of which one was not asked is another number."""
    return sum(values) / len(values)


def category_key(kind: str, name: str) -> str:
    return f"{kind}/{name}"


class Accuracy:
    """Share of the questions that were answered right; undecided is not right. Also the base of the other scores."""

    metric = "accuracy over all questions"

    def tally(self, group: Sequence[Reply]) -> dict[str, float]:
        """Counts of one group; they add up over groups."""
        counts: Counter[str] = Counter()
        for reply in group:
            for cell in ("all", *(category_key(*item) for item in reply.question.category.items())):
                counts[f"n:{cell}"] += 1
                counts[f"hits:{cell}"] += reply.correct is True
        return dict(counts)

    def accuracy(self, sums: Sums, cell: str = "all") -> Any:
        return share(sums, f"hits:{cell}", f"n:{cell}")

    def overall(self, sums: Sums) -> Any:
        return self.accuracy(sums)

    def category(self, sums: Sums, cell: str) -> Any:
        return self.accuracy(sums, cell)

    def extra(self, sums: Sums) -> dict[str, Any]:
        return {}

    def values(self, sums: Sums) -> dict[str, Any]:
        """All numbers: ``overall``, ``<kind>/<category>`` and ``extra/<name>``."""
        cells = [key.removeprefix("n:") for key in sums if key.startswith("n:") and key != "n:all"]
        return {
            "overall": self.overall(sums),
            **{cell: self.category(sums, cell) for cell in sorted(cells)},
            **{f"extra/{name}": value for name, value in self.extra(sums).items()},
        }


class Circular(Accuracy):
    """HR-Bench: accuracy in each of the four orders of the options, averaged over the orders.

    Beside it the share of questions that are right in all four orders; questions without all four are left out of that.
    """

    metric = "accuracy, averaged over the four orders of the options"
    orders = 4

    def tally(self, group: Sequence[Reply]) -> dict[str, float]:
        counts = super().tally(group)
        if len({reply.question.category["cycle"] for reply in group}) == self.orders:
            counts |= {"n-strict": 1, "hits-strict": float(all(reply.correct is True for reply in group))}
        return counts

    def overall(self, sums: Sums) -> Any:
        cycles = [key.removeprefix("n:") for key in sums if key.startswith("n:cycle/")]
        return mean(*(self.accuracy(sums, cycle) for cycle in cycles)) if cycles else np.nan

    def extra(self, sums: Sums) -> dict[str, Any]:
        return {"right in all four orders": share(sums, "hits-strict", "n-strict")}


class Pairs(Accuracy):
    """MMVP: share of pairs of which both questions are right. A pair with one answered question is left out.

    Beside it the accuracy per question, and the pair accuracy with the keys of two pairs exchanged that have been reported
    wrong (github.com/tsb0601/MMVP, issues 14 and 30: questions 99 and 100, 279 and 280).
    """

    metric = "share of pairs with both questions right"
    reported = ("pair 50", "pair 140")

    def tally(self, group: Sequence[Reply]) -> dict[str, float]:
        counts = super().tally(group)
        if len(group) == 2:
            right = all(reply.correct is True for reply in group)
            counts |= {"n-pairs": 1, "hits-pairs": float(right), "hits-corrected": float(right)}
            if group[0].question.group in self.reported:
                counts["hits-corrected"] = float(_both_right_exchanged(group))
        return counts

    def overall(self, sums: Sums) -> Any:
        return share(sums, "hits-pairs", "n-pairs")

    def extra(self, sums: Sums) -> dict[str, Any]:
        return {
            "accuracy per question": self.accuracy(sums),
            "pairs right with the reported corrections": share(sums, "hits-corrected", "n-pairs"),
        }


def _both_right_exchanged(group: Sequence[Reply]) -> bool:
    first, second = group
    return first.extracted.value in second.question.answer and second.extracted.value in first.question.answer


class CvBench(Accuracy):
    """CV-Bench: mean of 2D and 3D, where 2D is the mean of ADE20K and COCO, and 3D is Omni3D."""

    metric = "mean of 2D (mean of ADE20K and COCO) and 3D (Omni3D)"

    def _sources(self, sums: Sums) -> tuple[Any, Any, Any]:
        ade, coco, omni = (self.accuracy(sums, f"source/{name}") for name in ("ADE20K", "COCO", "Omni3D"))
        return ade, coco, omni

    def overall(self, sums: Sums) -> Any:
        ade, coco, omni = self._sources(sums)
        return mean(mean(ade, coco), omni)

    def category(self, sums: Sums, cell: str) -> Any:
        ade, coco, omni = self._sources(sums)
        return {"type/2D": mean(ade, coco), "type/3D": omni}.get(cell, self.accuracy(sums, cell))

    def extra(self, sums: Sums) -> dict[str, Any]:
        return {"accuracy over all questions": self.accuracy(sums)}


class MeanOf(Accuracy):
    """Accuracy over all questions, and beside it the mean of the accuracies of some categories.

    Args:
        kind: Kind of category.
        names: The categories that the benchmark has; NaN where one was not asked.
        title: What the mean is called.
    """

    def __init__(self, kind: str, names: Sequence[str], title: str):
        self._cells = [category_key(kind, name) for name in names]
        self._title = title

    def extra(self, sums: Sums) -> dict[str, Any]:
        return {self._title: mean(*(self.accuracy(sums, cell) for cell in self._cells))}


class MmeRealWorld(MeanOf):
    """MME-RealWorld: accuracy over all questions, the mean of Perception and Reasoning, and how often E was answered."""

    def __init__(self) -> None:
        super().__init__("task", ("Perception", "Reasoning"), "mean of Perception and Reasoning")

    def tally(self, group: Sequence[Reply]) -> dict[str, float]:
        return super().tally(group) | {"E": float(sum(reply.extracted.value == "E" for reply in group))}

    def extra(self, sums: Sums) -> dict[str, Any]:
        return super().extra(sums) | {"answered E (not in the image)": share(sums, "E", "n:all")}


class Pope(Accuracy):
    """POPE: F1 of answering yes. An undecided reply is not a yes: it lowers recall where yes is right, and accuracy always."""

    metric = "F1 of yes, over all splits together"
    splits = ("random", "popular", "adversarial")

    def tally(self, group: Sequence[Reply]) -> dict[str, float]:
        counts = Counter(super().tally(group))
        for reply in group:
            for cell in ("all", category_key("split", reply.question.category["split"])):
                counts[f"yes:{cell}"] += "yes" in reply.question.answer
                counts[f"undecided:{cell}"] += reply.correct is None
                if says_yes(reply):
                    counts[f"said:{cell}"] += 1
                    counts[f"true:{cell}"] += reply.correct is True
        return dict(counts)

    def overall(self, sums: Sums) -> Any:
        return self._f1(sums, "all")

    def category(self, sums: Sums, cell: str) -> Any:
        return self._f1(sums, cell)

    def _f1(self, sums: Sums, cell: str) -> Any:
        both = {"both": sums.get(f"said:{cell}", 0) + sums.get(f"yes:{cell}", np.nan)}
        return 2 * share({**both, "true": sums.get(f"true:{cell}", 0)}, "true", "both")

    def extra(self, sums: Sums) -> dict[str, Any]:
        asked = [split for split in self.splits if f"n:split/{split}" in sums]
        cells = {"": "all", **{f"{split}: ": category_key("split", split) for split in asked}}
        return {
            f"{prefix}{name}": value
            for prefix, cell in cells.items()
            for name, value in {
                "accuracy": self.accuracy(sums, cell),
                "precision": share(sums, f"true:{cell}", f"said:{cell}"),
                "recall": share(sums, f"true:{cell}", f"yes:{cell}"),
                "yes-ratio": share(sums, f"said:{cell}", f"n:{cell}"),
                "undecided": share(sums, f"undecided:{cell}", f"n:{cell}"),
            }.items()
        }


def says_yes(reply: Reply) -> bool:
    """Decided, and not for no: a verdict that has been overruled (a judge's) counts as the answer that makes it so."""
    if reply.correct is None:
        return False
    return ("yes" in reply.question.answer) == reply.correct


def grouped(replies: Iterable[Reply]) -> dict[str, list[Reply]]:
    """Replies by group, in order; a question without a group is one of its own."""
    groups: dict[str, list[Reply]] = {}
    for reply in replies:
        groups.setdefault(reply.question.group or reply.question.id, []).append(reply)
    return groups


def score(rule: Accuracy, replies: Sequence[Reply]) -> Scores:
    """All numbers of a benchmark over these replies."""
    sums: Counter[str] = Counter()
    for group in grouped(replies).values():
        sums.update(rule.tally(group))
    values = rule.values(dict(sums))
    counts: Counter[tuple[str, str]] = Counter()
    undecided: Counter[tuple[str, str]] = Counter()
    for reply in replies:
        for item in reply.question.category.items():
            counts[item] += 1
            undecided[item] += reply.correct is None
    categories: dict[str, dict[str, Category]] = {}
    for (kind, name), n in sorted(counts.items()):
        value = float(values[category_key(kind, name)])
        categories.setdefault(kind, {})[name] = Category(value, n, undecided[kind, name])
    return Scores(
        overall=float(values["overall"]),
        metric=rule.metric,
        n=len(replies),
        undecided=sum(reply.correct is None for reply in replies),
        categories=categories,
        extra={key.removeprefix("extra/"): float(value) for key, value in values.items() if key.startswith("extra/")},
    )
