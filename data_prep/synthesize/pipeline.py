"""From an image to questions about its details: list objects, box each, ask, validate, answer, keep what agrees.

The published pipeline (Vision-OPD, arXiv 2605.18740, and its lineage). Each step either gives a value or rejects its item
with a reason; a call that was given up leaves its item unfinished, for the next run.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from data_prep.rows import RowFault, show
from data_prep.synthesize import parse
from data_prep.synthesize.calls import Caller, Sampling, finish_all
from data_prep.synthesize.client import CallFailed, CallRefused, Server
from data_prep.synthesize.images import Picture, check_evidence, overlap
from data_prep.synthesize.replies import texts
from data_prep.synthesize.templates import Templates
from opd_recipes.view_steps import Box

#: In order, with what each counts. The items that leave one are those that enter the next, or what these listed or wrote.
STAGES = {
    "images": "images that can be read, each once",
    "lists": "images with enough objects that appear once",
    "objects": "objects that are named once",
    "boxes": "objects with one small box",
    "questions": "boxes with their questions",
    "written": "questions that can be asked",
    "validated": "questions that the validator passes",
    "agreed": "questions whose answers agree",
    "choices": "questions with wrong options",
    "hard": "questions that the small model fails",
}
BOX_FORMATS = {
    "qwen1000": "integers from 0 to 1000, relative to the image's width and height",
    "pixels": "pixels of the image",
    "normalised": "fractions from 0 to 1 of the image's width and height",
}
LANGUAGES = {"en": "English", "zh": "Simplified Chinese", "any": "the language that suits the image"}
#: Two boxes that overlap by this (intersection over union) are one object under two names.
SAME_BOX = 0.8


@dataclass(frozen=True)
class Settings:
    """What the pipeline asks for and keeps; the defaults are the published ones where they are known.

    Attributes:
        box_convention: One of :data:`parse.CONVENTIONS`.
        language: ``en``, ``zh`` or ``any``.
        min_objects: Images with fewer are dropped (published: "2 or fewer are dropped").
        max_objects: Further ones are left out.
        max_area_ratio: The box has less than this share of the image's area.
        min_side: Least side of the box in pixels of the original.
        questions: For each box.
        answers: Samples of the answer, from the evidence.
        min_agreement: Least share of them that agree.
        distractors: Wrong options of a multiple-choice question; 0: open questions.
        hard_samples: Answers of the small model from the whole image.
        hard_limit: Dropped are questions that it answers this often.
        zoom: Enlargement of the evidence.
        max_side: Longest side of an image in a request, pixels.
        side_multiple: Sides of a whole image in a request are multiples of this.
        max_tokens: Of each reply.
        seed: Of the sampling and of the order of options.
        question_temperature: Of the questions.
        answer_temperature: Of the answers [unspecified in the paper].
        top_p: Of both.
    """

    box_convention: str
    language: str = "en"
    min_objects: int = 3
    max_objects: int = 10
    max_area_ratio: float = 0.1
    min_side: int = 16
    questions: int = 3
    answers: int = 8
    min_agreement: float = 0.75
    distractors: int = 0
    hard_samples: int = 4
    hard_limit: int = 2
    zoom: float = 2.0
    max_side: int = 1536
    side_multiple: int = 1
    max_tokens: int = 1024
    seed: int = 0
    question_temperature: float = 0.9
    answer_temperature: float = 0.9
    top_p: float = 0.8


@dataclass(frozen=True)
class Kept:
    """One question that passed everything.

    Attributes:
        question: As the student reads it, options included.
        truth: The answer, or the letter of its option.
        answer: The answer in words.
        box: Evidence, whole pixels of the upright original.
    """

    object: str
    box: Box
    question: str
    truth: str
    answer: str


@dataclass
class Outcome:
    """What became of one image. ``counts[stage, what]``, what being ``in``, ``out``, ``rejected`` or ``unfinished``."""

    name: str
    row: int
    kept: list[Kept] = field(default_factory=list)
    rejects: list[dict[str, Any]] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    async def attempt(self, stage: str, work: Awaitable[Any], **about: Any) -> Any:
        """The value of ``work``, or None when its item is rejected or unfinished."""
        self.counts[stage, "in"] += 1
        try:
            value = await work
        except (RowFault, CallRefused) as fault:
            reasons = fault.reasons if isinstance(fault, RowFault) else (f"the server refused the call: {fault}",)
            self.counts[stage, "rejected"] += 1
            self.rejects.append({"file": self.name, "row": self.row, "stage": stage, **about, "reasons": list(reasons)})
            return None
        except CallFailed as fault:
            self.counts[stage, "unfinished"] += 1
            self.unfinished.append(f"{self.name}, {stage}: {fault}")
            return None
        self.counts[stage, "out"] += 1
        return value


class Pipeline:
    """The steps, with what they need.

    Args:
        settings: What to ask for and keep.
        templates: The prompts.
        caller: Makes the calls.
        server: The model that lists, boxes, asks, validates and answers.
        hard: The small model of the hard filter; None: no filter.
    """

    def __init__(
        self, settings: Settings, templates: Templates, caller: Caller, server: Server, hard: Server | None = None
    ):
        self.settings = settings
        self.templates = templates
        self.caller = caller
        self.server = server
        self.hard = hard
        self._plain = Sampling(max_tokens=settings.max_tokens, seed=settings.seed)
        sampled = partial(Sampling, top_p=settings.top_p, max_tokens=settings.max_tokens, seed=settings.seed)
        self._asking = sampled(temperature=settings.question_temperature)
        self._answering = sampled(temperature=settings.answer_temperature)

    async def run(self, outcome: Outcome, picture: Picture) -> None:
        """All of one image; its results are added to ``outcome``, in an order that does not depend on the calls'."""
        names = await outcome.attempt("lists", self._list(picture))
        if names is None:
            return
        objects = [
            await outcome.attempt("objects", self._named_once(i, names), object=names[i]) for i in range(len(names))
        ]
        asked = [name for name in objects if name is not None]
        found = await finish_all([self._find(picture, name) for name in asked])
        boxes: list[tuple[str, Box]] = []
        for name, result in zip(asked, found, strict=True):
            box = await outcome.attempt("boxes", self._checked_box(picture, result, boxes), object=name)
            if box is not None:
                boxes.append((name, box))
        # Each detail has its own outcome: what ends first must not come first.
        details = [Outcome(outcome.name, outcome.row) for _ in boxes]
        await finish_all([self._detail(*both, picture) for both in zip(details, boxes, strict=True)])
        for detail in details:
            merge(outcome, detail)

    async def _list(self, picture: Picture) -> list[str]:
        """The names of the objects; malformed ones count as none."""
        prompt = self.templates.fill("objects", max_objects=self.settings.max_objects)
        reply = await self.caller.ask("lists", self.server, prompt, [self._whole(picture)], self._plain)
        entries = texts(reply, "objects")
        names: list[str] = []
        faults: list[str] = []
        for entry in entries:
            try:
                names.append(parse.object_name(entry))
            except RowFault as fault:
                faults.append(str(fault))
        twice = parse.repeated(names)
        usable = sum(name.casefold() not in twice for name in names)
        if usable < self.settings.min_objects:
            also = [f"{len(twice)} listed more than once"] if twice else []
            raise RowFault(
                f"{usable} objects that appear once, fewer than {self.settings.min_objects} (--min-objects)",
                *also,
                *faults,
            )
        return names

    async def _named_once(self, index: int, names: Sequence[str]) -> str:
        name = names[index]
        twice = parse.repeated(names)
        if name.casefold() in twice:
            raise RowFault("listed more than once: it does not appear once, or the list is no list of single objects")
        if sum(other.casefold() not in twice for other in names[:index]) >= self.settings.max_objects:
            raise RowFault(f"beyond the first {self.settings.max_objects} objects (--max-objects)")
        return name

    async def _find(self, picture: Picture, name: str) -> Any:
        """The reply with the box, or why there is none; judged later, in the order of the list."""
        prompt = self.templates.fill("box", object=name, box_format=BOX_FORMATS[self.settings.box_convention])
        try:
            return await self.caller.ask("boxes", self.server, prompt, [self._whole(picture)], self._plain)
        except (CallRefused, CallFailed) as fault:
            return fault

    async def _checked_box(self, picture: Picture, result: Any, others: Sequence[tuple[str, Box]]) -> Box:
        if isinstance(result, Exception):
            raise result
        settings = self.settings
        box = parse.box(result, settings.box_convention, self._whole(picture).size, picture.size)
        check_evidence(box, picture.size, settings.max_area_ratio, settings.min_side)
        for name, other in others:
            if overlap(box, other) >= SAME_BOX:
                raise RowFault(f"the box is that of {name!r}: one object under two names")
        return box

    async def _detail(self, outcome: Outcome, found: tuple[str, Box], picture: Picture) -> None:
        """The questions about one box."""
        name, box = found
        entries = await outcome.attempt("questions", self._ask(picture, name, box), object=name, box=list(box))
        questions: list[str] = []
        for entry in entries or []:
            about = {
                "object": name,
                "box": list(box),
                "question": entry if isinstance(entry, str) else show(entry),
            }
            question = await outcome.attempt("written", self._asked_once(entry, questions), **about)
            if question is not None:
                questions.append(question)
        parts = [Outcome(outcome.name, outcome.row) for _ in questions]
        await finish_all(
            [self._question(part, picture, name, box, q) for part, q in zip(parts, questions, strict=True)]
        )
        for part in parts:
            merge(outcome, part)

    async def _ask(self, picture: Picture, name: str, box: Box) -> list[Any]:
        settings = self.settings
        prompt = self.templates.fill(
            "questions", object=name, count=settings.questions, language=LANGUAGES[settings.language]
        )
        shown = [self._evidence(picture, box)]
        reply = await self.caller.ask("questions", self.server, prompt, shown, self._asking)
        return parse.question_list(reply, settings.questions)

    async def _asked_once(self, entry: Any, earlier: Sequence[str]) -> str:
        question = parse.question(entry, self.settings.language)
        if parse.canonical(question) in {parse.canonical(other) for other in earlier}:
            raise RowFault("the same question as an earlier one about this box")
        return question

    async def _question(self, outcome: Outcome, picture: Picture, name: str, box: Box, question: str) -> None:
        """One question through the validator, the answers, the options and the hard filter."""
        about = {"object": name, "box": list(box), "question": question}
        if await outcome.attempt("validated", self._validate(picture, name, box, question), **about) is None:
            return
        answer = await outcome.attempt("agreed", self._answer(picture, box, question), **about)
        if answer is None:
            return
        truth, options, text = answer, None, question
        if self.settings.distractors:
            work = self._options(picture, box, question, answer)
            options = await outcome.attempt("choices", work, **about, answer=answer)
            if options is None:
                return
            truth = parse.LETTERS[options.index(answer)]
            text = with_options(question, options)
        if self.hard is not None:
            hard_work = self._check_hard(self.hard, picture, text, truth, options)
            if await outcome.attempt("hard", hard_work, **about, answer=answer) is None:
                return
        outcome.kept.append(Kept(name, box, text, truth, answer))

    async def _validate(self, picture: Picture, name: str, box: Box, question: str) -> bool:
        prompt = self.templates.fill("validate", object=name, question=question)
        shown = [self._evidence(picture, box), self._whole(picture)]
        parse.check_verdict(await self.caller.ask("validated", self.server, prompt, shown, self._plain))
        return True

    async def _answer(self, picture: Picture, box: Box, question: str) -> str:
        prompt = self.templates.fill("answer", question=question)
        shown = [self._evidence(picture, box)]
        replies = await self.caller.samples(
            "agreed", self.server, prompt, shown, self._answering, self.settings.answers
        )
        return parse.agreed_answer(replies, self.settings.min_agreement)

    async def _options(self, picture: Picture, box: Box, question: str, answer: str) -> list[str]:
        """The answer and the distractors, shuffled; the order depends on the seed, the image and the question only."""
        settings = self.settings
        language = LANGUAGES[settings.language]
        prompt = self.templates.fill(
            "choices", question=question, answer=answer, count=settings.distractors, language=language
        )
        shown = [self._evidence(picture, box)]
        reply = await self.caller.ask("choices", self.server, prompt, shown, self._asking)
        options = [answer, *parse.distractors(reply, answer, settings.distractors)]
        seed = hashlib.sha256(f"{settings.seed} {picture.digest} {question}".encode()).digest()
        random.Random(seed).shuffle(options)
        return options

    async def _check_hard(
        self, hard: Server, picture: Picture, question: str, truth: str, options: list[str] | None
    ) -> bool:
        settings = self.settings
        prompt = self.templates.fill("hard", question=question)
        shown = [self._whole(picture)]
        replies = await self.caller.samples("hard", hard, prompt, shown, self._answering, settings.hard_samples)
        right = parse.hits(replies, truth, options)
        if right >= settings.hard_limit:
            raise RowFault(f"too easy: {hard.model} answers it {right} of {len(replies)} times from the whole image")
        return True

    def _whole(self, picture: Picture):
        return picture.whole(self.settings.max_side, self.settings.side_multiple)

    def _evidence(self, picture: Picture, box: Box):
        return picture.evidence(box, self.settings.zoom, self.settings.max_side)


def merge(outcome: Outcome, part: Outcome) -> None:
    """Add a part's results to the whole's."""
    outcome.kept += part.kept
    outcome.rejects += part.rejects
    outcome.unfinished += part.unfinished
    outcome.counts.update(part.counts)


def with_options(question: str, options: Sequence[str]) -> str:
    """A multiple-choice question as the student reads it."""
    listed = [f"{letter}. {option}" for letter, option in zip(parse.LETTERS, options, strict=False)]
    return "\n".join([question, *listed])
