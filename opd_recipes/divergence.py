"""Divergences between the student's and the teacher's next-token distributions.

A divergence is chosen by four settings: ``kind`` (the formula), ``support`` (which token ids it sums over), ``tail`` (what
becomes of the mass outside these ids) and ``topk``. Everything here works on fp32 log-probabilities over the last
dimension; ``log_p`` is the student (with gradient), ``log_q`` the teacher (without). Values are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from opd_recipes.registry import RecipeError, Registry

KINDS = Registry("opd.divergence.kind")
SUPPORTS = Registry("opd.divergence.support")
TAILS = Registry("opd.divergence.tail")

#: Floor of log-probabilities: exp of it is 0, and unlike -inf (a padded vocabulary, a teacher's masked token) it has
#: finite differences and gradients.
MIN_LOG_PROB = -1e4

#: Largest log-mass of the top-K ids for which the tail is computed: log(1 - exp(s)) needs s < 0.
MAX_LOG_MASS = -1e-7


def kl(log_a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """KL(a || b) = sum a (log a - log b) over the last dimension, of finite log-probabilities."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)


@KINDS.register("jsd")
def jsd(log_p: torch.Tensor, log_q: torch.Tensor, *, alpha: float = 0.5) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence, (1 - alpha) KL(p || m) + alpha KL(q || m), m = (1 - alpha) p + alpha q.

    ``alpha`` must lie strictly between 0 and 1; the expression tends to 0 at both ends, it does not become a KL.
    """
    difference = log_q - log_p
    from_p = log_p.exp() * _log_mixture(difference, alpha)  # p log(m / p)
    from_q = log_q.exp() * _log_mixture(-difference, 1 - alpha)  # q log(m / q)
    return -((1 - alpha) * from_p + alpha * from_q).sum(-1)


def _log_mixture(difference: torch.Tensor, weight: float) -> torch.Tensor:
    """log((1 - weight) + weight exp(difference)): exactly 0 at 0, to full relative accuracy near it, finite far from it."""
    near = torch.log1p(weight * torch.expm1(difference.clamp(-1, 1)))
    far = torch.logaddexp(torch.full_like(difference, math.log1p(-weight)), difference + math.log(weight))
    return torch.where(difference.abs() <= 1, near, far)


@KINDS.register("forward_kl")
def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student)."""
    return kl(log_q, log_p)


@KINDS.register("reverse_kl")
def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(student || teacher)."""
    return kl(log_p, log_q)


@KINDS.register("bc_reverse_kl")
def bc_reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Bias-corrected reverse KL, sum p log(p / q) - p + q over the kept ids (RP-OPSD, arXiv 2607.24447).

    With full-softmax probabilities over a part of the vocabulary, each term is >= 0 and 0 only where p = q; its derivative
    in p is log(p / q). Over the whole vocabulary the correction vanishes and it is the reverse KL.
    """
    p, difference = log_p.exp(), log_p - log_q
    clamped = difference.clamp(-1, 1)
    near = p * (clamped + torch.expm1(-clamped))  # the same without its cancellation near p = q
    far = p * difference - p + log_q.exp()
    return torch.where(difference.abs() <= 1, near, far).sum(-1)


@SUPPORTS.register("student")
def student_support(student: torch.Tensor, teacher: torch.Tensor, topk: int) -> torch.Tensor:
    """The ids of the student's ``topk`` most likely tokens. Shapes: (N, V), (N, V) -> (N, topk)."""
    return student.topk(topk, dim=-1, sorted=False).indices


@SUPPORTS.register("teacher")
def teacher_support(student: torch.Tensor, teacher: torch.Tensor, topk: int) -> torch.Tensor:
    """The ids of the teacher's ``topk`` most likely tokens. Shapes: (N, V), (N, V) -> (N, topk)."""
    return teacher.topk(topk, dim=-1, sorted=False).indices


@SUPPORTS.register("full")
def full_support(student: torch.Tensor, teacher: torch.Tensor, topk: int) -> None:
    """Every token of the vocabulary; ``topk`` is not used."""
    return None


