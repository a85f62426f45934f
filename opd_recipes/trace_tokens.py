"""What a trace has of each token, computed on the worker (:mod:`opd_recipes.trace` writes it)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tensordict import TensorDict

from opd_recipes.divergence import Divergence
from opd_recipes.topk_head import TeacherStates

#: Alternatives that are written for each token and model.
TOP = 5
#: Of a column's name in the worker's answer.
PREFIX = "trace_"
#: Behind it: of every token, and where the recipe has token weights.
COLUMNS = ("divergence",) + tuple(
    f"{model}_{what}" for model in ("student", "teacher") for what in ("logp", "entropy", "top_logp", "top_ids")
)
WEIGHT = "weight"


@torch.no_grad()
def token_columns(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: TeacherStates,
    labels: torch.Tensor,
    *,
    divergence: Divergence,
    temperature: float,
    chunk: int,
) -> dict[str, torch.Tensor]:
    """What is traced of N response tokens, by its own plain pass over the logits.

    Args:
        hidden: (N, D) the student's final hidden states at the positions that predict the tokens.
        weight: (V, D) its head.
        teacher: What the teacher's pass left for the same positions.
        labels: (N,) the tokens.

    Returns:
        ``divergence`` (N,), and for ``student`` and ``teacher``: ``*_logp`` (N,), ``*_entropy`` (N,), ``*_top_logp`` and
        ``*_top_ids`` (N, TOP).
    """
    parts = []
    for start in range(0, len(labels), chunk):
        rows = slice(start, start + chunk)
        logits = {
            "student": F.linear(hidden[rows], weight).float() / temperature,
            "teacher": teacher.logits(rows, weight) / temperature,
        }
        part = {"divergence": divergence(logits["student"], logits["teacher"], labels[rows])[0]}
        for name, values in logits.items():
            log_probs = values.log_softmax(-1)
            top = log_probs.topk(min(TOP, log_probs.shape[-1]), dim=-1)
            part[f"{name}_logp"] = log_probs.gather(-1, labels[rows, None]).squeeze(-1)
            part[f"{name}_entropy"] = torch.special.entr(log_probs.exp()).sum(-1)
            part[f"{name}_top_logp"], part[f"{name}_top_ids"] = top.values, top.indices
        parts.append(part)
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def answer_columns(columns: dict[str, torch.Tensor], lengths: list[int]) -> TensorDict:
    """Flat columns of N tokens as the worker's answer: nested, a row of each response's length."""
    rows = {
        PREFIX + name: torch.nested.as_nested_tensor(list(values.cpu().split(lengths)), layout=torch.jagged)
        for name, values in columns.items()
    }
    return TensorDict(rows, batch_size=len(lengths))
