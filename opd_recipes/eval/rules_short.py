"""Short answers: the rules, in their order. The value is the reply's own words."""

from __future__ import annotations

import re

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
    show,
    strip_markup,
)
from opd_recipes.eval.statements import ANSWER, FILLING, Said, settle, tails

#: The most words of a short answer, and of a line that stands for the whole reply.
_WORDS, _LINE = 12, 5
_CHARACTERS = 40
_SUBJECT = re.compile(
    r"(?:(?:it|this|that|they|these|those|he|she|there)(?:'s| is| are| was| were| says?| reads?)"
    r"|(?:the|this|that|these|those|its|his|her|their)(?: [\w'-]{1,30}){1,8}? (?:is|are|was|were|says?|reads?))"
    r"(?: (?:most likely|probably|clearly|called|named))? (?!not\b)",
    re.IGNORECASE,
)
_HAN_SUBJECT = re.compile(r"(?:这|那|它|图中)?[\u4e00-\u9fff]{0,12}?是(?=[^不否])")
#: The end of a sentence; no full stop behind an initial or a title (St. Mary).
_STOP = re.compile(r"[!?](?=\s|$)|(?<!\bSt)(?<!\bMr)(?<!\bDr)(?<!\bMrs)(?<!\bNo)(?<!\b[A-Z])\.(?=\s|$)|[。\n]")
_INTRODUCTION = re.compile(r"(?:based on|from|in|according to) [^,]{1,60}, ", re.IGNORECASE)
_CHAT = re.compile(r"\b(?:i|hope|let|please|know|note)\b", re.IGNORECASE)


def tidy(text: str) -> str:
    """Without quotes, brackets around it and a full stop at its end."""
    text = " ".join(text.split()).rstrip(" .。!,;:").strip("\"' ")
    return text[1:-1].strip() if re.fullmatch(r"\([^()]*\)", text) else text


def is_short(text: str, words: int = _WORDS) -> bool:
    """Whether a line is no longer than a short answer; a Chinese character counts as a third of a word."""
    han = len(re.findall(r"[\u4e00-\u9fff]", text))
    return 0 < len(text) <= 200 and len(text.split()) + han / 3 <= words + 1


def marked(text: Text, _: object) -> Extracted | None:
    mark = text.mark
    value = tidy(strip_markup(mark.content)) if mark else ""
    return Extracted(value, mark.rule, show(mark.content)) if mark and value else None


def stated(text: Text, _: object) -> Extracted | None:
    for tail, end in tails(text.plain, ANSWER):
        line = FILLING.sub("", tail.split("\n", 1)[0], count=1)
        value = tidy(_STOP.split(line, maxsplit=1)[0])
        if re.match(r"(?:not|n't|不是)\b|不是", value, re.IGNORECASE) or not value:
            continue
        return settle([Said("statement", 2, value, show(line), end)], text.plain)
    return None


def whole(text: Text, _: object) -> Extracted | None:
    if len(text.lines) != 1 or not is_short(text.lines[0]) or text.lines[0].lower().startswith("the answer"):
        return None
    line, *more = [part for part in _STOP.split(text.lines[0]) if part.strip()] or [""]
    if more and not is_short(line, _LINE) or re.search(r"[?]\s*$", text.lines[0]):
        return None
    line = _INTRODUCTION.sub("", line, count=1)
    subject = _SUBJECT.match(line) or _HAN_SUBJECT.match(line)
    value = tidy(line[subject.end() :] if subject else line)
    return Extracted(value, "whole reply", show(line)) if value else None


def one_line(text: Text, _: object) -> Extracted | None:
    """Of several lines the first or the last, if it alone is as short as an answer."""
    if len(text.lines) < 2:
        return None
    ends = (("first", text.lines[0]), ("last", text.lines[-1]))
    found = [
        (rule, line) for rule, line in ends if is_short(line, _LINE) and not (_CHAT.search(line) or line.endswith(":"))
    ]
    if len(found) == 2 and tidy(found[0][1]).casefold() != tidy(found[1][1]).casefold():
        return Extracted(None, "several", f"{show(found[0][1])} and {show(found[1][1])}")
    value = tidy(found[0][1]) if found else ""
    return Extracted(value, found[0][0], show(found[0][1])) if value else None


def nothing(text: Text, _: object) -> Extracted:
    return Extracted(None, "nothing", "the reply is longer than a short answer and states none")


SHORT_RULES: tuple[Rule[object], ...] = (
    EMPTY,
    THINKING,
    Rule("box / tag", MARKED, marked),
    OPEN_BOX,
    Rule("statement", 'what follows the last "the answer is", "Answer:", "答案是", to the end of its sentence', stated),
    REFUSAL,
    Rule(
        "whole reply",
        'one line of up to 12 words, without what introduces the answer ("it is", "the sign says")',
        whole,
    ),
    Rule("first / last", "the first or the last line, if only one of them has up to 5 words", one_line),
    Rule("nothing", UNDECIDED["nothing"], nothing),
)
