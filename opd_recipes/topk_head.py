"""The language-model head, streamed: logits exist for a chunk of response positions at a time, never as a whole.

Full logits are the memory of a distillation step (9k tokens x 248k words x 4 bytes = 9 GB a sequence). Only response
positions are scored, and of each position only a few numbers are kept. :class:`StreamedHead` stands in for the model's
``lm_head`` under the same parameter name, so checkpoints, weight sync and FSDP see no difference; what it computes is
set for the length of one forward by :meth:`StreamedHead.serving`. Working inside the model's own forward is what makes
it right under FSDP2: there the sharded weight is gathered, and its gradient is reduced like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from opd_recipes.divergence import Divergence, utility

#: What a request returns for N positions: named tensors of shape (N,) or (N, D).
HeadOutput = dict[str, torch.Tensor]


class StreamedHead(nn.Module):
    """An ``lm_head`` that answers requests instead of returning all logits.

    Args:
        linear: The model's head. Its parameters are shared, not copied, so tied weights stay tied.
    """

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.weight = linear.weight
        self.bias = getattr(linear, "bias", None)
        self._request: Callable[[torch.Tensor, torch.Tensor], HeadOutput] | None = None

    @classmethod
    def install(cls, model: nn.Module) -> StreamedHead:
        """Replace the output embedding of a Hugging Face model and return the replacement."""
        linear = model.get_output_embeddings()
        if linear is None or getattr(linear, "bias", None) is not None:
            raise NotImplementedError(
                f"{type(model).__name__} has {'no output embedding' if linear is None else 'a biased lm_head'}; "
                "the streamed head needs a bias-free linear lm_head"
            )
        head = cls(linear)
        model.set_output_embeddings(head)
        return head

    @contextmanager
    def serving(self, request: Callable[[torch.Tensor, torch.Tensor], HeadOutput]) -> Iterator[None]:
        """For one forward, return ``request(hidden, weight)`` in the place of the logits."""
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def forward(self, hidden: torch.Tensor):
        if self._request is None:
            return F.linear(hidden, self.weight, self.bias)
        return self._request(hidden, self.weight)


class HiddenRequest:
    """Return the final hidden states at ``index``: ``{"hidden": (N, D)}``. The teacher's half of a distillation step.

    Args:
        index: (N,) positions in the flattened (batch * length) hidden states.
        labels: (N,) next tokens; where given, the answer has their ``log_probs`` (N,) as well.
        temperature, chunk: As in :class:`ScoreRequest`.
    """

    def __init__(
        self, index: torch.Tensor, labels: torch.Tensor | None = None, *, temperature: float = 1.0, chunk: int = 256
    ):
        self.index, self.labels = index, labels
        self.temperature, self.chunk = temperature, chunk

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor) -> HeadOutput:
        hidden = hidden.flatten(0, -2)[self.index]
        if self.labels is None:
            return {"hidden": hidden}
        parts = [
            _label_log_probs(F.linear(states, weight).float() / self.temperature, labels)
            for states, labels in zip(hidden.split(self.chunk), self.labels.split(self.chunk), strict=True)
        ]
        return {"hidden": hidden, "log_probs": torch.cat(parts) if parts else hidden.new_zeros(0).float()}


@dataclass(frozen=True)
class TeacherStates:
    """What a teacher's pass leaves for the student's head.

    Args:
        hidden: (N, D) final hidden states at the positions that predict the response tokens.
        weight: (V, D) the teacher's whole head.
        live: (N, D') the live student's hidden states on the teacher's view, where its logits are mixed in.
        live_share: Its share of the logits.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    live: torch.Tensor | None = None
    live_share: float = 0.0

    def logits(self, rows: slice, student_weight: torch.Tensor) -> torch.Tensor:
        """fp32 logits of some positions over the student's ids, (n, V).

        Models of one family pad their vocabulary to different sizes; no token has an id in the padding.
        """
        size = len(student_weight)
        logits = F.linear(self.hidden[rows], self.weight[:size]).float()
        logits = F.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)
        if self.live is None:
            return logits
        return logits.lerp(F.linear(self.live[rows], student_weight).float(), self.live_share)


