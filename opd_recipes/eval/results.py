"""From recorded replies to numbers: costs no request, and is done anew by every run.

``scored.jsonl`` has each reply with the answer that was read from it, by which rule and why; two such files can be compared
without the data set.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.synthesize.driver import write_whole
from opd_recipes.eval import statistics
from opd_recipes.eval.benchmarks import BENCHMARKS, Benchmark
from opd_recipes.eval.extraction import Extracted
from opd_recipes.eval.job import Job
from opd_recipes.eval.judging import Judged
from opd_recipes.eval.question import Question, Reply
from opd_recipes.eval.runner import spent
from opd_recipes.registry import RecipeError

RESULTS = "results.json"
SCORED = "scored.jsonl"
#: Reasons for undecided replies that the results list; the others are in scored.jsonl.
REASONS = 10


def read_replies(job: Job) -> list[Reply]:
    """The replies to this run's questions, in the questions' order."""
    thinking = bool((job.store.settings() or {}).get("thinking"))
    return [_read(job, question, thinking) for question in job.questions if question.id in job.recorded]


def _read(job: Job, question: Question, thinking: bool) -> Reply:
    recorded = job.recorded[question.id]
    truncated = recorded.finish_reason == "length"
    # Some templates open the thought in the prompt: a reply that was cut off and shows no end of it may be nothing but thought.
    return job.benchmark.read(question, recorded.text, truncated=truncated, thinking_opened=thinking and truncated)


def measure(job: Job, replies: Sequence[Reply], judge: Judged | None = None) -> dict[str, Any]:
    """Score a job and write ``results.json`` and ``scored.jsonl`` into its folder.

    Args:
        replies: :func:`read_replies`.
        judge: What a judge made of them.

    Returns:
        What results.json has.
    """
    result: dict[str, Any] = {
        "benchmark": job.benchmark.name,
        "label": job.label,
        "title": job.benchmark.title,
        "source": job.benchmark.source,
        "questions": len(job.questions),
        "limit": job.limit,
        "failed": len(job.failures),
        "failures": _most_common(job.failures.values()),
        **_numbers(job.benchmark, replies),
        "undecided_reasons": _most_common(reply.extracted.why for reply in replies if reply.correct is None),
        "rules": dict(Counter(reply.extracted.rule for reply in replies).most_common()),
        "truncated": sum(job.recorded[reply.question.id].finish_reason == "length" for reply in replies),
        "spent": spent(job),
        "settings": job.store.settings(),
    }
    if judge:
        result["judge"] = {**judge.report, **_numbers(job.benchmark, judge.replies)}
    write_scored(job, replies, judge)
    write_whole(job.store.folder / RESULTS, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return result


def _most_common(reasons: Iterable[str]) -> dict[str, int]:
    return dict(Counter(reasons).most_common(REASONS))


def _numbers(benchmark: Benchmark, replies: Sequence[Reply]) -> dict[str, Any]:
    return {"scores": benchmark.score(replies).to_json(), "intervals": _intervals(benchmark, replies)}


def _intervals(benchmark: Benchmark, replies: Sequence[Reply]) -> dict[str, Any]:
    if not replies:
        return {}
    return {name: asdict(interval) for name, interval in statistics.intervals(benchmark, replies).items()}


def write_scored(job: Job, replies: Sequence[Reply], judge: Judged | None = None) -> None:
    """``correct`` is the rules' verdict; ``judged`` the one with the judge, where there is one."""
    lines = []
    final = {reply.question.id: reply.correct for reply in judge.replies} if judge else {}
    for reply in replies:
        question = asdict(reply.question.without_images())
        del question["images"]
        record = {
            **question,
            "reply": reply.text,
            **asdict(reply.extracted),
            "correct": reply.correct,
            **({"judged": final[reply.question.id]} if judge else {}),
            "finish_reason": job.recorded[reply.question.id].finish_reason,
        }
        if judge and (verdict := judge.verdicts.get(reply.question.id)):
            record["judge"] = verdict.why
        lines.append(json.dumps(record, ensure_ascii=True) + "\n")
    job.store.folder.mkdir(parents=True, exist_ok=True)
    write_whole(job.store.folder / SCORED, "".join(lines))


def read_scored(folder: Path, judged: bool = False) -> list[Reply]:
    """The replies of ``folder`` as they were scored; their questions have no images.

    Args:
        judged: With the judge's verdicts instead of the rules'.

    Raises:
        RecipeError: There is no such file, it is damaged, or no judge was asked.
    """
    path = folder / SCORED
    if not path.exists():
        raise RecipeError(
            f"{folder}: it has no {SCORED}; name a folder that opd_recipes eval has written, or run it again"
        )
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        if judged and any("judged" not in record for record in records):
            raise RecipeError(f"{folder}: no judge was asked; run opd_recipes eval --score-only --judge-server ...")
        return [_reply(record, "judged" if judged else "correct") for record in records]
    except RecipeError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{path} is damaged ({error}); write it again with opd_recipes eval --score-only") from error


def _reply(record: Mapping[str, Any], verdict: str) -> Reply:
    question = Question(
        id=record["id"],
        images=(),
        text=record["text"],
        kind=record["kind"],
        answer=tuple(record["answer"]),
        options=record["options"],
        category=record["category"],
        group=record["group"],
        bbox=tuple(record["bbox"]) if record["bbox"] else None,
        tolerance=record["tolerance"],
    )
    extracted = Extracted(value=record["value"], rule=record["rule"], why=record["why"])
    return Reply(question, record["reply"], extracted, record[verdict])


def folder_of(out: Path, label: str) -> Path:
    """Where ``NAME`` or ``NAME:SPLIT`` has its files."""
    return out / label.replace(":", ".")


def read_results(out: Path) -> dict[str, dict[str, Any]]:
    """What ``out`` has, by benchmark and split (``NAME`` or ``NAME:SPLIT``), in the order of the registry.

    Raises:
        RecipeError: There is nothing, or a file is damaged.
    """
    found = []
    for path in out.glob(f"*/{RESULTS}"):
        try:
            found.append(json.loads(path.read_text()))
        except ValueError as error:
            raise RecipeError(f"{path} is damaged; write it again with opd_recipes eval --score-only") from error
    known = [result for result in found if result.get("benchmark") in BENCHMARKS]
    if not known:
        raise RecipeError(f"{out}: it has no results of opd_recipes eval")
    order = list(BENCHMARKS)
    known.sort(key=lambda result: (order.index(result["benchmark"]), result["label"]))
    return {result["label"]: result for result in known}
