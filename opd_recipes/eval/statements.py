"""Forms of words by which a reply says "this is my answer", in doubt or not, and takes it back."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from opd_recipes.eval.reply_text import Extracted, Text, boxes, sentence_around, show, strip_markup

#: Words between "answer" and "is"; no letter of an option ("option A is red" states nothing).
_WORDS = r"(?:,? (?!not\b|cannot|can't|but\b|isn't|if\b|or\b|choices?\b|(?-i:[A-HJ-Z])\b)\"?[\w'-]{1,30}(?:\?\")?\"?){0,8}?,?"
_IS = r"(?: (?:is|seems to be|appears to be|was|would be|should be|must be|will be|has to be)\b ?:?| ?(?::|=|->|→)| - )"
_CHINESE = r"(?:答案|正确选项|正确的选项|正确选择|最终选择|正确的)(?:应该|应当|应)?就?(?:是|为|选择?|:|=)?[\": )]*"
_HEADING = r"(?:^|(?<=\n))(?:the |my )?(?:final |correct |best )?answer(?=\n)"
_SO = r"\b(?:so|thus|therefore|hence|consequently|accordingly|in conclusion|to conclude|conclusion|overall)[,:]? "
_SO_CHINESE = r"(?:所以|因此|故|综上所述|综上|由此可见|我认为|我觉得)[,:]? ?(?:应该|应|我认为)?(?:是|为)?"

#: "The answer is", of any kind.
ANSWER = re.compile(rf"\banswer[\"']?{_WORDS}{_IS}|{_HEADING}|{_CHINESE}", re.IGNORECASE)
#: The same and more for options.
CHOSEN = re.compile(
    rf"\b(?:answer|choice|option|selection|guess|match)[\"']?{_WORDS}{_IS}|{_HEADING}|{_CHINESE}"
    r"|\bans(?:wer)?[.:]? (?=[(\"]?[A-Z]\b(?! (?:is|was|can|does|and|or|says)))"
    r"|\b(?:i|we)(?:'m| am| are) going with (?:option |answer )?"
    r"|\b(?:i|we)(?: would| will|'d|'ll)? (?:choose|pick|select|go with|go for|say|opt for)(?: option| answer)? "
    r"|(?<![不可单多挑备])选(?![项手举自取中了])(?:择|的是)?",
    re.IGNORECASE,
)
#: A closing that more may follow than an answer.
CONCLUSION = re.compile(
    rf"{_SO}(?:(?:the|correct|right|best|option|answer|choice|must be|is) )*"
    r"|\b(?:it|this|that)(?:'s| is| must be| should be| has to be) |\b(?:i|we) (?:think|believe|guess),? (?:it's |it is )?"
    rf"|{_SO_CHINESE}",
    re.IGNORECASE,
)
#: A conclusion only in the last sentence.
MATCHED = re.compile(
    r"\b(?:corresponds to|corresponding to|matches|fits|is consistent with) (?=(?:option|choice|answer) )", re.I
)
SO = re.compile(rf"{_SO}|{_SO_CHINESE}", re.IGNORECASE)
#: What may stand between "the answer is" and the answer.
FILLING = re.compile(
    r"(?:(?:clearly|definitely|probably|most likely|likely|therefore|thus|simply|indeed|just|still|actually|i think|i believe)"
    r"\b[ ,:]*){0,4}",
    re.IGNORECASE,
)
RETRACTED = re.compile(
    r"\b(?:(?:wait|hold on|correction)(?=[,.:;!?]| no\b| -)|hmm+|on second thought|scratch that|i was wrong|my mistake)\b"
    r"|\b(?:(?:that|this)(?:'s| is) "
    r"(?:wrong|incorrect|not right|not correct)|actually,? no|no, (?:it|that|this))\b|不对[,。!]|等等[,。!]|等一下|更正",
    re.IGNORECASE,
)
MAYBE = re.compile(
    r"\b(?:might|may|could|possibly|perhaps|maybe|not sure|unsure|either)\b|可能|也许|或许", re.IGNORECASE
)
_CONDITION = re.compile(r"\b(?:if|unless|whether|suppose|assuming)\b|如果|若|假如|是否", re.IGNORECASE)
_NO_CONDITION = re.compile(
    r"\bif (?:i|we|you) (?:had|have|must|need|look|zoom|count|see|consider|observe|examine)\b", re.IGNORECASE
)
_CHINESE_NOT = re.compile(r"不[应能该可会要]?该?$")


class Said(NamedTuple):
    """An answer in a reply.

    Attributes:
        rule: The form of words.
        level: How strong it is: 3 a mark, 2 a statement, 1 a conclusion.
        value: The answer; None where the words are no answer to one question ("A or B").
        why: The words.
        end: Where its form of words ends.
        fault: Why it has no value.
    """

    rule: str
    level: int
    value: str | None
    why: str
    end: int
    fault: str = ""

    def extracted(self) -> Extracted:
        return Extracted(self.value, self.fault or self.rule, self.why)


#: So many such forms of words are read, from the end: the time that a reply takes grows with its length only.
_MOST = 100


def last_found(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Where a pattern is found, the last first."""
    return list(deque(pattern.finditer(text), maxlen=_MOST))[::-1]


