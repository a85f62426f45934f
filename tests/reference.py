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


def divergence(student_logits, teacher_logits, kind="jsd", alpha=0.5, support="student", tail="bucket", k=100):
    """One position: logits (V,) in float64 -> scalar."""
    p, q = torch.softmax(student_logits, -1), torch.softmax(teacher_logits, -1)
    if support != "full":
        order = (p if support == "student" else q).detach()
        ids = sorted(range(len(order)), key=lambda i: -order[i].item())[:k]
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
            terms.append(divergence(row["student"][t], row["teacher"][t], **options))
            weights.append(share * importance)
    return sum(w * t for w, t in zip(weights, terms, strict=True)) if terms else torch.zeros((), dtype=torch.float64)
