"""One row, checked against a recipe and a processor."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from PIL import Image, ImageChops, ImageStat

from data_prep.check_boxes import box_findings
from data_prep.check_images import Seen, inspect_image
from data_prep.check_setup import Setup
from data_prep.check_text import answer_findings, prompt_findings
from data_prep.faults import Finding
from opd_recipes.dataset import ROW_IMAGES, UNDONE, hinted
from opd_recipes.images import ImageRoot

#: The processor's longest side over the shortest (qwen_vl_utils, transformers).
MAX_ASPECT = 200
#: Views whose token counts differ by less than this share, and ...
SAME_TOKENS = 0.05
#: ... whose pixels differ by less than this on average (of 255), show the same.
SAME_PIXELS = 1.0


@dataclass
class Checked:
    """What is known of a row.

    Args:
        findings: What is wrong with it.
        tokens: Prompt tokens of each view that could be drawn.
        images: What each of ``images`` shows; None where it does not decode.
        question: Digest of the messages' text, to find duplicates.
        box: The evidence box, where the views need it and it has no error.
    """

    findings: list[Finding] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    images: list[Seen | None] = field(default_factory=list)
    question: bytes = b""
    box: Sequence[float] | None = None

    @property
    def is_bad(self) -> bool:
        return any(finding.is_error for finding in self.findings)


class RowChecker:
    """Checks rows of one set; may be called from several threads.

    Args:
        setup: Recipe and processor.
        validation: Whether rows are for validation: they need an answer, and more views are drawn.
        root: The folders in which the rows may name images.
    """

    def __init__(self, setup: Setup, validation: bool, root: ImageRoot):
        self._setup, self._root = setup, root
        self._views = setup.views(validation)
        self._columns = setup.columns(validation)
        self._answer_for = "validation" if validation else setup.recipe.needs_answer
        self._cuts = bool({"crop", "provided"}.intersection(setup.recipe.teacher_view.kinds))

    def check(self, row: Mapping[str, Any]) -> Checked:
        """Find what is wrong with a row; ``row`` is not changed."""
        columns, setup = self._columns, self._setup
        out = Checked()
        entries = row.get(columns.images) or []
        out.images = self._inspect(entries, columns.images, out)
        if not entries:
            out.findings.append(Finding("image_missing", f"'{columns.images}' is empty"))
        out.findings += prompt_findings(row.get(columns.prompt), len(entries), setup.special)
        out.question = _question(row.get(columns.prompt))
        self._check_box(row, out)
        self._check_evidence(row, out)
        special = setup.special if setup.recipe.teacher_hint is not None else None
        out.findings += answer_findings(row.get("reward_model"), self._answer_for, special)
        if not str(row.get("data_source") or "").strip():
            out.findings.append(Finding("data_source", "'data_source' is empty"))
        for key in (setup.prompts.video_key, setup.prompts.audio_key):
            if row.get(key):
                out.findings.append(Finding("other_media", f"'{key}' is not empty"))
        if not out.is_bad:
            self._check_views(row, out)
        return out

    def _inspect(self, entries: Sequence[Any], column: str, out: Checked) -> list[Seen | None]:
        seen = []
        for number, entry in enumerate(entries):
            image, found = inspect_image(entry, f"{column}[{number}]", self._root)
            seen.append(image)
            out.findings += found
        return seen

    def _check_box(self, row: Mapping[str, Any], out: Checked) -> None:
        box = row.get(self._columns.box)
        last = out.images[-1] if out.images else None
        found = box_findings(box, last, self._columns.needs_box)
        out.findings += found
        if box is not None and self._columns.needs_box and not any(finding.is_error for finding in found):
            out.box = box

    def _check_evidence(self, row: Mapping[str, Any], out: Checked) -> None:
        if not self._columns.needs_evidence:
            return
        column = self._columns.evidence
        entries = row.get(column) or []
        if not entries:
            out.findings.append(Finding("evidence_missing", f"'{column}' is empty"))
            return
        if len(entries) != len(out.images):
            reason = f"{len(entries)} in '{column}' for {len(out.images)} in '{self._columns.images}'"
            out.findings.append(Finding("evidence_count", reason))
        seen = self._inspect(entries, column, out)
        last, full = seen[-1], out.images[-1] if out.images else None
        if last is not None and full is not None and last.pixels_digest == full.pixels_digest:
            out.findings.append(
                Finding("evidence_identical", f"the last of '{column}' has the pixels of the image itself")
            )

    def _check_views(self, row: Mapping[str, Any], out: Checked) -> None:
        prompts, hint = self._setup.prompts, self._setup.recipe.teacher_hint
        answer = (row.get("reward_model") or {}).get("ground_truth")
        drawn: dict[str, list[Image.Image]] = {}
        try:
            example = copy.deepcopy(dict(row))
            messages = prompts._build_messages(example, key=prompts.prompt_key)
            source = replace(example[ROW_IMAGES], root=self._root)
            for name, images in source.rendered(self._views):
                drawn[name] = images
                if found := _aspect(name, drawn[name]):
                    out.findings += found
                    continue
                asked = hinted(messages, hint if name in ("teacher", "negative") else None, answer)
                out.tokens[name] = prompts._prompt_length(asked, drawn[name])
        except Exception as error:  # whatever it is, training would meet it, too
            out.findings.append(_refusal(error))
            return
        out.findings += self._length_findings(out.tokens, drawn)
        out.findings += self._answer_length(answer)
        if out.is_bad:
            return
        out.findings += self._size_findings(drawn)
        if {"student", "teacher"} <= out.tokens.keys():
            out.findings += self._asymmetry_findings(drawn, out.tokens)

    def _length_findings(self, tokens: Mapping[str, int], drawn: Mapping[str, list[Image.Image]]) -> list[Finding]:
        limits, found = self._setup.limits, []
        for name, count in tokens.items():
            size = f"image of {drawn[name][-1].width} x {drawn[name][-1].height} pixels"
            said = f"the {name}'s prompt has {count} tokens"
            answered = name not in ("teacher", "negative") or name in self._setup.recipe.validation_views
            room = limits.rollout if answered else limits.model
            whole = f"{said}; with {limits.response} of the response"
            if count > limits.prompt:
                found.append(Finding("prompt_too_long", f"{said}, data.max_prompt_length is {limits.prompt} ({size})"))
            elif room is not None and count + 1 > room:
                found.append(Finding("no_response_room", f"{said}, the model takes {room} ({size})"))
            elif room is not None and count + limits.response > room:
                found.append(Finding("response_room", f"{whole} that is more than the model's {room}"))
            trained = name in ("student", "teacher", "negative")
            if trained and limits.micro_batch is not None and count + limits.response > limits.micro_batch:
                found.append(
                    Finding("micro_batch_room", f"{whole} that is more than a micro-batch's {limits.micro_batch}")
                )
        return found

    def _answer_length(self, answer: Any) -> list[Finding]:
        if answer is None:
            return []
        count = len(self._setup.prompts.tokenizer(str(answer), add_special_tokens=False)["input_ids"])
        if count <= self._setup.limits.response:
            return []
        return [
            Finding(
                "answer_too_long",
                f"the answer has {count} tokens, data.max_response_length is {self._setup.limits.response}",
            )
        ]

    def _size_findings(self, drawn: Mapping[str, list[Image.Image]]) -> list[Finding]:
        limits, found = self._setup.limits, []
        for name in ("student", "teacher"):
            for image in drawn[name]:
                size = f"the {name}'s image of {image.width} x {image.height} pixels"
                area = image.width * image.height
                few = limits.min_pixels is not None and area < limits.min_pixels
                thin = limits.factor is not None and min(image.size) < limits.factor
                if few or thin:
                    least = f"{limits.min_pixels} pixels and sides of {limits.factor}"
                    kind = "crop_small" if name == "teacher" and self._cuts else "image_small"
                    found.append(Finding(kind, f"{size} is enlarged to at least {least}"))
                if limits.max_pixels is not None and area > limits.max_pixels:
                    found.append(Finding("image_shrunk", f"{size} is shrunk to {limits.max_pixels} pixels"))
        return list(dict.fromkeys(found))

    def _asymmetry_findings(self, drawn: Mapping[str, list[Image.Image]], tokens: Mapping[str, int]) -> list[Finding]:
        recipe = self._setup.recipe
        student, teacher = tokens["student"], tokens["teacher"]
        found = []
        resized = any(step["kind"] == "resize" and not step.get("restore") for step in recipe.student_view.spec)
        if resized and student > UNDONE * teacher:
            reason = (
                f"the student's smaller view has {student} tokens, {student / teacher:.0%} of the teacher's {teacher}"
            )
            found.append(Finding("resize_undone", reason))
        if recipe.teacher_hint is not None or recipe.student_view.spec == recipe.teacher_view.spec:
            return found  # what the teacher knows more is text, or the views are meant to be equal
        restored = any(step.get("restore") for step in recipe.student_view.spec)
        close = abs(student - teacher) <= SAME_TOKENS * teacher
        if close and not restored and _difference(drawn["student"][-1], drawn["teacher"][-1]) < SAME_PIXELS:
            found.append(Finding("views_alike", f"{student} and {teacher} tokens, and nearly the same pixels"))
        return found


def _question(prompt: Any) -> bytes:
    return hashlib.blake2b(repr(prompt).encode(errors="backslashreplace"), digest_size=16).digest()


def _aspect(name: str, images: Sequence[Image.Image]) -> list[Finding]:
    return [
        Finding("image_aspect", f"the {name}'s image is {image.width} x {image.height} pixels")
        for image in images
        if max(image.size) > MAX_ASPECT * min(image.size)
    ]


def _refusal(error: Exception) -> Finding:
    if type(error).__module__.startswith("jinja2"):
        return Finding("template", f"the chat template refuses the messages: {error}")
    return Finding("refused", f"training would refuse the row: {error or type(error).__name__}")


def _difference(one: Image.Image, other: Image.Image) -> float:
    """Mean difference of a channel, 0 to 255, at the smaller of the two sizes."""
    size = (min(one.width, other.width), min(one.height, other.height))
    shown = [image if image.size == size else image.resize(size, Image.Resampling.BOX) for image in (one, other)]
    return sum(ImageStat.Stat(ImageChops.difference(*shown)).mean) / 3
