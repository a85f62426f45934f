"""Kinds of faults that rows, files and whole sets have, and what to do about each.

An ``error`` is what training refuses, what would stop it later, or what is certain to teach something else than is meant.
A ``warning`` is worth a look and may be intended.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

ERROR = "error"
WARNING = "warning"

#: Faults of each kind that the printed table shows.
EXAMPLES = 3

#: Characters of a reason that are kept.
LONGEST_REASON = 500

_REMOVE = "mend or remove the row, or leave out such rows with --fix"
_ERRORS = {
    # Files and columns
    "unreadable_file": "fetch or write the file again",
    "no_rows": "name a file that has rows",
    "missing_column": "add the column, or set its name in the data section (data.image_key, data.prompt_key, ...)",
    "wrong_column_type": "write the column with the type that the reason names",
    "image_feature": "cast the column to Image(decode=False) of datasets before saving, so that rows keep encoded bytes",
    "schemas_differ": "write all files of a set with the same schema",
    "few_rows": "add rows, or lower data.train_batch_size",
    # Prompt
    "not_utf8": "write the text as UTF-8",
    "prompt_missing": "give the row a list of messages, each with role and content",
    "role": "use system, user, assistant or tool as the role",
    "no_question": "end the prompt with the user's message; the answer belongs in reward_model.ground_truth",
    "content_missing": "give each message text",
    "content_type": "write content as text, with <image> where an image belongs",
    "question_empty": "add the question behind <image>",
    "placeholders": "write <image> once for each image, where it belongs in the text",
    "other_media": "remove the videos, the audio and their placeholders: recipes draw views of images only",
    "special_token": "remove the token from the text: the model would not read it as text",
    "template": "change the messages so that the model's chat template accepts them",
    "prompt_too_long": "shorten the text, make the image smaller, or raise data.max_prompt_length",
    "no_response_room": "raise actor_rollout_ref.rollout.max_model_len, or lower data.max_prompt_length",
    "micro_batch_room": "raise actor_rollout_ref.actor.ppo_max_token_len_per_gpu to prompt plus response",
    # Images
    "image_missing": "add the image (bytes, or a path that is on every machine), or remove the row",
    "image_empty": "fetch the image again and write its bytes",
    "image_address": "download the image and store its bytes in the row, or name where it lies in data.image_root",
    "image_path_missing": "mend the path, or store the image's bytes in the row",
    "image_outside": "store the image's bytes in the row, or name the folder in data.image_root",
    "image_unreadable": "fetch the image again",
    "image_format": "convert the image to PNG or JPEG",
    "image_truncated": "fetch the image again: its end is missing",
    "image_damaged": "fetch the image again, or convert it to PNG",
    "image_bomb": "make the image smaller",
    "image_deep": "scale the values to 8 bits: the conversion to RGB cuts them off at 255",
    "image_invisible": "remove the alpha channel or the row: all pixels are transparent and turn white",
    "image_aspect": "crop or pad the image (or the box): the processor takes at most 200 to 1",
    # Box and evidence
    "box_missing": "add bbox: [x0, y0, x1, y1] in pixels of the last image",
    "box_length": "write four numbers: x0, y0, x1, y1 in pixels",
    "box_not_finite": "write four finite numbers",
    "box_empty": "write x0 < x1 and y0 < y1",
    "box_xywh": "convert x, y, width, height to x0, y0, x0 + width, y0 + height",
    "box_normalised": "multiply by the image's width and height: boxes are in pixels",
    "box_thousandths": "multiply by width / 1000 and height / 1000: boxes are in pixels",
    "box_stored_orientation": "turn the box as the EXIF tag turns the image: boxes are in pixels of the upright image",
    "box_outside": "write pixels of the last image as it is stored in this row; cut the box at its edges",
    "evidence_missing": "add the evidence images, or use a recipe that crops them from bbox",
    "evidence_count": "give one evidence image for each image",
    "evidence_identical": "store the evidence crop: the teacher would see what the student sees",
    # Answer, identity, sets
    "answer_missing": "add reward_model.ground_truth",
    "answer_empty": "write the answer in reward_model.ground_truth",
    "answer_type": "write reward_model.ground_truth as text",
    "data_source": "name the row's source: validation reports accuracy by it",
    "leak_bytes": "remove the row from one of the sets: validation would measure a memory",
    "leak_pixels": "remove the row from one of the sets: validation would measure a memory",
    "refused": _REMOVE,
}
_WARNINGS = {
    "control_characters": "remove them, or decode the text with the right encoding",
    "foreign_token": "remove it unless the question is about it: it belongs to another model's template",
    "response_room": "raise actor_rollout_ref.rollout.max_model_len: long responses would be cut",
    "image_huge": "make the image smaller: it costs memory on every rollout worker",
    "image_animated": "store the frame that is meant: only the first is seen",
    "image_cmyk": "convert to RGB with the image's colour profile: the plain conversion shifts colours",
    "image_transparent": "flatten the image on the background that is meant: transparent pixels turn white",
    "image_blank": "look at the image: all its pixels have one colour",
    "image_small": "use larger images: the processor enlarges this one, which adds no detail",
    "image_shrunk": "expect the processor to shrink it, or raise max_pixels (data.mm_processor_kwargs)",
    "crop_small": "raise the crop's zoom, padding or min_size: the processor enlarges it, which adds no detail",
    "box_whole_image": "use a box around the evidence: this one gives the teacher no privilege",
    "box_tiny": "check the box: so few pixels show hardly anything",
    "boxes_xywh": "check whether all boxes are x, y, width, height",
    "boxes_thousandths": "check whether all boxes are in thousandths of the image's sides",
    "resize_undone": "lower min_pixels or raise max_pixels (data.mm_processor_kwargs), or use images between the two",
    "views_alike": "check the views: teacher and student see nearly the same, so there is nothing to distil",
    "answer_number": "write reward_model.ground_truth as text, so that it is compared as it is meant",
    "answer_too_long": "raise data.max_response_length: no response could be as long as the answer",
    "leak_similar": "look at both: if it is one picture, scaled or encoded with loss, remove the row from one of the sets",
    "duplicate_id": "give each row its own id",
    "duplicate_row": "remove one of the two",
    "data_source_variants": "use one spelling: accuracy is reported by data_source",
}

#: Kind -> (severity, what to do).
KINDS: dict[str, tuple[str, str]] = {
    **{kind: (ERROR, remedy) for kind, remedy in _ERRORS.items()},
    **{kind: (WARNING, remedy) for kind, remedy in _WARNINGS.items()},
}


class Finding(NamedTuple):
    """A fault before its place is known.

    Args:
        kind: A key of :data:`KINDS`.
        reason: What is wrong, with the values that show it.
    """

    kind: str
    reason: str

    @property
    def is_error(self) -> bool:
        return KINDS[self.kind][0] == ERROR


@dataclass(frozen=True)
class Fault:
    """A finding with its place.

    Args:
        file: The file as the user named it; empty for a fault of the whole set.
        row: From 0, in that file; None for a fault of the file or the set.
    """

    file: str
    row: int | None
    kind: str
    severity: str
    reason: str
    remedy: str

    @classmethod
    def at(cls, finding: Finding, file: str = "", row: int | None = None) -> Fault:
        severity, remedy = KINDS[finding.kind]
        return cls(file, row, finding.kind, severity, _printable(finding.reason), remedy)

    @property
    def place(self) -> str:
        if not self.file:
            return "all files"
        return self.file if self.row is None else f"{self.file}, row {self.row}"


def _printable(reason: str) -> str:
    """One line that a terminal shows as it is: parts of it come from rows and from decoders."""
    reason = reason if len(reason) <= LONGEST_REASON else reason[: LONGEST_REASON - 3] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in reason)


class Report:
    """All faults of a check: counts and first examples in memory, every one in a JSON file.

    Use as a context manager; the JSON file appears when :meth:`finish` was called and nothing failed.

    Args:
        path: The JSON file, or None.
        keep_rejects: Remember the reasons of each row with an error, for a clean copy.

    Attributes:
        counts: Faults of each kind.
        examples: The first :data:`EXAMPLES` faults of each kind.
        bad_rows: File -> its rows with an error, with the reasons (empty unless ``keep_rejects``).
        bad_files: Files with an error of their own.
    """

    def __init__(self, path: Path | None = None, keep_rejects: bool = False):
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[Fault]] = {}
        self.bad_rows: dict[str, dict[int, list[str]]] = {}
        self.bad_files: set[str] = set()
        self._keep = keep_rejects
        self._path = path
        self._unfinished = None if path is None else path.with_name(f".{path.name}.{os.getpid()}")
        self._stream: IO[str] | None = None

    def __enter__(self) -> Report:
        if self._unfinished is not None:
            self._unfinished.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._unfinished.open("w", encoding="utf-8", errors="backslashreplace")
            self._stream.write('{"faults": [')
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._unfinished is not None:
            self._unfinished.unlink(missing_ok=True)

    @property
    def errors(self) -> int:
        return sum(count for kind, count in self.counts.items() if KINDS[kind][0] == ERROR)

    @property
    def warnings(self) -> int:
        return self.counts.total() - self.errors

    def add(self, findings: Iterable[Finding], file: str = "", row: int | None = None) -> None:
        for finding in findings:
            fault = Fault.at(finding, file, row)
            first = not self.counts
            self.counts[fault.kind] += 1
            shown = self.examples.setdefault(fault.kind, [])
            if len(shown) < EXAMPLES:
                shown.append(fault)
            if fault.severity == ERROR and file:
                if row is None:
                    self.bad_files.add(file)
                else:
                    reasons = self.bad_rows.setdefault(file, {}).setdefault(row, [])
                    if self._keep:
                        reasons.append(f"{fault.reason}; {fault.remedy}")
            if self._stream is not None:
                self._stream.write(("\n  " if first else ",\n  ") + json.dumps(asdict(fault), ensure_ascii=False))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write what else the JSON file says, behind the faults, and give the file its name."""
        if self._stream is None or self._unfinished is None or self._path is None:
            return
        rest = {"counts": dict(self.counts), "errors": self.errors, "warnings": self.warnings, **summary}
        self._stream.write("\n],\n" + json.dumps(rest, indent=1, ensure_ascii=False).lstrip("{"))
        self._stream.close()
        self._stream = None
        os.replace(self._unfinished, self._path)