class ScoreRequest:
    """Score response tokens, and where a teacher is given, compare with it.

    Args:
        index: (N,) positions in the flattened hidden states whose next token is scored.
        labels: (N,) the next tokens.
        temperature: Divides the logits of both models.
        chunk: Positions per chunk; peak memory is a few (chunk, V) fp32 tensors.
        teacher: What the teacher's pass left, or ``None``.
        divergence: Compares the two; needed with a teacher.
        utility_topk: Where given, also the ``utility`` of each token, over that many ids
            (:func:`~opd_recipes.divergence.utility`).

    The answer has, each of shape (N,): ``log_probs`` of the labels (with gradient), ``entropy`` (without) and, with a
    teacher, ``divergence`` (with gradient), ``teacher_log_probs``, ``teacher_entropy``, ``student_mass``,
    ``teacher_mass``, ``utility`` (without).
    """

    def __init__(
        self,
        index: torch.Tensor,
        labels: torch.Tensor,
        *,
        temperature: float = 1.0,
        chunk: int = 256,
        teacher: TeacherStates | None = None,
        divergence: Divergence | None = None,
        utility_topk: int | None = None,
    ):
        self.index, self.labels = index, labels
        self.temperature, self.chunk = temperature, chunk
        self.teacher, self.divergence, self.utility_topk = teacher, divergence, utility_topk

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor) -> HeadOutput:
        hidden = hidden.flatten(0, -2)[self.index]
        if len(self.index) == 0:
            return self._empty(hidden, weight)
        gradient = None if weight.dtype == torch.float32 else _GradientSum()
        if gradient is not None:
            weight = _Collect.apply(weight, gradient)
        parts = []
        for start in range(0, len(self.index), self.chunk):
            rows = slice(start, start + self.chunk)
            # Recomputing a chunk in backward is what keeps its logits from being stored.
            parts.append(checkpoint(self._score, hidden[rows], weight, rows, gradient, use_reentrant=False))
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _score(
        self, hidden: torch.Tensor, weight: torch.Tensor, rows: slice, gradient: _GradientSum | None
    ) -> HeadOutput:
        # What has a gradient comes first: the recomputation in backward ends where nothing more is needed for it.
        logits, labels = self._logits(hidden, weight, gradient), self.labels[rows]
        out = {"log_probs": _label_log_probs(logits, labels)}
        teacher_logits = None
        if self.teacher is not None and self.divergence is not None:
            with torch.no_grad():
                teacher_logits = self.teacher.logits(rows, weight) / self.temperature
            out["divergence"], mass = self.divergence(logits, teacher_logits, labels)
            out |= mass
        with torch.no_grad():
            out["entropy"] = _entropy(logits)
            if teacher_logits is not None:
                out["teacher_log_probs"] = _label_log_probs(teacher_logits, labels)
                out["teacher_entropy"] = _entropy(teacher_logits)
                if self.utility_topk is not None:
                    out["utility"] = utility(logits, teacher_logits, self.utility_topk)
        return out

    def _logits(self, hidden: torch.Tensor, weight: torch.Tensor, gradient: _GradientSum | None = None) -> torch.Tensor:
        product = F.linear(hidden, weight) if gradient is None else _ChunkLinear.apply(hidden, weight, gradient)
        return product.float() / self.temperature

    def _empty(self, hidden: torch.Tensor, weight: torch.Tensor) -> HeadOutput:
        """No position at all (every response is empty): zeros that stay in the graph, so that FSDP can run backward."""
        zero = hidden.sum(-1) + weight.flatten()[:1].sum() * 0.0
        keys = ["log_probs", "entropy"]
        if self.teacher:
            keys += ["divergence", "teacher_log_probs", "teacher_entropy", "student_mass", "teacher_mass"]
            keys += ["utility"] if self.utility_topk is not None else []
        return dict.fromkeys(keys, zero.float())


class _GradientSum:
    """The head's weight gradient, added up over chunks in fp32: in bf16 each addition would round to 8 bits."""

    total: torch.Tensor | None = None

    def add(self, part: torch.Tensor) -> None:
        self.total = part.float() if self.total is None else self.total.add_(part)


class _Collect(torch.autograd.Function):
    """The weight itself; its gradient is the sum that the chunks have made, which exists once all of them have run."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, gradient: _GradientSum) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradient, ctx.dtype = gradient, weight.dtype
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, _):
        total, ctx.gradient.total = ctx.gradient.total, None
        return None if total is None else total.to(ctx.dtype), None


class _ChunkLinear(torch.autograd.Function):
    """``F.linear`` whose weight gradient goes to a :class:`_GradientSum`."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, gradient: _GradientSum) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.gradient = gradient
        return F.linear(hidden, weight)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        hidden, weight = ctx.saved_tensors
        ctx.gradient.add(grad.T @ hidden)
        return grad @ weight, None, None


def _label_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, labels[:, None]).squeeze(-1) - logits.logsumexp(-1)


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(logits.softmax(-1)).sum(-1)
