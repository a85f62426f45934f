"""From a model's reply to the answer it gives, by an ordered list of named rules, or "undecided": counted, never guessed.

No rule knows the right answer. English and Chinese. ``docs/extraction.md`` has the rules as tables.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from opd_recipes.eval.numerals import find_numbers, read_number
from opd_recipes.eval.option_text import Options
from opd_recipes.eval.reply_text import UNDECIDED, Extracted, Rule, Text, read_reply, spell, strip_markup
from opd_recipes.eval.rules_choice import CHOICE_RULES
from opd_recipes.eval.rules_number import NUMBER_RULES
from opd_recipes.eval.rules_short import SHORT_RULES
from opd_recipes.eval.rules_yes_no import YES_NO_RULES
from opd_recipes.registry import RecipeError

__all__ = [
    "RULES",
    "UNDECIDED",
    "Extracted",
    "Rule",
    "choice",
    "matches_number",
    "matches_text",
    "number",
    "short",
    "yes_no",
]

#: Kind of question -> its rules, in their order.
RULES: dict[str, tuple[Rule[Any], ...]] = {
    "choice": CHOICE_RULES,
    "yes_no": YES_NO_RULES,
    "number": NUMBER_RULES,
    "short": SHORT_RULES,
}


def choice(
    reply: str | None, options: Mapping[str, str], *, truncated: bool = False, thinking_opened: bool = False
) -> Extracted:
    """Multiple choice: the value is one of the options' letters.

    Args:
        reply: The model's, with its thinking if it has any; None is an empty one.
        options: Letter (A to Z) -> text; a text may be empty.
        truncated: The reply ended at its token limit: its last, unfinished sentence is not read.
        thinking_opened: The chat template opened the thinking in the prompt: without a closing tag, all is thinking.

    Raises:
        RecipeError: There are no options, or one is not named by a letter from A to Z.
    """
    return _apply("choice", read_reply(reply, truncated, thinking_opened), Options(options))


def yes_no(reply: str | None, *, truncated: bool = False, thinking_opened: bool = False) -> Extracted:
    """The value is ``yes`` or ``no``. Arguments as of :func:`choice`."""
    return _apply("yes_no", read_reply(reply, truncated, thinking_opened), None)


def number(reply: str | None, *, truncated: bool = False, thinking_opened: bool = False) -> Extracted:
    """The value is a decimal number, e.g. ``1234.5``, ``-3`` or ``45%``; units are left out. Arguments as of :func:`choice`."""
    return _apply("number", read_reply(reply, truncated, thinking_opened), None)


def short(reply: str | None, *, truncated: bool = False, thinking_opened: bool = False) -> Extracted:
    """The value is the text of the answer as the reply has it, without what introduces it. Arguments as of :func:`choice`."""
    return _apply("short", read_reply(reply, truncated, thinking_opened), None)


def _apply(kind: str, text: Text, asked: Any) -> Extracted:
    return next(found for rule in RULES[kind] if (found := rule.find(text, asked)))


def matches_number(
    value: str, reference: str | int | float | Decimal, tolerance: float = 0.0, absolute: float = 0.0
) -> bool:
    """Whether two numbers agree: |value - reference| <= max(tolerance x |reference|, absolute).

    Where only one of them is a percentage, 45% agrees with 45 and with 0.45: questions ask for both. Units are not compared.

    Args:
        value: Of :func:`number`.
        reference: A number, or text with one ("1,234 kg").
        tolerance: Share of the reference, e.g. 0.05 (the relaxed accuracy of ChartQA, arXiv 2203.10244, section 5).
        absolute: In the reference's own unit.

    Raises:
        RecipeError: The reference is no number, or a tolerance is negative.
    """
    if not (tolerance >= 0 and absolute >= 0):
        raise RecipeError(f"tolerance {tolerance}, absolute {absolute}: both must be 0 or more")
    said, right = read_number(value), read_number(str(reference))
    if right is None:
        raise RecipeError(f"reference {reference!r}: it must have exactly one number")
    if said is None:
        return False
    near = max(Decimal(str(tolerance)) * abs(right.value), Decimal(str(absolute)))
    readings = [(said.value, near, right.value)]
    if said.percent != right.percent:
        hundredth = Decimal("0.01")
        if said.percent:
            readings.append((said.value * hundredth, near, right.value))
        else:
            readings.append((said.value, near * hundredth, right.value * hundredth))
    return any(abs(found - wanted) <= limit for found, limit, wanted in readings)


_ARTICLES = re.compile(r"\b(?:the|an?)\b ?")
_BETWEEN = re.compile(r"[^\w%°.+-]+|(?<!\d)\.|\.(?!\d)|(?<=[^\W\d])-(?=\w)|_")
_UNIT_GAP = re.compile(r"(?<=\d) (?=[a-z%°])")


def normalise_text(text: str) -> str:
    """For comparison: one width and case of letters, no markup, articles or punctuation (but inside of numbers)."""
    text = unicodedata.normalize("NFKC", strip_markup(spell(text))).casefold()
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\b(?:[a-z]\.){2,9}", lambda initials: initials.group().replace(".", ""), text)
    bare = " ".join(_BETWEEN.sub(" ", text.replace("'", "")).split())
    return _UNIT_GAP.sub("", _ARTICLES.sub("", bare).strip() or bare) or text.strip()


def matches_text(value: str, references: str | Sequence[str]) -> bool:
    """Whether a short answer is one of the references, after :func:`normalise_text`; "three" is "3".

    Raises:
        RecipeError: There are no references, or one is empty.
    """
    accepted = [references] if isinstance(references, str) else list(references)
    if not accepted or not all(str(reference).strip() for reference in accepted):
        raise RecipeError(f"references {accepted!r}: at least one is needed, and none may be empty")
    return any(_same(value, str(reference)) for reference in accepted)


def _same(value: str, reference: str) -> bool:
    said, right = normalise_text(value), normalise_text(reference)
    return said == right or (_number_alone(said) is not None and _number_alone(said) == _number_alone(right))


def _number_alone(text: str) -> str | None:
    """The number that all of a text is."""
    found = find_numbers(text)
    whole = len(found) == 1 and found[0].number is not None and (found[0].start, found[0].end) == (0, len(text))
    return str(found[0].number) if whole else None
