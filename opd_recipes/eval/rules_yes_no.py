"""Yes or no: the rules, in their order."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
from opd_recipes.eval.statements import (
    ANSWER,
    FILLING,
    MAYBE,
    RETRACTED,
    SO,
    Said,
    doubted,
    marked_claim,
    settle,
    tails,
)

#: "No doubt", "there is no way to tell": no denial.
_IDIOM = (
    r"(?! (?:doubt|wonder|problem|idea|clue|matter|one|need|way|answer|question|image|picture|information|indication|"
    r"evidence|enough|longer)\b)"
)
_END = r"(?=[\s,.!?;:。、)\"']|$)"
_BOTH = r"(?:yes|no)(?: ?/ ?| or | and )(?:yes|no)\b|是(?:或|/)否|是也不是"
_YES = rf"(?:yes|yeah|yep|yup)\b|肯定的?|(?:是|对|有)的?{_END}|是的|存在(?!不)"
_NO = (
    rf"(?:nope|nah)\b|no\b{_IDIOM}(?!\. ?\d)|否定的?|不对|不存在|并没有|并不|不是(?!不|很|太)|没有(?!问题|办法|足够)"
    rf"|[否没不无]{_END}"
)
_WORD = re.compile(rf"[\"'(\s]{{0,3}}(?:(?P<both>{_BOTH})|(?P<yes>{_YES})|(?P<no>{_NO}))", re.IGNORECASE)
_UNSURE = re.compile(
    r"^(?:i am |i'm |it is |it's )?(?:not (?:entirely |really |quite |completely )?(?:sure|clear|certain)|unsure|uncertain|"
    r"unclear|maybe|perhaps|possibly|hard to|difficult to|possible)\b|^(?:可能|也许|或许|不确定|不清楚|不好说|不一定)",
    re.IGNORECASE,
)
_DENIED = re.compile(
    rf"\bthere(?:'s| is| are| was| were) no\b{_IDIOM}|\bthere(?: is| are| was| were)(?: not|n't)\b{_IDIOM}"
    rf"|\b(?:shows?|contains?|has|have|see) no\b{_IDIOM}"
    r"|\b(?:do|does|did)(?: not|n't) (?:contain|show|have|include|feature|depict|appear|see|exist|seem)\b"
    r"|\b(?:is|are|was|were)(?: not|n't) (?:any|visible|present|shown|depicted|in|on|an?|there|seen)\b"
    rf"|\bnot (?:visible|present|depicted)\b|^no\b{_IDIOM} [a-z]+|^not (?:really|visible|present|at all|in)\b"
    r"|没有(?!问题|办法|足够)|并无|不存在|不是(?!不|很|太)",
    re.IGNORECASE,
)
_AFFIRMED = re.compile(
    r"\bthere(?:'s| is| are| was| were) (?:indeed |clearly |actually |definitely )?"
    r"(?:an?|one|two|three|four|five|\d+|some|several|many|multiple|few)\b"
    r"|(?:图(?:片|像)?[中里]|画面[中里]|照片[中里]|确实)(?:确实)?有(?!没)|^有[一两三几\d]",
    re.IGNORECASE,
)
#: Of a longer reply what it says there is and is not is a description, in words.
_SHORT = 40


def _read(piece: str, rule: str, level: int, end: int) -> Said | None:
    """The yes or no that a piece begins with."""
    piece = piece[:300]
    start = FILLING.match(piece)
    word = _WORD.match(piece, start.end() if start else 0)
    if not word:
        return None
    why = show(piece.split("\n", 1)[0])
    if word["both"]:
        return Said(rule, level, None, f"{why} says both", end, "hedge")
    return Said(rule, level, "yes" if word["yes"] else "no", why, end)


def _claims(text: str, lead: re.Pattern[str], rule: str, level: int) -> Iterator[Said]:
    for tail, end in tails(text, lead):
        said = _read(tail, rule, level, end)
        if said and (
            level > 1 or re.match(r"\W*(?:yes|no|[是否不没对有]\w{0,2})\W*(?:$|[,.!。\n])", tail, re.IGNORECASE)
        ):
            yield said


def _last_claims(text: str) -> list[Said]:
    found = (next(_claims(text, ANSWER, "statement", 2), None), next(_claims(text, SO, "conclusion", 1), None))
    return [said for said in found if said]


def marked(text: Text, _: object) -> Extracted | None:
    return marked_claim(text, _last_claims, _read)


def stated(text: Text, _: object) -> Extracted | None:
    return settle(_last_claims(text.plain), text.plain)


def unsure(text: Text, _: object) -> Extracted | None:
    first = (text.lines or [""])[0]
    return Extracted(None, "unsure", show(first)) if _UNSURE.match(first) else None


def first_word(text: Text, _: object) -> Extracted | None:
    said = _read(text.plain, "first", 1, 0)
    if not said or not said.value:
        return said.extracted() if said else None
    start = re.match(r"\W*\w+", text.plain)
    words = RETRACTED.search(text.plain, start.end() if start else 0)
    if words:
        return Extracted(None, "taken back", f"{said.why}, then {words.group()!r} and no statement")
    for sentence in sentences(text.plain)[1:]:
        other = _read(sentence, "first", 1, 0)
        if other and other.value != said.value and re.match(r"\W*(?:yes|no)\W|\W*(?:yes|no)$", sentence, re.IGNORECASE):
            return Extracted(None, "contradiction", f"{said.why}, later {other.why}")
    return said.extracted()


def last_word(text: Text, _: object) -> Extracted | None:
    found = sentences(text.plain)
    if len(found) < 2 or not re.fullmatch(r"\W*(?:yes|no|是的?|否|不是|没有|有|对)\W*", found[-1], re.IGNORECASE):
        return None
    said = _read(found[-1], "last", 1, 0)
    return said.extracted() if said else None


def asserted(text: Text, _: object) -> Extracted | None:
    """What a short reply says there is, or is not, where all of its sentences agree."""
    if len(text.plain.split()) > _SHORT or len(text.plain) > 400:
        return None
    found: dict[str, str] = {}
    for sentence in sentences(text.plain):
        if MAYBE.search(sentence) or sentence.endswith("?") or doubted(sentence):
            continue
        denied = _DENIED.search(sentence)
        if denied:
            found["no"] = sentence
        if _AFFIRMED.search(_DENIED.sub(" ", sentence)):
            found["yes"] = sentence
    if len(found) == 2:
        return Extracted(None, "several", f"{show(found['no'])} and {show(found['yes'])}")
    return next((Extracted(value, "assertion", show(sentence)) for value, sentence in found.items()), None)


def nothing(text: Text, _: object) -> Extracted:
    maybe = MAYBE.search(text.plain)
    if maybe:
        return Extracted(None, "unsure", f"the reply says {maybe.group()!r}")
    return Extracted(None, "nothing", "no rule finds an answer")


YES_NO_RULES: tuple[Rule[object], ...] = (
    EMPTY,
    THINKING,
    Rule("box / tag", MARKED, marked),
    OPEN_BOX,
    Rule("statement / conclusion", 'the last of "the answer is yes", "答案是否"; else of "so, yes."', stated),
    Rule("unsure", 'begins with doubt: "not sure", "maybe"', unsure),
    Rule("first", 'begins with "yes", "no", "是", "有", "没有", ... ("no doubt", "是否" are others)', first_word),
    Rule("last", "the last sentence is yes or no and nothing else", last_word),
    REFUSAL,
    Rule(
        "assertion",
        'all that a short reply says there is, or is not: "there is no dog", "图中有一只狗"',
        asserted,
    ),
    Rule("nothing", UNDECIDED["nothing"], nothing),
)
