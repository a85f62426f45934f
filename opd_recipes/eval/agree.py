"""``opd_recipes eval agree``: do another evaluator's verdicts and ours agree on the same replies?

Reads the samples that lmms-eval writes with ``--log_samples`` (``*_samples_TASK.jsonl``: ``doc_id``, ``target``,
``filtered_resps``, and the task's metrics), reads each reply by our rules, and shows where the two differ.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.synthesize.driver import write_whole
from opd_recipes.eval.benchmarks import BENCHMARKS
from opd_recipes.eval.judge import agreement
from opd_recipes.eval.page import markdown
from opd_recipes.eval.question import Question, Reply
from opd_recipes.registry import RecipeError

SUMMARY = "verdicts of lmms-eval (its file of samples) and ours on the same replies"
#: Fields of a task's metric that hold its verdict on one reply.
VERDICTS = ("score", "is_correct", "gpt_score", "correct", "acc", "exact_match")
#: Fields of a metric that hold what it read from the reply, and the right answer.
READ, ANSWERS = ("pred_answer", "prediction", "pred_parsed"), ("ground_truth", "answer", "gt_content")
#: Fields of a sample that are no metric.
OWN = {
    "doc_id",
    "doc",
    "target",
    "arguments",
    "input",
    "resps",
    "filtered_resps",
    "doc_hash",
    "prompt_hash",
    "target_hash",
}
OWN |= {"filter", "metrics", "token_counts", "input_media", "per_sample_scores"}
SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("samples", type=Path, metavar="SAMPLES", help="lmms-eval's *_samples_TASK.jsonl")
    parser.add_argument(
        "--benchmark", required=True, metavar="NAME[:SPLIT]", help="which benchmark, and part of it, the task is"
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="PATH", help="the same copy that lmms-eval read, in its order"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write agree.json and agree.md there")


def run(args: argparse.Namespace) -> int:
    """Print how far the two agree; return the exit code.

    Raises:
        RecipeError: The file is none of lmms-eval's, or its questions are not those of the data.
    """
    name, _, split = args.benchmark.partition(":")
    if name not in BENCHMARKS:
        raise RecipeError(f"--benchmark: unknown value {name!r}; known: {', '.join(BENCHMARKS)}")
    questions = list(BENCHMARKS[name].load(args.data, split or None, images=False))
    verdicts = [judged(name, sample, questions) for sample in read_samples(args.samples)]
    found = agreed(verdicts)
    text = as_markdown(found, args.samples)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_whole(args.out / "agree.json", json.dumps(found, indent=1) + "\n")
        write_whole(args.out / "agree.md", text + "\n")
    print(text)
    return 0


@dataclass(frozen=True)
class Sample:
    """One line of the file: ``place`` names it in messages."""

    place: str
    number: int
    reply: str
    target: str
    metric: Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What both say of one reply; ``verified``: the file's answer is the question's."""

    ours: Reply
    theirs: bool
    read: str
    verified: bool


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples in the file's order.

    Raises:
        RecipeError: It cannot be read, or a line is no sample of lmms-eval.
    """
    if not path.is_file():
        raise RecipeError(
            f"{path}: no such file; name the *_samples_TASK.jsonl that lmms-eval wrote with --log_samples"
        )
    seen: set[int] = set()
    with path.open(encoding="utf-8") as file:
        for line_number, line in enumerate(file, start=1):
            place = f"{path}, line {line_number}"
            try:
                record = json.loads(line)
                number, replies = record["doc_id"], record.get("filtered_resps", record.get("resps"))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise RecipeError(
                    f"{place}: no sample of lmms-eval ({error}); it must have doc_id and filtered_resps"
                ) from error
            if not isinstance(number, int) or number in seen:
                raise RecipeError(f"{place}: doc_id {number!r} is no number, or is there twice")
            seen.add(number)
            yield Sample(place, number, _text(replies, place), str(record.get("target") or ""), _metric(record, place))


def _text(replies: Any, place: str) -> str:
    """The reply in what may be a list in a list."""
    while isinstance(replies, list) and len(replies) == 1:
        replies = replies[0]
    if not isinstance(replies, str):
        raise RecipeError(
            f"{place}: expected one reply that is text, got {replies!r:.80}; only tasks that generate can be compared"
        )
    return replies


def _metric(record: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The first metric with a verdict; a bare number is one."""
    for name, value in record.items():
        if name in OWN:
            continue
        if isinstance(value, bool | int | float):
            return {"score": value}
        if isinstance(value, Mapping) and (_first(value, VERDICTS) is not None or "pred_answer" in value):
            return value
    raise RecipeError(
        f"{place}: no metric has a verdict ({', '.join(VERDICTS)}); it has {', '.join(sorted(set(record) - OWN))}"
    )


