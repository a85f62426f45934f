"""What a call gave, and the JSON in it.

Accepted around the JSON, because models add it and it changes no value: thinking that ends in ``</think>``, prose before and
after, one code fence, commas before a closing bracket. Not accepted, because more than one reading is possible or the end is
missing: two JSON values, single quotes (an apostrophe would end the text), repeated keys, NaN, a reply that was cut off.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from data_prep.rows import PLACEHOLDER, RESERVED, RowFault, show

MAX_CHARACTERS = 20_000

#: Some templates open the block in the prompt, so that only its end is in the reply.
_THINKING = re.compile(r"\A.*?</think>", re.DOTALL)
_FENCE = re.compile(r"```[A-Za-z0-9]*[ \t]*\n(.*?)```", re.DOTALL)
_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[\]}])', re.DOTALL)
_REFUSED = (
    r"i['’]?m (very )?sorry|i am sorry|i apologi[sz]e|i can(not|['’]t)|i am unable|i['’]?m unable|as an ai|"
    "抱歉|对不起|我无法|我不能"
)
#: The start of a reply that refuses. Not of a JSON value: "Sorry, we are closed" is a good answer about a sign.
_REFUSAL = re.compile(rf"\A[\s\"'“*]*(sorry\b|{_REFUSED})", re.IGNORECASE)
REFUSAL_INSIDE = re.compile(rf"\A({_REFUSED})", re.IGNORECASE)


@dataclass(frozen=True)
class Reply:
    """What a finished call gave.

    Attributes:
        text: The message; empty when the server sent none.
        finish_reason: The server's: ``stop``, ``length``, ``content_filter``, ...
        prompt_tokens: As the server counts them; None when it does not say.
        completion_tokens: As above.
        seconds: From sending the request to its last byte.
    """

    text: str
    finish_reason: str | None = "stop"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0


def json_value(reply: Reply) -> Any:
    """The one JSON array or object of a reply.

    Raises:
        RowFault: It was cut off, is empty, refuses, or has no JSON or more than one.
    """
    if reply.finish_reason == "length":
        raise RowFault("the reply was cut off (finish_reason length); raise --max-tokens")
    if reply.finish_reason == "content_filter":
        raise RowFault("the server's content filter stopped the reply")
    if len(reply.text) > MAX_CHARACTERS:
        raise RowFault(f"the reply has {len(reply.text)} characters, more than {MAX_CHARACTERS}")
    text = _THINKING.sub("", reply.text, count=1).strip()
    if not text:
        raise RowFault("the reply is empty")
    if "<think>" in text:
        raise RowFault("the reply's thinking has no end; switch thinking off (--extra-body) or raise --max-tokens")
    if _REFUSAL.match(text):
        raise RowFault(f"the model refused: {show(text)}")
    fenced = _FENCE.findall(text)
    if len(fenced) > 1:
        raise RowFault(f"the reply has {len(fenced)} fenced blocks; which one counts is undecided")
    return _only_value(fenced[0] if fenced else text)


def _only_value(text: str) -> Any:
    start = _bracket(text, 0)
    if start is None:
        raise RowFault(f"the reply has no JSON: {show(text)}")
    try:
        value, end = _decode(text, start)
    except RowFault:
        text = _COMMA.sub(lambda match: match[1] or "", text[start:])
        start = 0
        value, end = _decode(text, start)
    again = _bracket(text, end)
    if again is not None:
        raise RowFault(f"the reply goes on with a second bracket after its JSON: {show(text[again:])}; undecided")
    return value


def _bracket(text: str, start: int) -> int | None:
    found = [at for at in (text.find("[", start), text.find("{", start)) if at >= 0]
    return min(found) if found else None


def _decode(text: str, start: int) -> tuple[Any, int]:
    try:
        value, end = _DECODER.raw_decode(text, start)
        json.dumps(value, ensure_ascii=False).encode()  # fails on half of a surrogate pair, which parquet cannot hold
    except (ValueError, RecursionError) as error:
        cause = error.msg if isinstance(error, json.JSONDecodeError) else str(error)[:80]
        raise RowFault(f"the reply's JSON is broken ({cause}): {show(text[start:])}") from error
    return value, end


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError("a key is repeated")
    return dict(pairs)


def _not_finite(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_no_repeats, parse_constant=_not_finite)


def clean_text(value: Any, what: str, longest: int) -> str:
    """Text on one line that a prompt can hold.

    Raises:
        RowFault: It is no text, is empty or too long, or has what a model would not read as text.
    """
    if not isinstance(value, str):
        raise RowFault(f"the {what} is {show(value)}, not text")
    text = " ".join(value.split())
    if not text:
        raise RowFault(f"the {what} is empty")
    if len(text) > longest:
        raise RowFault(f"the {what} has {len(text)} characters, more than {longest}: {show(text)}")
    if not text.isprintable():
        raise RowFault(f"the {what} has control characters: {show(text)}")
    reserved = RESERVED.search(text)
    if PLACEHOLDER in text or reserved:
        raise RowFault(
            f"the {what} contains {reserved[0] if reserved else PLACEHOLDER}, which is no text for the model"
        )
    return text


def texts(reply: Reply, key: str) -> list[Any]:
    """The entries of a JSON array, or of the array under ``key`` of a JSON object."""
    value = json_value(reply)
    if isinstance(value, dict) and set(value) == {key}:
        value = value[key]
    if not isinstance(value, list):
        raise RowFault(f"the reply is {show(value)}; asked for was a JSON list of {key}")
    return value
