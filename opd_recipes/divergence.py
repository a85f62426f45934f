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
ESTIMATORS = Registry("opd.divergence.estimator")

#: Floor of log-probabilities: exp of it is 0, and unlike -inf (a padded vocabulary, a teacher's masked token) it has
#: finite differences and gradients.
MIN_LOG_PROB = -1e4

#: Floor of the tail's log-mass: log(1 - exp(s)) at the published bound s = -1e-7 of the kept tokens' log-mass.
MIN_LOG_REST = math.log(-math.expm1(-1e-7))

#: In the place of an id that a support names twice: it counts nowhere, neither in the sum nor in the tail nor in the mass.
NO_ID = -1

#: log q(y) - log p(y) beyond which ``k3`` continues exp by its tangent: exp would overflow fp32 at 88.
MAX_EXPONENT = 20.0


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


@KINDS.register("sampled_kl")
def sampled_kl(log_p: torch.Tensor, log_q: torch.Tensor, *, estimator: str) -> torch.Tensor:
    """KL(student || teacher) from the sampled token y alone, with r = log p(y) - log q(y). Shapes: (N, 1) -> (N,).

    The three estimators (Schulman, "Approximating KL divergence", 2020) are made for y ~ p, and their expected *values*
    are the KL (``k2``: to second order). Differentiated directly, as ``objective: distill`` does, they are three
    different losses, since sum_y p(y) grad k(y) is

    - ``k1``: zero. It is the expected score; the gradient has variance and no direction.
    - ``k2``: the gradient of the reverse KL, KL(p || q).
    - ``k3``: the gradient of the *forward* KL, KL(q || p), although its value estimates the reverse.

    Args:
        estimator: ``k1`` = r; ``k2`` = r^2 / 2; ``k3`` = exp(-r) - 1 + r.
    """
    return ESTIMATORS.get(estimator)(log_p - log_q).sum(-1)


@ESTIMATORS.register("k1")
def _k1(r: torch.Tensor) -> torch.Tensor:
    return r


@ESTIMATORS.register("k2")
def _k2(r: torch.Tensor) -> torch.Tensor:
    return r.square() / 2


@ESTIMATORS.register("k3")
def _k3(r: torch.Tensor) -> torch.Tensor:
    """exp(-r) - 1 + r; below r = -MAX_EXPONENT exp goes on as its tangent, so value and gradient stay finite and convex.

    Such a token is exp(20) times likelier under the teacher than under the student that sampled it. Clamping r instead
    would leave the gradient of the last term alone, which points away from the teacher.
    """
    near = (-r).clamp(max=MAX_EXPONENT)
    beyond = torch.relu(-r - MAX_EXPONENT)
    return torch.expm1(near) + math.exp(MAX_EXPONENT) * beyond + r


@SUPPORTS.register("student")
def student_support(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, topk: int) -> torch.Tensor:
    """The ids of the student's ``topk`` most likely tokens. Shapes: (N, V), (N, V), (N,) -> (N, topk)."""
    return student.topk(topk, dim=-1, sorted=False).indices


@SUPPORTS.register("teacher")
def teacher_support(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, topk: int) -> torch.Tensor:
    """The ids of the teacher's ``topk`` most likely tokens. Shapes: (N, V), (N, V), (N,) -> (N, topk)."""
    return teacher.topk(topk, dim=-1, sorted=False).indices


@SUPPORTS.register("union")
def union_support(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, topk: int) -> torch.Tensor:
    """The ids in the student's ``topk`` or the teacher's, each once; the other places hold :data:`NO_ID`.

    Shapes: (N, V), (N, V), (N,) -> (N, 2 topk), ascending.
    """
    ours, theirs = (logits.topk(topk, dim=-1, sorted=False).indices for logits in (student, teacher))
    ids = torch.cat([ours, theirs], dim=-1).sort(-1).values
    ids[:, 1:] = ids[:, 1:].masked_fill(_repeated(ids), NO_ID)
    return ids


def _repeated(ids: torch.Tensor) -> torch.Tensor:
    """Where an ascending row says its previous id again. Shapes: (N, K) -> (N, K - 1)."""
    return ids[:, 1:] == ids[:, :-1]


@SUPPORTS.register("sampled")
def sampled_support(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, topk: int) -> torch.Tensor:
    """The sampled token alone; ``topk`` is not used. Shapes: (N, V), (N, V), (N,) -> (N, 1)."""
    return labels[:, None]


@SUPPORTS.register("full")
def full_support(student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, topk: int) -> None:
    """Every token of the vocabulary; ``topk`` is not used."""
    return None


