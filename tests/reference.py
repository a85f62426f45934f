"""Independent float64 formulas, written from the papers with plain loops where that is clearest. Tests compare with these."""

from __future__ import annotations

import math

import torch


def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sum a log(a / b) of two probability vectors, 0 log 0 = 0."""
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(a, b, strict=True):
        if x > 0:
            total = total + x * (torch.log(x) - torch.log(y))
    return total


def topk_ids(probs: torch.Tensor, k: int) -> list[int]:
    """The ids of the ``k`` largest of (V,), largest first."""
    return sorted(range(len(probs)), key=lambda i: -probs[i].item())[:k]


def divergence(
    student_logits,
    teacher_logits,
    kind="jsd",
    alpha=0.5,
    support="student",
    tail="bucket",
    k=100,
    label=None,
    estimator=None,
):
    """One position: logits (V,) in float64 -> scalar."""
    p, q = torch.softmax(student_logits, -1), torch.softmax(teacher_logits, -1)
    if kind == "sampled_kl":
        return sampled_kl(p[label], q[label], estimator)
    if support != "full":
        ours, theirs = topk_ids(p.detach(), k), topk_ids(q, k)
        ids = {"student": ours, "teacher": theirs, "union": sorted({*ours, *theirs})}[support]
        p, q = p[ids], q[ids]
        if tail == "bucket":
            p, q = torch.cat([p, 1 - p.sum(0, keepdim=True)]), torch.cat([q, 1 - q.sum(0, keepdim=True)])
        elif tail == "renormalise":
            p, q = p / p.sum(), q / q.sum()
    if kind == "bc_reverse_kl":
        return sum(a * torch.log(a / b) - a + b for a, b in zip(p, q, strict=True))
    if kind == "forward_kl":
        return kl(q, p)
    if kind == "reverse_kl":
        return kl(p, q)
    m = (1 - alpha) * p + alpha * q
    return (1 - alpha) * kl(p, m) + alpha * kl(q, m)


def sampled_kl(p: torch.Tensor, q: torch.Tensor, estimator: str):
    """The estimators of KL(p || q) from the probabilities of one sample of p."""
    if estimator == "k1":
        return torch.log(p / q)
    return torch.log(p / q) ** 2 / 2 if estimator == "k2" else q / p - 1 - torch.log(q / p)


def utility(student_logits, teacher_logits, k) -> float:
    """One position of BAS-OPD's utility, d * o * c: logits (V,) in float64."""
    p, q = torch.softmax(student_logits, -1).tolist(), torch.softmax(teacher_logits, -1).tolist()
    ours, theirs = (sorted(range(len(x)), key=x.__getitem__, reverse=True)[:k] for x in (p, q))
    a, b = [p[i] / sum(p[j] for j in ours) for i in ours], [q[i] / sum(q[j] for j in ours) for i in ours]
    d = sum(
        0.5 * x * math.log(2 * x / (x + y)) + 0.5 * y * math.log(2 * y / (x + y)) for x, y in zip(a, b, strict=True)
    )
    shared = sum(i in theirs for i in ours) / len(ours)
    entropy = -sum(y * math.log(y) for y in b)
    return d * shared * (1 - entropy / math.log(len(ours)))


def loss(rows, aggregation="seq_mean_token_mean", cap=2.0, **options):
    """The loss of a global batch.

    Args:
        rows: For each response a dict of student (r, V) and teacher (r, V) logits, labels (r,), mask (r,), rollout (r,).
    """
    terms, weights = [], []
    tokens = sum(int(row["mask"].sum()) for row in rows)
    responses = sum(bool(row["mask"].any()) for row in rows)
    for row in rows:
        for t in range(len(row["labels"])):
            if not row["mask"][t]:
                continue
            log_p = torch.log_softmax(row["student"][t], -1)[row["labels"][t]].item()
            importance = min(math.exp(log_p - row["rollout"][t].item()), cap) if cap is not None else 1.0
            share = 1 / tokens if aggregation == "token_mean" else 1 / (responses * int(row["mask"].sum()))
            label = int(row["labels"][t])
            terms.append(divergence(row["student"][t], row["teacher"][t], label=label, **options))
            weights.append(share * importance)
    return sum(w * t for w, t in zip(weights, terms, strict=True)) if terms else torch.zeros((), dtype=torch.float64)
