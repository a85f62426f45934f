"""Replies to values. Whatever is not plainly what was asked for becomes a :class:`RowFault` with its reason."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from data_prep.rows import RowFault, show
from data_prep.synthesize.replies import REFUSAL_INSIDE, Reply, clean_text, json_value, texts
from opd_recipes.scoring import normalise
from opd_recipes.view_steps import Box

CONVENTIONS = ("qwen1000", "pixels", "normalised")
CHECKS = ("answerable", "unique", "consistent", "clear")
LETTERS = "ABCDEFGHIJ"
MAX_NAME = 80
MAX_QUESTION = 400
MAX_ANSWER = 120

#: Answers that say that there is none (after :func:`canonical`).
_NO_ANSWER = {"unanswerable", "unknown", "cannot tell", "can't tell", "not visible", "无法回答", "不知道"}
_CJK_EDGE = "。，、；：！？「」『』《》“”‘’（）…"


def object_name(entry: Any) -> str:
    """One object of the list; it goes into later prompts as it stands."""
    return clean_text(entry, "object", MAX_NAME)


def repeated(names: Sequence[str]) -> set[str]:
    """Names (lower case) that are listed more than once: nobody knows whether such an object appears once."""
    return {name for name, count in Counter(name.casefold() for name in names).items() if count > 1}


def box(reply: Reply, convention: str, sent: tuple[int, int], original: tuple[int, int]) -> Box:
    """The one box of a reply, in whole pixels of the original upright image.

    Accepted: ``{"bbox_2d": [x0, y0, x1, y1], ...}`` (or ``bbox``), alone or as the only entry of a
    list, or the bare four numbers.

    Args:
        reply: The model's.
        convention: ``qwen1000`` (0 to 1000 of each side), ``pixels`` (of the image as sent) or ``normalised`` (0 to 1).
        sent: Width and height of the image as sent, in pixels.
        original: Width and height of the original.

    Raises:
        RowFault: Not exactly one box, or a box that is empty, outside the image or plainly of another convention.
    """
    value = json_value(reply)
    found = [value] if isinstance(value, dict) or _four_numbers(value) else value
    if len(found) != 1:
        raise RowFault(f"{len(found)} boxes for one object; exactly one is needed")
    entry = found[0]
    if isinstance(entry, dict):
        keys = [key for key in ("bbox_2d", "bbox") if key in entry]
        if len(keys) != 1:
            raise RowFault(f"the reply is {show(entry)}; asked for was one bbox_2d")
        entry = entry[keys[0]]
    if not _four_numbers(entry):
        raise RowFault(f"the box is {show(entry)}; it must be four numbers")
    x0, y0, x1, y1 = (float(number) for number in entry)
    width, height = {"qwen1000": (1000, 1000), "pixels": sent, "normalised": (1, 1)}[convention]
    if x1 <= x0 or y1 <= y0:
        raise RowFault(f"the box {entry} is empty: x0 < x1 and y0 < y1 must hold")
    if x0 < 0 or y0 < 0 or x1 > width or y1 > height:
        raise RowFault(
            f"the box {entry} lies outside 0 to {width}, 0 to {height} ({convention}); right --box-convention?"
        )
    if convention != "normalised" and max(x1, y1) <= 1:
        raise RowFault(f"the box {entry} looks normalised, but --box-convention is {convention}")
    sx, sy = original[0] / width, original[1] / height
    edge = 1e-6  # what scaling adds to a whole pixel is no pixel
    return (
        float(max(0, math.floor(x0 * sx + edge))),
        float(max(0, math.floor(y0 * sy + edge))),
        float(min(original[0], math.ceil(x1 * sx - edge))),
        float(min(original[1], math.ceil(y1 * sy - edge))),
    )


def _four_numbers(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 4:
        return False
    return all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) < 1e9 for v in value)


def question_list(reply: Reply, count: int) -> list[Any]:
    """Exactly ``count`` questions, each still to be checked by :func:`question`."""
    found = texts(reply, "questions")
    if len(found) != count:
        raise RowFault(f"{len(found)} questions instead of {count}")
    return found


def question(entry: Any, language: str) -> str:
    """One question.

    Raises:
        RowFault: As :func:`clean_text`, it refuses, does not end in a question mark, or is in another language.
    """
    text = clean_text(entry, "question", MAX_QUESTION)
    if REFUSAL_INSIDE.match(text):
        raise RowFault(f"the model refused: {show(text)}")
    if not text.endswith(("?", "？")):
        raise RowFault(f"no question: it does not end in a question mark: {show(text)}")
    check_language(text, language)
    return text


def check_language(text: str, language: str) -> None:
    """Judge the language by its script.

    ``en``: at least half of the letters are Latin. ``zh``: at least a third are Chinese characters (one stands for a word,
    so that a quoted Latin name does not outweigh the sentence) and there is no kana. ``any``: everything.
    """
    letters = [character for character in text if character.isalpha()]
    latin = sum(character < "\u0250" for character in letters)
    han = sum("\u3400" <= character <= "\u9fff" or "\U00020000" <= character <= "\U000323af" for character in letters)
    kana = any("\u3040" <= character <= "\u30ff" for character in letters)
    fits = {
        "any": True,
        "en": bool(letters) and 2 * latin >= len(letters),
        "zh": bool(letters) and 3 * han >= len(letters) and not kana,
    }[language]
    if not fits:
        raise RowFault(f"wrong language, --language is {language}: {show(text)}")


def check_verdict(reply: Reply) -> None:
    """Pass when the validator says true to each of :data:`CHECKS`.

    Raises:
        RowFault: A check failed, or is missing or neither true nor false.
    """
    value = json_value(reply)
    if not isinstance(value, dict):
        raise RowFault(f"the verdict is {show(value)}; asked for was a JSON object")
    undecided = [name for name in CHECKS if not isinstance(value.get(name), bool)]
    if undecided:
        raise RowFault(f"the verdict does not say true or false to: {', '.join(undecided)}")
    failed = [name for name in CHECKS if not value[name]]
    if failed:
        raise RowFault(f"the validator says: not {', not '.join(failed)}")


def answer(reply: Reply) -> str:
    """One answer; a reply without one is a fault, and no vote."""
    value = json_value(reply)
    if isinstance(value, dict) and set(value) == {"answer"}:
        value = value["answer"]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    text = clean_text(value, "answer", MAX_ANSWER)
    if canonical(text) in _NO_ANSWER or not canonical(text):
        raise RowFault(f"the model says that it cannot answer: {show(text)}")
    if REFUSAL_INSIDE.match(text):
        raise RowFault(f"the model refused: {show(text)}")
    return text


def canonical(text: str) -> str:
    """What two answers must share to agree: the rule of validation, and Chinese punctuation at the ends."""
    return normalise(normalise(text).strip(_CJK_EDGE))


def agreed_answer(replies: Sequence[Reply], least: float) -> str:
    """The answer of the majority, as it was first written.

    Args:
        replies: All samples; one without an answer counts in the denominator and votes for nothing.
        least: Least share of all samples that agree, above one half.

    Raises:
        RowFault: Fewer agree.
    """
    written: dict[str, str] = {}
    votes: Counter[str] = Counter()
    faults: list[str] = []
    for reply in replies:
        given = _or_fault(answer, reply)
        if isinstance(given, RowFault):
            faults.append(str(given))
            continue
        written.setdefault(canonical(given), given)
        votes[canonical(given)] += 1
    if not votes:
        raise RowFault(f"none of {len(replies)} replies has an answer; the first: {faults[0]}")
    top, count = votes.most_common(1)[0]
    if count < least * len(replies) - 1e-9:
        spread = ", ".join(f"{written[key]!r} {number}" for key, number in votes.most_common(3))
        raise RowFault(
            f"{count} of {len(replies)} answers agree, fewer than {least:g} of them ({spread}; {len(faults)} without an answer)"
        )
    return written[top]


def _or_fault(function: Callable[[Reply], Any], reply: Reply) -> Any:
    try:
        return function(reply)
    except RowFault as fault:
        return fault


def distractors(reply: Reply, right: str, count: int) -> list[str]:
    """Exactly ``count`` wrong options, all different from each other and from the right answer."""
    found = texts(reply, "options")
    if len(found) != count:
        raise RowFault(f"{len(found)} distractors instead of {count}")
    options = [clean_text(entry, "distractor", MAX_ANSWER) for entry in found]
    keys = [canonical(option) for option in [right, *options]]
    if len(set(keys)) < len(keys) or not all(keys):
        raise RowFault(f"a distractor is empty, repeated or the answer itself: {show([right, *options])}")
    letters = set(LETTERS[: count + 1].lower())
    if letters.intersection(keys):
        raise RowFault(
            f"an option is itself a letter, which cannot be told from the letter of an option: {show(options)}"
        )
    return options


def chosen_letter(text: str, options: Sequence[str]) -> str | None:
    """The letter that an answer to a multiple-choice question names, None when it names none.

    Accepted: the letter, alone or before its own option ("B. red"), or the option itself.
    """
    key = canonical(text)
    for letter, option in zip(LETTERS, options, strict=False):
        name, words = letter.lower(), canonical(option)
        if key in {name, words} or re.fullmatch(rf"{name}[.):]\s*{re.escape(words)}", key):
            return letter
    return None


def hits(replies: Sequence[Reply], right: str, options: Sequence[str] | None) -> int:
    """How many replies give the right answer (``options``: its letter); one without an answer does not."""
    count = 0
    for reply in replies:
        given = _or_fault(answer, reply)
        if isinstance(given, str):
            count += (chosen_letter(given, options) == right) if options else canonical(given) == canonical(right)
    return count