@TAILS.register("bucket")
def bucket_tail(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The kept tokens, and one bin with the mass of all others. Shapes: (N, V), (N, K) -> (N, K + 1).

    The bin is the published log(1 - sum of the kept) with its floor, but summed over the other tokens: in fp32 the
    difference and its gradient have no digits left where the kept tokens hold nearly everything.
    """
    named = torch.where(ids == NO_ID, ids[:, :1], ids)
    rest = log_probs.scatter(-1, named, MIN_LOG_PROB).logsumexp(-1, keepdim=True)
    return torch.cat([_kept(log_probs, ids), rest.clamp(min=MIN_LOG_REST)], dim=-1)


@TAILS.register("renormalise")
def renormalise_tail(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The kept tokens, which together have all the mass. Shapes: (N, V), (N, K) -> (N, K)."""
    kept = _kept(log_probs, ids)
    return kept - kept.logsumexp(-1, keepdim=True)


@TAILS.register("none")
def no_tail(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The kept tokens with their full-softmax probabilities. Shapes: (N, V), (N, K) -> (N, K)."""
    return _kept(log_probs, ids)


class Divergence:
    """The divergence of a recipe, ``divergence(student_logits, teacher_logits, labels) -> (value, diagnostics)``.

    Args:
        kind, support, tail: Registry keys.
        topk: Number of ids kept, K (``union``: of each model); ignored by ``full`` and ``sampled``.
        options: The kind's own options (``alpha`` of ``jsd``, ``estimator`` of ``sampled_kl``).

    Attributes:
        full: Whether every token of the vocabulary is compared.
        sampled: Whether only the sampled token is.
        estimator: ``k1``, ``k2`` or ``k3`` of ``sampled_kl``; None for every other kind.

    Raises:
        RecipeError: An unknown value or option, or a combination without meaning.
    """

    def __init__(self, kind: str, support: str, tail: str, topk: int, **options: Any):
        self._kind: Callable = KINDS.build({"kind": kind, **options}, "opd.divergence")
        self._support = SUPPORTS.get(support)
        self._tail = TAILS.get(tail)
        self.topk = topk
        self.full = support == "full"
        self.sampled = support == "sampled"
        self.estimator: str | None = options.get("estimator")
        refuse_senseless(kind, support, tail, topk, options)

    def __call__(
        self, student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Divergence per position.

        Args:
            student: fp32 logits (N, V), with gradient.
            teacher: fp32 logits (N, V), without.
            labels: (N,) int64, the sampled tokens; only ``support: sampled`` reads them.

        Returns:
            The divergence (N,), and the share of each model's mass on the kept ids (N,), without gradient.
        """
        log_p, log_q = _log_probs(student), _log_probs(teacher.detach())
        ids = self.ids(student, teacher, labels)
        if ids is None:
            one = torch.ones_like(log_p[:, 0]).detach()
            return self._kind(log_p, log_q), {"student_mass": one, "teacher_mass": one}
        return self.compare(log_p, log_q, ids)

    @torch.no_grad()
    def ids(self, student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | None:
        """The ids that are compared, from logits or log-probabilities (N, V) and labels (N,); None: all."""
        return self._support(student, teacher, labels, min(self.topk, student.shape[-1]))

    def compare(
        self, log_p: torch.Tensor, log_q: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """:meth:`__call__` from log-probabilities (N, V) and the kept ids (N, K).

        The outcomes that are not kept may stand for several ids each: only the sum of their probabilities matters.
        """
        student_mass, teacher_mass = (_kept(x.detach(), ids).exp().sum(-1) for x in (log_p, log_q))
        mass = {"student_mass": student_mass, "teacher_mass": teacher_mass}
        return self._kind(self._tail(log_p, ids), self._tail(log_q, ids)), mass


def _log_probs(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).clamp(min=MIN_LOG_PROB)


def _kept(log_probs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities at ``ids``; where there is none, an impossible token. Shapes: (N, V), (N, K) -> (N, K)."""
    return log_probs.gather(-1, ids.clamp(min=0)).masked_fill(ids == NO_ID, MIN_LOG_PROB)


@torch.no_grad()
def utility(student: torch.Tensor, teacher: torch.Tensor, topk: int) -> torch.Tensor:
    """How much each position has to teach: d * o * c of BAS-OPD (arXiv 2609.25891), without gradient.

    On the student's top-k ids, both models renormalised to them: d is the Jensen-Shannon divergence (alpha 0.5), o the
    share of these ids that are in the teacher's own top-k, c = 1 - H(teacher) / log k its certainty. With k = 1 there
    is nothing to be uncertain about, so c = 1 (and d = 0: both models have all their mass on the one id).

    Args:
        student, teacher: fp32 logits (N, V).
        topk: Ids kept, k; the vocabulary's size where that is smaller.

    Returns:
        (N,) between 0 and log 2.
    """
    k = min(topk, student.shape[-1])
    ours, theirs = (logits.topk(k, dim=-1, sorted=False).indices for logits in (student, teacher))
    log_p, log_q = (renormalise_tail(_log_probs(logits), ours) for logits in (student, teacher))
    overlap = _repeated(torch.cat([ours, theirs], dim=-1).sort(-1).values).sum(-1) / k
    entropy = -(log_q.exp() * log_q).sum(-1)
    certainty = 1 - entropy / math.log(k) if k > 1 else torch.ones_like(entropy)
    return jsd(log_p, log_q) * overlap * certainty.clamp(min=0)


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
    if kind == "sampled_kl":
        ESTIMATORS.get(options["estimator"])
        if (support, tail) != ("sampled", "none"):
            raise RecipeError(
                f"opd.divergence: kind=sampled_kl reads the sampled token alone, not support={support} and tail={tail}; "
                "set support=sampled and tail=none, or use kind=reverse_kl"
            )
    elif support == "sampled":
        raise RecipeError(
            f"opd.divergence: support=sampled has one token and no distribution to give kind={kind}; use kind=sampled_kl, "
            "or support=student, teacher, union or full"
        )
    if support == "full" and tail != "none":
        raise RecipeError(f"opd.divergence: support=full leaves no tail to treat, but tail={tail}; set tail=none")
    if support in ("student", "teacher", "union") and tail == "none" and kind != "bc_reverse_kl":
        raise RecipeError(
            f"opd.divergence: kind={kind} over support={support} without a tail is no divergence (it can be negative "
            "and its minimum is not at the teacher); set tail=bucket or tail=renormalise, or support=full"
        )
