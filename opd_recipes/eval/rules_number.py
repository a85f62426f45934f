"""Numbers: the rules, in their order."""

from __future__ import annotations

import re
from collections.abc import Iterator

from opd_recipes.eval.numerals import Found, find_numbers
from opd_recipes.eval.reply_text import (
    EMPTY,
    MARKED,
    OPEN_BOX,
    REFUSAL,
    THINKING,
    UNDECIDED,
    Extracted,
    Rule,
    Text,
    sentences,
    show,
)
from opd_recipes.eval.statements import ANSWER, MAYBE, SO, Said, doubted, marked_claim, settle, tails

#: Of a longer reply only a statement or a conclusion is an answer, in words.
_SHORT = 25
_COUNTED = re.compile(
    rf"{ANSWER.pattern}|\b(?:total|sum|count|number|value|result)(?: number| count)?(?: of [\w' -]{{1,60}}?)?"
    r"(?: is| are| was| comes to|:|=) ?:?"
    r"|\b(?:a|in) total of |\b(?:i|we) (?:count|counted|find|found) |(?:共有|一共有?|总共有?|总计|合计)[为是]?",
    re.IGNORECASE,
)
_TOTAL = re.compile(rf"{SO.pattern}|\b(?:in total|altogether|in all)\b|一共|总共|共有", re.IGNORECASE)
_BOUND = re.compile(
    r"\b(?:at least|at most|more than|less than|fewer than|up to|no more than|over|under|above|below|or more|or fewer|"
    r"or less)\b|至少|最多|超过|不到|以上|以下|多于|少于",
    re.IGNORECASE,
)
_HEAD = re.compile(
    r",(?!\d)|;|\(|。|[.!?](?=\s|$)|\n| (?:because|since|as|including|consisting|with|where)\b", re.IGNORECASE
)
_DENIED = re.compile(r"\bnot\b|n't\b|不是", re.IGNORECASE)
_NOT = re.compile(r"(?:not|n't|不是)\b", re.IGNORECASE)
#: Sentences that begin with "no" and count nothing.
_NO_COUNT = (
    r"(?!doubt|wonder|problem|idea|clue|matter|need|way|answer|(?:visible )?numbers?|digits?|image|picture|clear)"
)
_NONE = re.compile(
    rf"^(?:none|nothing|(?:there are )?no {_NO_COUNT}\w+(?: [\w']+){{0,10}}|没有|无|一个也没有)[.。!]?$", re.IGNORECASE
)


def _read(piece: str, rule: str, level: int, end: int) -> Said | None:
    """The one number of a piece; of an equation, what stands behind its last equals sign."""
    _, equals, behind = piece.rpartition("=")
    found = find_numbers(behind if equals and find_numbers(behind) else piece)
    if not found:
        return None
    bound = _BOUND.search(piece)
    if bound:
        return Said(rule, level, None, f"{show(piece)}: {bound.group()!r} is a bound", end, "hedge")
    if len({number.number for number in found}) > 1 or found[0].number is None:
        return Said(rule, level, None, f"{show(piece)} has several numbers", end, "several")
    return Said(rule, level, str(found[0].number), show(piece), end)


def _statements(text: str) -> Iterator[Said]:
    for tail, end in tails(text, _COUNTED):
        if _NOT.match(tail):
            continue
        said = _read(_HEAD.split(tail, maxsplit=1)[0], "statement", 2, end)
        if said:
            yield said


def _conclusions(text: str) -> list[Said]:
    """The last sentence, if it says that it concludes."""
    last = (sentences(text) or [""])[-1]
    start = text.rfind(last)
    if not _TOTAL.search(last) or last.endswith("?") or MAYBE.search(last):
        return []
    so = list(SO.finditer(last))
    clauses = [clause for clause in re.split(r",(?!\d)|;", last) if _TOTAL.search(clause)]
    closing = last[so[-1].end() :] if so and find_numbers(last[so[-1].end() :]) else (clauses or [last])[-1]
    said = _read(closing, "conclusion", 1, max(start, 0) + len(last))
    return [said] if said else []


def _last_claims(text: str) -> list[Said]:
    statement = next(_statements(text), None)
    return [said for said in (statement, *_conclusions(text)) if said]


def marked(text: Text, _: object) -> Extracted | None:
    return marked_claim(text, _last_claims, _read)


def stated(text: Text, _: object) -> Extracted | None:
    return settle(_last_claims(text.plain), text.plain)


def _plainly(text: Text) -> list[str]:
    """Sentences of a short reply that state something."""
    if len(text.plain.split()) > _SHORT or len(text.plain) > 400:
        return []
    return [
        s for s in sentences(text.plain) if not (s.endswith("?") or MAYBE.search(s) or doubted(s) or _DENIED.search(s))
    ]


def only(text: Text, _: object) -> Extracted | None:
    said = _read(" ".join(_plainly(text)), "only number", 1, 0)
    return settle([said], "") if said else None


def none(text: Text, _: object) -> Extracted | None:
    stated = _plainly(text)
    found = _NONE.match(stated[0]) if len(stated) == 1 else None
    return Extracted("0", "none", show(stated[0])) if found else None


def ends_with_number(text: Text, _: object) -> Extracted | None:
    """A last line that is a number and a word or two."""
    if len(text.lines) < 2 or len(text.lines[-1].split()) > 3:
        return None
    said = _read(text.lines[-1], "last", 1, 0)
    return settle([said], "") if said else None


def nothing(text: Text, _: object) -> Extracted:
    found: list[Found] = find_numbers(text.plain[:20_000])
    if len(found) > 1:
        return Extracted(None, "several", f"the reply has {len(found)} numbers, and concludes nothing")
    maybe = MAYBE.search(text.plain)
    if found and maybe:
        return Extracted(None, "unsure", f"the reply says {maybe.group()!r}")
    return Extracted(None, "nothing", "no rule finds an answer")


NUMBER_RULES: tuple[Rule[object], ...] = (
    EMPTY,
    THINKING,
    Rule("box / tag", MARKED, marked),
    OPEN_BOX,
    Rule(
        "statement / conclusion",
        'the last of "the answer is 7", "a total of 7", "共有7"; else of "so 7", "7 in total"',
        stated,
    ),
    Rule("last", "the last line is a number and at most two words", ends_with_number),
    REFUSAL,
    Rule("only number", 'the one number of a short reply; of "3 + 4 = 7" what the equation ends in', only),
    Rule("none", 'a reply that is only "none", "no cars", "没有": 0', none),
    Rule("nothing", UNDECIDED["nothing"], nothing),
)
