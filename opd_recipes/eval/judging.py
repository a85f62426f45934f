"""A judge's verdicts beside the rules': on short answers, which differ in wording, and on what the rules leave open.

Scores by the rules alone stay as they are; those with the judge stand beside them. Verdicts are kept in ``judge.jsonl``, so
that a run that is started again asks only for those that are missing.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data_prep.synthesize.client import Retry, Server
from opd_recipes.eval.judge import Verdict, agreement, case_of, judge, prompt
from opd_recipes.eval.question import Reply
from opd_recipes.eval.reply_text import read_reply
from opd_recipes.registry import RecipeError

FILE = "judge.jsonl"
#: Cases whose verdicts are written together.
AT_A_TIME = 64


@dataclass(frozen=True)
class Judge:
    """The server that judges; see :class:`data_prep.synthesize.client.Server`."""

    url: str
    model: str
    key_variable: str | None = None
    retry: Retry = field(default_factory=Retry)
    concurrency: int = 16

    def server(self) -> Server:
        return Server(self.url, self.model, self.retry, self.key_variable, option="--judge-server")


@dataclass(frozen=True)
class Judged:
    """What a judge made of a benchmark's replies.

    Args:
        replies: All of them; where the judge decided, its verdict stands in for the rules'.
        verdicts: Of those that it was asked about, by question.
        failed: Questions that it was to be asked about and has no verdict on, with the reason.
        report: Model, counts and the agreement with the rules, for the results.
    """

    replies: list[Reply]
    verdicts: dict[str, Verdict]
    failed: dict[str, str]
    report: dict[str, Any]


def in_question(reply: Reply) -> bool:
    """Whether a reply goes to the judge: a short answer, or an undecided one, that has text behind its thinking."""
    text = read_reply(reply.text)
    return (reply.question.kind == "short" or reply.correct is None) and bool(text.raw) and not text.open


def judged(folder: Path, replies: Sequence[Reply], by: Judge) -> Judged:
    """Verdicts on the replies in question.

    Args:
        folder: Where verdicts are kept.

    Returns:
        What there is: a judge that cannot be used leaves the rules' verdicts as they are.
    """
    asked = [reply for reply in replies if in_question(reply)]
    known = _read(folder / FILE)
    missing = [reply for reply in asked if _key(reply, by) not in known]
    failed: dict[str, str] = {}
    with tqdm(total=len(missing), desc=f"judging {folder.name}", unit="reply", mininterval=1) as progress:
        for start in range(0, len(missing), AT_A_TIME):
            some = missing[start : start + AT_A_TIME]
            try:
                verdicts = asyncio.run(judge(by.server(), [case_of(reply) for reply in some], by.concurrency))
            except RecipeError as error:
                failed |= {reply.question.id: str(error) for reply in missing[start:]}
                break
            told = {_key(reply, by): verdict for reply, verdict in zip(some, verdicts, strict=True)}
            heard = {key: verdict for key, verdict in told.items() if not _unheard(verdict)}
            failed |= {r.question.id: told[_key(r, by)].why for r in some if _key(r, by) not in heard}
            _append(folder / FILE, heard)
            known |= heard
            progress.update(len(some))
    found = {reply.question.id: known[_key(reply, by)] for reply in asked if _key(reply, by) in known}
    return Judged([_final(reply, found) for reply in replies], found, failed, _report(asked, found, failed, by))


def _final(reply: Reply, found: Mapping[str, Verdict]) -> Reply:
    verdict = found.get(reply.question.id)
    return reply if verdict is None or verdict.agrees is None else replace(reply, correct=verdict.agrees)


def _report(
    asked: Sequence[Reply], found: Mapping[str, Verdict], failed: Mapping[str, str], by: Judge
) -> dict[str, Any]:
    both = [(reply.correct, found[reply.question.id].agrees) for reply in asked if reply.question.id in found]
    return {
        "model": by.model,
        "asked": len(asked),
        "failed": len(failed),
        "agreement": agreement([rules for rules, _ in both], [said for _, said in both]).to_json(),
    }


def _unheard(verdict: Verdict) -> bool:
    """The judge gave no reply, as :func:`~opd_recipes.eval.judge.judge` says it: to be asked again."""
    return verdict.agrees is None and verdict.why.startswith("not judged")


def _key(reply: Reply, by: Judge) -> str:
    """What a verdict depends on."""
    return hashlib.sha256(f"{by.model}\n{prompt(case_of(reply))}".encode("utf-8", "surrogatepass")).hexdigest()


def _read(path: Path) -> dict[str, Verdict]:
    """Verdicts by key; a line that a kill has torn, or that is damaged, is asked for again."""
    found: dict[str, Verdict] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
            found[entry["key"]] = Verdict(entry["agrees"], entry["why"])
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _append(path: Path, verdicts: Mapping[str, Verdict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        # What a kill has torn must not run into the next line.
        if file.tell() and path.read_bytes()[-1:] != b"\n":
            file.write(b"\n")
        file.writelines(json.dumps({"key": key, **asdict(v)}).encode() + b"\n" for key, v in verdicts.items())
