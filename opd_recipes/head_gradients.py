"""Backward passes of the streamed head: logits are computed once more, a chunk at a time, and gradients added up in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from opd_recipes.divergence import NO_ID

#: Largest -log of a probability whose inverse is taken: what is rarer has no gradient, and 0 times this inverse is 0.
MAX_LOG_SHARE = 80.0


class GradientSum:
    """The head's weight gradient, added up over chunks in one fp32 tensor.

    In bf16 each addition would round to 8 bits; and autograd's own sum holds three of them: the sum so far, a chunk's, the new.
    """

    total: torch.Tensor | None = None

    def add(self, grad: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add grad^T hidden; shapes (n, V), (n, D)."""
        if self.total is None:
            self.total = (grad.T @ hidden).float()
        elif grad.dtype == torch.float32:
            self.total.addmm_(grad.T, hidden)
        else:
            self.total.add_(grad.T @ hidden)


class Collect(torch.autograd.Function):
    """The weight itself; its gradient is the sum that the chunks have made, which exists once all of them have run."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, gradient: GradientSum) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradient, ctx.dtype = gradient, weight.dtype
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, _):
        total, ctx.gradient.total = ctx.gradient.total, None
        return None if total is None else total.to(ctx.dtype), None


class ChunkLinear(torch.autograd.Function):
    """``F.linear`` whose weight gradient goes to a :class:`GradientSum`."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, gradient: GradientSum) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.gradient = gradient
        return F.linear(hidden, weight)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        hidden, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.gradient.add(grad, hidden)
        return grad @ weight, None, None


class LogProbs(torch.autograd.Function):
    """Log-probabilities of the label, of K kept ids and of the others' sum; the logits are computed once more in backward.

    With g the gradients of these three kinds and G their sum, that of a logit with probability p is, over the temperature,
    g_k - p G for a kept id, p (g_others / p_others - G) for another, and g_label more for the label.

    Args:
        labels, ids: (n,) and (n, K); NO_ID where a column has no id of its own.
        values: (n, 1 + K + 1), computed before.
        total: (n, 1) logsumexp of the logits.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        ids: torch.Tensor,
        values: torch.Tensor,
        total: torch.Tensor,
        temperature: float,
        gradient: GradientSum,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, labels, ids, values, total)
        ctx.temperature, ctx.gradient = temperature, gradient
        return values.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        hidden, weight, labels, ids, values, total = ctx.saved_tensors
        grad = grad / ctx.temperature
        whole, others = grad.sum(-1, keepdim=True), grad[:, -1:] * (-values[:, -1:]).clamp(max=MAX_LOG_SHARE).exp()
        kept = grad[:, 1:-1] - values[:, 1:-1].exp() * whole
        logits = divided(F.linear(hidden, weight), ctx.temperature)
        grad_logits = logits.sub_(total).exp_().mul_(others - whole)
        grad_logits.scatter_(-1, named(ids), torch.where(ids == NO_ID, kept[:, :1], kept))
        grad_logits.scatter_add_(-1, labels[:, None], grad[:, :1])
        grad_logits = grad_logits.to(hidden.dtype)
        del logits
        if ctx.needs_input_grad[1]:
            ctx.gradient.add(grad_logits, hidden)
        return grad_logits @ weight, None, None, None, None, None, None, None


def named(ids: torch.Tensor) -> torch.Tensor:
    """Ids (n, K) with the first one in the place of :data:`NO_ID`."""
    return torch.where(ids == NO_ID, ids[:, :1], ids)


def divided(product: torch.Tensor, temperature: float) -> torch.Tensor:
    """fp32 logits from the head's output, which may be overwritten."""
    logits = product.float()
    return logits if temperature == 1.0 else logits.div_(temperature)
