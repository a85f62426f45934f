"""What the fields of a record mean: its prompt, its answer and its images.

Three layouts are known: ``question-answer`` (a question, its answer and its image in fields of their own),
``conversations`` (LLaVA's ``from``/``value`` turns, or ``messages`` with ``role``/``content``) and ``verl`` (``prompt``,
``images``, ``reward_model``).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from data_prep.rows import PLACEHOLDER, RESERVED, DataError, RowFault, collect, show

LAYOUTS = ("question-answer", "conversations", "verl")
QUESTIONS = ("question", "problem", "query", "instruction", "prompt")
ANSWERS = ("answer", "ground_truth", "solution", "gt_answer", "label")
IMAGES = ("images", "image", "image_path", "image_file", "img", "img_path", "file_name")
TURNS = ("conversations", "messages")
#: An answer becomes text of a prompt where a recipe tells it to the teacher.
NOT_IN_ANSWERS = re.compile(f"{PLACEHOLDER}|{RESERVED.pattern}")
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Fields:
    """Names that the user gives; None: the common ones are looked for."""

    question: str | None = None
    answer: str | None = None
    image: str | None = None


@dataclass(frozen=True)
class Pair:
    """One row of any layout.

    Attributes:
        turns: Role and text, the last one the user's; one placeholder for each image.
        answer: The reference answer, None where there is none.
        images: The entries of the record, not opened yet.
        data_source: What the record says of itself.
        later_turns: How many turns behind the answer were left out.
    """

    turns: list[dict[str, str]]
    answer: str | None
    images: list[Any]
    data_source: str | None = None
    later_turns: int = 0

    @property
    def question(self) -> str:
        return self.turns[-1]["content"].replace(PLACEHOLDER, "").strip()


@dataclass(frozen=True)
class Layout:
    """How records are read; made by :func:`detect`.

    Attributes:
        name: One of ``LAYOUTS``.
        question: Field of the question or of the turns.
        answer: Field of the answer, None where records have none.
        image: Field of the images.
        last_turn: Ask the last question of a conversation, with what was said before it, instead of the first.
        unused: Fields of the records that become no part of a row.
    """

    name: str
    question: str
    answer: str | None
    image: str
    last_turn: bool = False
    unused: tuple[str, ...] = ()

    def describe(self) -> str:
        parts = {"question": self.question, "answer": self.answer or "none", "images": self.image}
        told = ", ".join(f"{what}: {field}" for what, field in parts.items())
        return f"{self.name} ({told})" + (f"; not used: {', '.join(self.unused)}" if self.unused else "")

    def pair(self, record: dict[str, Any]) -> Pair:
        """Read one record.

        Raises:
            RowFault: With the reason for each field that cannot be used.
        """
        (said, reply, later), images = collect(
            [lambda: self._prompt(record), lambda: _image_entries(record, self.image)]
        )
        turns, answer = collect(
            [
                lambda: _with_placeholders(said, len(images), self.question),
                lambda: self._answer(record, reply),
            ]
        )
        return Pair(turns, answer, images, _own_name(record), later)

    def _prompt(self, record: dict[str, Any]) -> tuple[list[dict[str, str]], Any, int]:
        """The turns up to the question, the answer where the turns have it, and the number of turns left out."""
        value = lookup(record, self.question)
        if value is None:
            raise RowFault(f"'{self.question}' is missing; add the question")
        if self.name == "question-answer":
            if not isinstance(value, str):
                raise RowFault(f"'{self.question}' is {show(value)}; it must be text")
            return [{"role": "user", "content": value}], None, 0
        if not isinstance(value, list) or not value:
            raise RowFault(f"'{self.question}' is {show(value)}; it must be a list of turns")
        turns = collect(partial(_turn, turn, self.question) for turn in value)
        replies = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
        if self.name == "verl" or not replies:
            return turns, None, 0
        reply = replies[-1 if self.last_turn else 0]
        return turns[:reply], turns[reply]["content"], len(turns) - reply - 1

    def _answer(self, record: dict[str, Any], said: Any) -> str | None:
        answer = lookup(record, self.answer) if self.answer else said
        if answer is None:
            return None
        field = self.answer or self.question
        number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
        if not (isinstance(answer, str) or number):
            raise RowFault(f"'{field}' is {show(answer)}; the answer must be text, a number or left out")
        text = str(answer).strip()
        if reserved := NOT_IN_ANSWERS.search(text):
            raise RowFault(
                f"the answer in '{field}' contains {reserved[0]}, which a model would not read as text; remove it"
            )
        return text or None


def lookup(record: dict[str, Any], field: str) -> Any:
    """A field, or with dots one inside another (``extra_info.box``); None where there is none."""
    if field in record:
        return record[field]
    value: Any = record
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def detect(
    records: Sequence[dict[str, Any]],
    layout: str | None,
    fields: Fields,
    last_turn: bool,
    also_used: Iterable[str] = (),
) -> Layout:
    """Decide how the records of a source are read, from its first ones; never by guessing.

    Args:
        records: Some records.
        layout: What the user says, else None.
        fields: Names that the user gives.
        last_turn: See :class:`Layout`.
        also_used: Fields that the command reads besides.

    Raises:
        DataError: No layout fits, or several do; no field or several can be meant.
    """
    if not records:
        raise DataError("its first rows are all broken, so that its layout is not known; name it with --layout")
    counts = Counter(_form(record) for record in records)
    if layout is None and len(counts) > 1:
        found = ", ".join(f"{count} rows {form}" for form, count in counts.most_common())
        raise DataError(f"its first rows are of several layouts ({found}); name one with --layout")
    name = layout or next(iter(counts))
    known = sorted({key for record in records for key, value in record.items() if value is not None})
    answer = None
    if name == "question-answer":
        question = _choose(fields.question, QUESTIONS, known, "the question", "--question-field")
        answer = _choose(fields.answer, ANSWERS, known, "the answer", "--answer-field", optional=True)
    elif name == "verl":
        question = fields.question or "prompt"
        answer = fields.answer or ("reward_model.ground_truth" if "reward_model" in known else None)
    else:
        question = _choose(fields.question, TURNS, known, "the conversation", "--question-field")
        answer = fields.answer
    image = _choose(fields.image, IMAGES, known, "the image", "--image-field")
    used = {question, image, answer or "", "data_source", *also_used}
    used |= {field.split(".")[0] for field in used}
    return Layout(name, question, answer, image, last_turn, tuple(key for key in known if key not in used))


def _form(record: dict[str, Any]) -> str:
    if isinstance(record.get("prompt"), list):
        return "verl"
    return "conversations" if any(isinstance(record.get(field), list) for field in TURNS) else "question-answer"


def _choose(
    given: str | None, candidates: Sequence[str], known: list[str], what: str, option: str, optional: bool = False
) -> Any:
    if given is not None:
        if given not in known and given.split(".")[0] not in known:
            raise DataError(f"{option} {given}: its first rows have no such field; they have {', '.join(known)}")
        return given
    found = [name for name in candidates if name in known]
    if len(found) > 1:
        raise DataError(f"{what} can be in {' or '.join(found)}; name one with {option}")
    if not found and not optional:
        raise DataError(
            f"{what} is in none of {', '.join(candidates)}; it has {', '.join(known)}. Name it with {option}"
        )
    return found[0] if found else None


def _turn(turn: Any, field: str) -> dict[str, str]:
    """One turn, in either spelling, as role and text."""
    if not isinstance(turn, dict):
        raise RowFault(f"'{field}' has the turn {show(turn)}; it must have a role and text")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if role not in ROLES:
        raise RowFault(f"'{field}' has a turn of {show(role)}; known are {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(_part(part, field) for part in content)
    if not isinstance(content, str):
        raise RowFault(f"'{field}' has the content {show(content)}; it must be text")
    return {"role": ROLES[role], "content": content}


def _part(part: Any, field: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "image":
        return PLACEHOLDER
    raise RowFault(f"'{field}' has the part {show(part)}; known are text and image")


def _image_entries(record: dict[str, Any], field: str) -> list[Any]:
    value = lookup(record, field)
    if value is None or value == [] or value == "":
        raise RowFault(f"'{field}' is missing or empty; a row needs at least one image")
    return value if isinstance(value, list) else [value]


def _with_placeholders(turns: list[dict[str, str]], images: int, field: str) -> list[dict[str, str]]:
    """The turns, checked, with all placeholders in front of the first user's where they have none."""
    if not turns or turns[-1]["role"] != "user":
        raise RowFault(f"'{field}' does not end with the user's question; training asks for the next turn")
    if not turns[-1]["content"].replace(PLACEHOLDER, "").strip():
        raise RowFault(f"'{field}' has an empty question; add it")
    for turn in turns:
        if reserved := RESERVED.search(turn["content"]):
            raise RowFault(f"'{field}' contains {reserved[0]}, which the model would not read as text; remove it")
    placeholders = sum(turn["content"].count(PLACEHOLDER) for turn in turns)
    if placeholders == images:
        return turns
    if placeholders:
        raise RowFault(f"{placeholders} {PLACEHOLDER} in '{field}' for {images} images; write one for each, or none")
    first = next(i for i, turn in enumerate(turns) if turn["role"] == "user")
    asked = {"role": "user", "content": PLACEHOLDER * images + turns[first]["content"]}
    return [*turns[:first], asked, *turns[first + 1 :]]


def _own_name(record: dict[str, Any]) -> str | None:
    name = record.get("data_source")
    return name if isinstance(name, str) and name.strip() else None