def tails(text: str, lead: re.Pattern[str]) -> Iterator[tuple[str, int]]:
    """What follows each such form of words (300 characters at most), the last first.

    Left out are conditions ("if it were red, the answer would be ..."), questions, and what is denied in Chinese.
    """
    for found in last_found(lead, text):
        before, _ = sentence_around(text, found.start())
        tail = text[found.end() : found.end() + 300].lstrip(" :\n")
        if not (doubted(before) or _CHINESE_NOT.search(before) or _asks(tail)):
            yield tail, found.end()


def doubted(before: str) -> bool:
    """Whether a sentence makes a condition."""
    return bool(_CONDITION.search(before)) and not _NO_CONDITION.search(before)


def _asks(tail: str) -> bool:
    stop = re.search(r"[!?。\n]|[.](?=\s[A-Z])", tail)
    return stop is not None and stop.group() == "?"


def settle(found: list[Said], text: str) -> Extracted | None:
    """The strongest claim, unless a weaker and later one says otherwise, or it is taken back.

    Args:
        found: The last claim of each level, the strongest first.
        text: What their ends count in.
    """
    if not found:
        return None
    first = found[0]
    for later in found[1:]:
        if later.end > first.end and later.value != first.value:
            if RETRACTED.search(text, first.end, later.end):
                return _unless_taken_back(later, text)
            return Extracted(None, "contradiction", f"{first.why}, later {later.why}")
    return _unless_taken_back(first, text)


def _unless_taken_back(said: Said, text: str) -> Extracted:
    words = RETRACTED.search(text, said.end)
    if words:
        return Extracted(None, "taken back", f"{said.why}, then {words.group()!r} and no later statement")
    return said.extracted()


def other_box(text: Text) -> str | None:
    """The content of the box before the last, where only "or" stands between them."""
    for first, second in pairwise(boxes(text.raw)[0][-2:]):
        between = strip_markup(text.raw[first.end : second.start]).strip(" ,.").lower()
        if between in ("or", "and", "/", "或", "和") and first.content != second.content:
            return first.content
    return None


def marked_claim(
    text: Text, last_claims: Callable[[str], list[Said]], read: Callable[[str, str, int, int], Said | None]
) -> Extracted | None:
    """What the last box or answer tag says, unless there is another box or a later statement says otherwise.

    Args:
        last_claims: The kind's statements in a text, strongest first.
        read: The kind's value of a text, with the rule's name, its level and its end.
    """
    mark = text.mark
    if not mark:
        return None
    content = strip_markup(mark.content)
    said = next(iter(last_claims(content)), None) or read(content, mark.rule, 3, 0)
    if not said:
        return None
    other = other_box(text) if mark.rule == "box" else None
    if other:
        return Extracted(None, "hedge", f"two boxes, {show(other)} or {show(content)}")
    rest = strip_markup(text.raw[mark.end :])
    return settle([said._replace(rule=mark.rule, level=3, end=0), *last_claims(rest)], rest)
