"""A reply made ready for the rules: thinking removed, one spelling of punctuation, markup taken off, marked answers found."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

_Asked = TypeVar("_Asked")


@dataclass(frozen=True)
class Extracted:
    """The answer that a reply gives.

    Attributes:
        value: The answer; None where the reply is undecided.
        rule: Name of the rule that decided, also where it decided that there is no answer: undecided replies are counted by it.
        why: One line for a person, with the words of the reply that the rule rests on.
    """

    value: str | None
    rule: str
    why: str


@dataclass(frozen=True)
class Rule(Generic[_Asked]):
    """One entry of a kind's ordered list: the first rule that returns something decides.

    Attributes:
        name: What :attr:`Extracted.rule` says of an answer that it finds; several names stand with " / " between them.
        reads: What it looks for, for the documentation.
        find: From the reply and what was asked (the options; None for other kinds) to a result, or None to pass on.
    """

    name: str
    reads: str
    find: Callable[[Text, _Asked], Extracted | None]


class Mark(NamedTuple):
    """An answer between marks (a box or answer tags): its text and where in :attr:`Text.raw` it begins and ends."""

    rule: str
    content: str
    start: int
    end: int


@dataclass(frozen=True)
class Text:
    """A reply without its thinking.

    Attributes:
        raw: One spelling of punctuation, markup kept.
        cut: The reply ended at its token limit.
        open: Its thinking has no end.
    """

    raw: str
    cut: bool = False
    open: bool = False

    @cached_property
    def plain(self) -> str:
        """Without markup and blank lines; of a cut reply only whole sentences."""
        text = strip_markup(self.raw)
        return whole_sentences(text) if self.cut else text

    @cached_property
    def lines(self) -> list[str]:
        return self.plain.split("\n") if self.plain else []

    @cached_property
    def mark(self) -> Mark | None:
        """The marked answer that ends last."""
        return last_mark(self.raw, self.cut)


#: Reasons for which a reply is undecided: what :attr:`Extracted.rule` says then.
UNDECIDED = {
    "empty": "the reply, or what follows its thinking, is empty",
    "thinking": "the thinking is not finished",
    "open box": r"`\boxed{` is not closed",
    "refusal": "the reply says that it cannot see, tell or know",
    "hedge": 'two answers, or a bound: "A or B", "A/B", "at least 5", "yes and no"',
    "disagree": "the letter of one option with the text of another",
    "no such option": "a letter that the question does not have",
    "contradiction": "two statements of which the later one does not take the earlier one back",
    "taken back": 'a statement, then "wait", "that is wrong", and no later statement',
    "negation": "only what the answer is not",
    "several": "more than one option or number, and no conclusion",
    "unsure": '"not sure", "maybe"',
    "nothing": "none of the rules finds an answer",
}

# Thinking

_TAG = re.compile(r"<(/?)(?:think|thinking|thought)>|◁(/?)think▷", re.IGNORECASE)
_TOKENS = re.compile(r"<\|(?:im_end|endoftext|end|eot_id|im_start)\|>|</s>|<eos>|<end_of_turn>")


def read_reply(reply: str | None, truncated: bool = False, thinking_opened: bool = False) -> Text:
    """Take the thinking off a reply.

    What stands before a closing tag that was never opened is thinking too: some chat templates open it in the prompt.

    Args:
        reply: As the model gave it; None is an empty one.
        truncated: It ended at its token limit.
        thinking_opened: The chat template opened the thinking: without a closing tag all of the reply is thinking.
    """
    reply = reply or ""
    kept: list[str] = []
    inside, position = thinking_opened, 0
    for tag in _TAG.finditer(reply):
        closing = bool(tag.group(1) or tag.group(2))
        if not inside:
            kept = [] if closing else [*kept, reply[position : tag.start()]]
        inside, position = not closing, tag.end()
    if not inside:
        kept.append(reply[position:])
    return Text(_TOKENS.sub("", spell("".join(kept))).strip(), truncated, inside)


# Spelling

_SPELLING: dict[int, str | None] = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
_SPELLING |= dict.fromkeys(map(ord, "\u00a0\u2002\u2003\u2007\u2009\u202f\u3000\t\v\f"), " ")
_SPELLING |= dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\ufe0f\r\u00ad"), None)
_SPELLING |= dict.fromkeys(map(ord, "‘’‛´"), "'") | dict.fromkeys(map(ord, "“”„«»「」『』"), '"')
_SPELLING |= dict.fromkeys(map(ord, "【〔〖"), "(") | dict.fromkeys(map(ord, "】〕〗"), ")")
_SPELLING |= {ord("−"): "-", ord("–"): "-", ord("—"): " - ", ord("…"): "..."}
_SPELLING |= {0x24B6 + i: chr(65 + i) for i in range(26)} | {0x24D0 + i: chr(97 + i) for i in range(26)}
#: A space that no line breaks at, or an apostrophe, between groups of three digits.
_DIGIT_GROUPS = re.compile(r"(?<=\d)[\u00a0\u2009\u202f'’](?=\d{3}(?!\d))")


def spell(text: str) -> str:
    """One spelling: full-width forms as ASCII, one kind of quote, dash and space, nothing invisible."""
    return _DIGIT_GROUPS.sub("", text).translate(_SPELLING)


_LATEX_OPEN = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathbb|mathit|operatorname|boxed|fbox|bf|rm)\s?\{")
_LATEX_MARKS = re.compile(r"\\[()\[\]]|\$|\\(?:displaystyle|left|right|quad|qquad|,|;|!|:)(?![A-Za-z])")
_FRACTION = re.compile(r"\\[dt]?frac ?\{(-?\d{1,20})\} ?\{(\d{1,20})\}")
_EMPHASIS = re.compile(r"(?<![\w*])\*([^*\n]{1,200})\*(?![\w*])")
_LINE_START = re.compile(r"^ *(?:[#>]+ +|[-*+•·] +)+", re.MULTILINE)
_HTML = re.compile(r"</?(?:b|i|em|strong|u|p|br|code|answer|span|div)\s?/?>", re.IGNORECASE)


def strip_markup(text: str) -> str:
    """Markdown, HTML and LaTeX marks taken off, spaces collapsed, no blank lines."""
    text = _HTML.sub(" ", text)
    if "\\" in text:
        text = _FRACTION.sub(r"\1/\2", text).replace("\\times", "×").replace("\\cdot", "×")
        unwrapped = _LATEX_OPEN.subn("", text)
        text = _LATEX_MARKS.sub("", unwrapped[0]).replace("\\%", "%").replace("\\ ", " ")
        text = text.replace("}", "") if unwrapped[1] else text
    text = text.replace("$", "").replace("**", "").replace("__", "").replace("`", "")
    text = _LINE_START.sub("", _EMPHASIS.sub(r"\1", text))
    return "\n".join(line for line in (" ".join(part.split()) for part in text.split("\n")) if line)


# Sentences

_SENTENCE_END = re.compile(r"(?<=[!?。!?;])|(?<=[.])(?=\s)|\n")
_WHOLE = re.compile(r"[.!?](?=\s)|[。!?;\n]")


def sentences(text: str) -> list[str]:
    """Its sentences without white space around them; a full stop ends one only before white space."""
    return [part for part in (piece.strip() for piece in _SENTENCE_END.split(text)) if part]


def whole_sentences(text: str) -> str:
    """What is left when the sentence that the token limit cut is dropped."""
    end = 0
    for stop in _WHOLE.finditer(text):
        end = stop.end()
    return text[:end].rstrip()


def sentence_around(text: str, position: int, reach: int = 300) -> tuple[str, str]:
    """The sentence at a position, as what stands before it and after it; at most ``reach`` characters each way."""
    before = _SENTENCE_END.split(text[max(0, position - reach) : position])[-1]
    rest = text[position : position + reach]
    stop = re.search(r"[!?。\n]|\.(?=\s|$)", rest)
    return before, rest[: stop.end()] if stop else rest


# Marked answers

_BRACES = re.compile(r"\\boxed ?\{|\\fbox ?\{|\\.|[{}]", re.DOTALL)
_TAGS = re.compile(r"<answer>|</answer>|<\|begin_of_box\|>|<\|end_of_box\|>", re.IGNORECASE)


def boxes(text: str) -> tuple[list[Mark], bool]:
    r"""The outermost ``\boxed{...}`` in order, and whether the last one is not closed."""
    found: list[Mark] = []
    stack: list[tuple[bool, int, int]] = []
    for piece in _BRACES.finditer(text):
        token = piece.group()
        if token == "}":
            if stack:
                boxed, start, inner = stack.pop()
                if boxed:
                    while found and found[-1].start > start:
                        found.pop()
                    found.append(Mark("box", text[inner : piece.start()], start, piece.end()))
        elif token == "{" or token.startswith(("\\boxed", "\\fbox")):
            stack.append((token != "{", piece.start(), piece.end()))
    return found, any(boxed for boxed, _, _ in stack)


def tags(text: str, cut: bool) -> list[Mark]:
    """What stands between answer tags; a last tag without an end holds the rest, unless the reply was cut."""
    found: list[Mark] = []
    opened: re.Match[str] | None = None
    for tag in _TAGS.finditer(text):
        if "/" in tag.group() or "end" in tag.group():
            if opened:
                found.append(Mark("tag", text[opened.end() : tag.start()], opened.start(), tag.end()))
            opened = None
        else:
            opened = tag
    if opened and not cut:
        found.append(Mark("tag", text[opened.end() :], opened.start(), len(text)))
    return found


def last_mark(text: str, cut: bool) -> Mark | None:
    """The marked answer that ends last and is not empty."""
    marks = [mark for mark in (*boxes(text)[0], *tags(text, cut)) if strip_markup(mark.content)]
    return max(marks, key=lambda mark: mark.end, default=None)


# Rules of all kinds

MARKED = r"the last `\boxed{}` or answer tag (`<answer>`, GLM's box tokens); a later statement may contradict it"
_CAN = r"(?:can ?not|can't|could ?not|couldn't|(?:am|is|was|are|'m) (?:not able|unable) to|unable to)"
_REFUSAL = re.compile(
    rf"\b(?:i|we) (?:am |'m )?(?:sorry,? (?:but )?)?{_CAN}(?: \w+)? ?"
    r"(?:see|view|access|count|tell|determine|identify|answer|provide|help|assist|find|read|make out|"
    r"say|confirm|analy[sz]e|be sure)\b"
    rf"|\b(?:it|this|that|answer|question|image|one|information|count|number|colou?r|object|text)s?(?: \w+)? {_CAN} be "
    r"(?:determined|answered|seen|identified|read|told|confirmed|counted|found)\b"
    r"|\bit is (?:impossible|not possible) to (?:tell|say|determine|answer|see|know|identify|read)\b"
    r"|\b(?:i|we) (?:don't|do not) (?:know|have (?:access|enough|sufficient))\b|\bi'm sorry\b|\bi am sorry\b|\bas an ai\b"
    r"|^unable to\b|^cannot (?:tell|determine|answer|see)\b"
    r"|\bno (?:image|picture) (?:is|was|has been) (?:provided|given|attached)\b"
    r"|\b(?:not|insufficient|isn't) (?:enough|sufficient|any)? ?information\b"
    r"|^(?:not sure|unsure|unknown|unclear|n/a)[.!]?$"
    r"|无法(?:确定|回答|判断|看到|看清|识别|查看|得知|确认|提供|辨认)|看不(?:到|清|见)|不知道|不能(?:确定|回答|判断|识别)"
    r"|没有(?:提供|看到)?图(?:片|像)?(?:可|供|。|$)|抱歉|对不起",
    re.IGNORECASE,
)


def refused(text: str) -> str | None:
    """The words by which a reply says that it gives no answer, if it does."""
    found = _REFUSAL.search(text)
    return found.group() if found else None


def no_reply(text: Text, _: object) -> Extracted | None:
    return None if text.raw or text.open else Extracted(None, "empty", "the reply is empty (or all of it is thinking)")


def open_thinking(text: Text, _: object) -> Extracted | None:
    return Extracted(None, "thinking", "thinking not finished") if text.open else None


def open_box(text: Text, _: object) -> Extracted | None:
    r"""A last ``\boxed{`` without an end: what it was to hold is not known."""
    found, opened = boxes(text.raw)
    return (
        Extracted(None, "open box", "the last box is not closed: the reply was cut") if opened and not found else None
    )


def refusal(text: Text, _: object) -> Extracted | None:
    said = refused(text.plain)
    return Extracted(None, "refusal", f"refusal: {said!r}") if said else None


#: What the kinds have in common, each in its place of their lists.
EMPTY: Rule[Any] = Rule("empty", UNDECIDED["empty"], no_reply)
THINKING: Rule[Any] = Rule("thinking", UNDECIDED["thinking"], open_thinking)
OPEN_BOX: Rule[Any] = Rule("open box", UNDECIDED["open box"], open_box)
REFUSAL: Rule[Any] = Rule("refusal", UNDECIDED["refusal"], refusal)


def show(text: str, longest: int = 60) -> str:
    """A quotation for :attr:`Extracted.why`, on one line."""
    text = " ".join(text.split())
    return repr(text if len(text) <= longest else text[: longest - 3] + "...")