@TAILS.register("bucket")
def bucket_tail(log_probs: torch.Tensor) -> torch.Tensor:
    """Append one bin with the mass of all other tokens. Shapes: (N, K) -> (N, K + 1)."""
    mass = log_probs.logsumexp(-1, keepdim=True).clamp(max=MAX_LOG_MASS)
    return torch.cat([log_probs, torch.log(-torch.expm1(mass))], dim=-1)


@TAILS.register("renormalise")
def renormalise_tail(log_probs: torch.Tensor) -> torch.Tensor:
    """Let the kept tokens sum to one. Shapes: (N, K) -> (N, K)."""
    return log_probs - log_probs.logsumexp(-1, keepdim=True)


@TAILS.register("none")
def no_tail(log_probs: torch.Tensor) -> torch.Tensor:
    """Leave the full-softmax probabilities of the kept tokens as they are."""
    return log_probs


class Divergence:
    """The divergence of a recipe, ``divergence(student_logits, teacher_logits) -> (value, diagnostics)``.

    Args:
        kind, support, tail: Registry keys.
        topk: Number of ids kept, K; ignored by ``support: full``.
        options: The kind's own options (``alpha`` of ``jsd``).
    """

    def __init__(self, kind: str, support: str, tail: str, topk: int, **options: Any):
        self._kind: Callable = KINDS.build({"kind": kind, **options}, "opd.divergence")
        self._support = SUPPORTS.get(support)
        self._tail = TAILS.get(tail)
        self.topk = topk
        self.full = support == "full"
        refuse_senseless(kind, support, tail, topk, options)

    def __call__(self, student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Divergence per position.

        Args:
            student: fp32 logits (N, V), with gradient.
            teacher: fp32 logits (N, V), without.

        Returns:
            The divergence (N,), and the share of each model's mass on the kept ids (N,), without gradient.
        """
        log_p, log_q = (logits.log_softmax(-1).clamp(min=MIN_LOG_PROB) for logits in (student, teacher))
        with torch.no_grad():
            ids = self._support(student.detach(), teacher, min(self.topk, student.shape[-1]))
        if ids is None:
            one = torch.ones_like(log_p[:, 0]).detach()
            return self._kind(log_p, log_q), {"student_mass": one, "teacher_mass": one}
        log_p, log_q = log_p.gather(-1, ids), log_q.gather(-1, ids)
        mass = {"student_mass": log_p.detach().exp().sum(-1), "teacher_mass": log_q.exp().sum(-1)}
        return self._kind(self._tail(log_p), self._tail(log_q)), mass


def refuse_senseless(kind: str, support: str, tail: str, topk: int, options: dict[str, Any]) -> None:
    """Raise :class:`RecipeError` for a combination that has no meaning or is known to mislead."""
    alpha = options.get("alpha", 0.5)
    if kind == "jsd" and not 0 < alpha < 1:
        raise RecipeError(
            f"opd.divergence.alpha: {alpha} leaves jsd identically 0; use kind=forward_kl for KL(teacher || student) "
            "or kind=reverse_kl for KL(student || teacher)"
        )
    if topk < 1:
        raise RecipeError(f"opd.divergence.topk: must be at least 1, got {topk}")
    if kind == "bc_reverse_kl" and (support, tail) != ("teacher", "none"):
        raise RecipeError(
            f"opd.divergence: kind=bc_reverse_kl is defined on the teacher's top-K without a tail, not with support={support} "
            f"and tail={tail}; set support=teacher and tail=none, or use kind=reverse_kl"
        )
    if support == "full" and tail != "none":
        raise RecipeError(f"opd.divergence: support=full leaves no tail to treat, but tail={tail}; set tail=none")
    if support != "full" and tail == "none" and kind != "bc_reverse_kl":
        raise RecipeError(
            f"opd.divergence: kind={kind} over {support}'s top-K without a tail is no divergence (it can be negative "
            "and its minimum is not at the teacher); set tail=bucket or tail=renormalise, or support=full"
        )
