"""The default validation score: normalised exact match. Any verl reward function can take its place."""

from __future__ import annotations

import string
from typing import Any

_EDGE = string.punctuation + string.whitespace


def normalise(text: str) -> str:
    """Lower case, no white space or punctuation at the ends."""
    return text.strip(_EDGE).lower()


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """1 when the whole response equals the reference answer after :func:`normalise`, else 0 (verl's reward interface)."""
    hit = float(normalise(solution_str) == normalise(str(ground_truth)))
    return {"score": hit, "acc": hit}
