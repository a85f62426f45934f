"""The published way, written as a user of transformers would: what the measurements compare with.

Published code for these methods (verl's ``dp_actor`` with a distillation loss; TRL's trainers) runs a model for its logits
of *all* tokens, prompt and image tokens included, takes fp32 log-probabilities over the whole vocabulary, and gathers those
of the response tokens and of K ids. It does so three times in an update: without gradient for the student's old
log-probabilities (to which the importance weight refers), without gradient for the teacher, with gradient for the student.
Nothing is added to that: no entropies and no metrics (ours computes both), no copies that are not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

#: Gives the logits (B, L, V) of all tokens.
Logits = Callable[[], torch.Tensor]


def token_log_probs(log_probs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(N, V), (N,) -> (N,)."""
    return log_probs.gather(-1, labels[:, None]).squeeze(-1)


def with_tail(log_probs: torch.Tensor) -> torch.Tensor:
    """(N, K) -> (N, K + 1): the rest of the vocabulary as one more bin."""
    mass = log_probs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([log_probs, torch.log(-torch.expm1(mass))], dim=-1)


def jsd(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence, alpha 0.5, (N, K) -> (N,)."""
    log_m = torch.logsumexp(torch.stack([log_p, log_q]), dim=0) - torch.log(torch.tensor(2.0))
    return (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1) / 2


def distill(
    student: Logits,
    teacher: Logits,
    student_index: torch.Tensor,
    teacher_index: torch.Tensor,
    labels: torch.Tensor,
    topk: int,
    rollout_log_probs: torch.Tensor,
) -> torch.Tensor:
    """The loss of one micro-batch, mean over its N response tokens: JSD over the student's top-K and one bin for the rest.

    Args:
        student, teacher: Forward passes; the student's is run twice.
        student_index, teacher_index: (N,) positions in the flattened logits that predict the response tokens.
        labels: (N,) the response tokens.
        topk: K.
        rollout_log_probs: (N,) as the inference engine has given them.
    """
    with torch.no_grad():  # the old-log-prob pass
        log_probs = student().flatten(0, -2).float().log_softmax(-1)
        old = token_log_probs(log_probs[student_index], labels)
        del log_probs
    log_probs = student().flatten(0, -2).float().log_softmax(-1)
    ids = log_probs.detach()[student_index].topk(topk, dim=-1).indices
    log_p = log_probs[student_index[:, None], ids]
    with torch.no_grad():
        teacher_log_probs = teacher().flatten(0, -2).float().log_softmax(-1)
        log_q = teacher_log_probs[teacher_index[:, None], ids]
        del teacher_log_probs
    importance = (old - rollout_log_probs).exp().clamp(max=2.0)
    return (importance * jsd(with_tail(log_p), with_tail(log_q))).mean()


def head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden: torch.Tensor,
    teacher_weight: torch.Tensor,
    **others,
) -> torch.Tensor:
    """:func:`distill` from final hidden states (B, L, D) and heads (V, D)."""
    return distill(lambda: F.linear(hidden, weight), lambda: F.linear(teacher_hidden, teacher_weight), **others)


def all_logits(model: torch.nn.Module, inputs: dict) -> torch.Tensor:
    return model(**inputs, use_cache=False).logits


def update(
    model: torch.nn.Module,
    teacher: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[dict],
    *,
    topk: int = 100,
    rate: float = 0.05,
    clip: float = 1.0,
) -> float:
    """One update of a mini-batch: gradients added up over micro-batches, clipped, AdamW, and the teacher follows.

    Args:
        micro_batches: Each with ``student`` and ``teacher`` (arguments of the model), ``student_index``, ``teacher_index``,
            ``labels`` and ``rollout_log_probs`` as in :func:`distill`.
        rate: The student's share in the teacher's average.
        clip: Largest norm of the gradient.
    """
    total = sum(len(batch["labels"]) for batch in micro_batches)
    loss_sum = 0.0
    for batch in micro_batches:
        loss = distill(
            partial(all_logits, model, batch["student"]),
            partial(all_logits, teacher, batch["teacher"]),
            topk=topk,
            **{key: batch[key] for key in ("student_index", "teacher_index", "labels", "rollout_log_probs")},
        )
        loss = loss * (len(batch["labels"]) / total)
        loss.backward()
        loss_sum += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for theirs, ours in zip(teacher.parameters(), model.parameters(), strict=True):
            theirs.lerp_(ours, rate)
    return loss_sum
