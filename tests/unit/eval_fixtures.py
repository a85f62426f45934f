"""Tiny copies of published data sets, and replies whose verdicts a test sets itself."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from opd_recipes.eval.benchmarks import BENCHMARKS
from opd_recipes.eval.extraction import Extracted
from opd_recipes.eval.question import Question, Reply
from opd_recipes.registry import RecipeError


def png(color: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(buffer, format="PNG")
    return buffer.getvalue()


def base64_png(color: str = "red") -> str:
    return base64.b64encode(png(color)).decode()


def hub_image(color: str = "red") -> dict[str, Any]:
    """An image as the Hugging Face hub stores it in parquet."""
    return {"bytes": png(color), "path": f"{color}.png"}


def parquet(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file


def json_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def picture(file: Path, color: str = "red") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(png(color))
    return file


def reply(
    correct: bool | None,
    *,
    id: str = "",
    group: str = "",
    answer: str = "A",
    value: str | None = None,
    kind: Any = "choice",
    **category: str,
) -> Reply:
    """A reply with a verdict. ``value`` is what was read; it need not fit the verdict, as after a judge."""
    options = {"A": "a", "B": "b"} if kind == "choice" else None
    question = Question(id or group, (), "?", kind, (answer,), options, category, group or id)
    return Reply(question, "", Extracted(value, "test", ""), correct)


def load(name: str, path: Path, split: str | None = None) -> list[Question]:
    """All questions, after a check that they are the same, bar the images, when these are not read."""
    questions = list(BENCHMARKS[name].load(path, split))
    assert [q.without_images() for q in questions] == list(BENCHMARKS[name].load(path, split, images=False))
    assert all(image.read() for question in questions for image in question.images)
    return questions


def refusal(name: str, path: Path, split: str | None = None) -> str:
    with pytest.raises(RecipeError) as error:
        list(BENCHMARKS[name].load(path, split))
    return str(error.value)