def judged(benchmark: str, sample: Sample, questions: Sequence[Question]) -> Verdict:
    """Both verdicts on one sample.

    Raises:
        RecipeError: Its question is not in the data, or has another answer there.
    """
    if not 0 <= sample.number < len(questions):
        raise RecipeError(
            f"{sample.place}: doc_id {sample.number}, but the data has {len(questions)} questions; is a split missing?"
        )
    question = questions[sample.number]
    answers = [_plain(text) for text in (sample.target, _first(sample.metric, ANSWERS)) if text]
    if answers and not {_plain(answer) for answer in question.answer}.intersection(answers):
        raise RecipeError(
            f"{sample.place}: the answer is {answers[0]!r}, but {question.id!r}, the question at that place in the data, has "
            f"{', '.join(question.answer)}; the file is of another copy, order or split"
        )
    reply = BENCHMARKS[benchmark].read(question, sample.reply)
    return Verdict(reply, _verdict(sample.metric), str(_first(sample.metric, READ) or ""), bool(answers))


def _verdict(metric: Mapping[str, Any]) -> bool:
    said = _first(metric, VERDICTS)
    if said is not None:
        return float(said) >= 0.5
    return str(metric["pred_answer"]).casefold() == str(metric.get("answer")).casefold()


def _first(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _plain(text: Any) -> str:
    return str(text).strip().strip("().").casefold()


def agreed(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Counts, the share of equal verdicts and Cohen's kappa on the replies that our rules decide, and who differs where.

    Raises:
        RecipeError: There is none.
    """
    if not verdicts:
        raise RecipeError("the file has no sample")
    ours = [verdict.ours.correct for verdict in verdicts]
    found = agreement(ours, [verdict.theirs for verdict in verdicts])
    counts = found.counts
    return {
        "n": len(verdicts),
        "unverified": sum(not verdict.verified for verdict in verdicts),
        "accuracy": {"ours": ours.count(True) / len(ours), "theirs": sum(v.theirs for v in verdicts) / len(verdicts)},
        "both_right": counts["right", "right"],
        "only_ours": counts["right", "wrong"],
        "only_theirs": counts["wrong", "right"],
        "both_wrong": counts["wrong", "wrong"],
        "undecided": {"theirs_right": counts["undecided", "right"], "theirs_wrong": counts["undecided", "wrong"]},
        "agreement": (counts["right", "right"] + counts["wrong", "wrong"]) / found.both if found.both else None,
        "kappa": found.kappa,
        "differing": [_difference(verdict) for verdict in verdicts if verdict.ours.correct is not verdict.theirs],
    }


def _difference(verdict: Verdict) -> dict[str, Any]:
    ours = verdict.ours
    return {
        "id": ours.question.id,
        "reply": ours.text,
        "answer": list(ours.question.answer),
        "ours": {
            "correct": ours.correct,
            "value": ours.extracted.value,
            "rule": ours.extracted.rule,
            "why": ours.extracted.why,
        },
        "theirs": {"correct": verdict.theirs, "read": verdict.read},
    }


def as_markdown(found: Mapping[str, Any], samples: Path) -> str:
    """The agreement as a page."""
    accuracy, undecided = found["accuracy"], found["undecided"]
    kappa = "-" if found["kappa"] is None else f"{found['kappa']:.3f}"
    same = "-" if found["agreement"] is None else f"{found['agreement']:.1%}"
    parts = [
        "# Agreement with lmms-eval",
        f"{samples.name}: {found['n']} replies. Accuracy by our rules {accuracy['ours']:.2%}, by lmms-eval "
        f"{accuracy['theirs']:.2%}. Where our rules decide, {same} of the verdicts are the same (Cohen's kappa {kappa}).",
        markdown(
            ["", "lmms-eval: right", "lmms-eval: wrong"],
            [
                ["ours: right", str(found["both_right"]), str(found["only_ours"])],
                ["ours: wrong", str(found["only_theirs"]), str(found["both_wrong"])],
                ["ours: undecided", str(undecided["theirs_right"]), str(undecided["theirs_wrong"])],
            ],
        ),
    ]
    if found["unverified"]:
        parts.append(
            f"**{found['unverified']} samples have no answer: that they are the same questions could not be verified.**"
        )
    if found["differing"]:
        rows = [
            [
                one["id"],
                one["reply"][:120],
                ", ".join(one["answer"]),
                str(one["ours"]["value"]),
                one["ours"]["rule"],
                one["theirs"]["read"],
            ]
            for one in found["differing"][:SHOWN]
        ]
        parts.append(markdown(["differing", "reply", "answer", "ours", "rule", "lmms-eval"], rows))
    return "\n\n".join(parts)
