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

from opd_recipes.divergence import MIN_LOG_PROB, NO_ID, Divergence, utility
from opd_recipes.head_gradients import ChunkLinear, Collect, GradientSum, LogProbs, divided, named

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
        if logits.shape[-1] < size:
            logits = F.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)
        if self.live is None:
            return logits
        return logits.lerp_(F.linear(self.live[rows], student_weight).float(), self.live_share)


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
        device = hidden.device.type
        if torch.is_autocast_enabled(device):  # as F.linear would: what follows has a backward of its own
            hidden, weight = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (hidden, weight))
        gradient = GradientSum()
        weight = Collect.apply(weight, gradient)
        score = self._score_whole if self.divergence is not None and self.divergence.full else self._score
        parts = []
        for number, states in enumerate(hidden.split(self.chunk)):
            rows = slice(number * self.chunk, number * self.chunk + len(states))
            parts.append(score(states, weight, rows, gradient))
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _score(self, hidden: torch.Tensor, weight: torch.Tensor, rows: slice, gradient: GradientSum) -> HeadOutput:
        """One chunk. What has a gradient is (n, 1 + K + 1): the label, the kept ids, all others together."""
        labels = self.labels[rows]
        ids, of_teacher, out = labels[:, None], None, {}
        with torch.no_grad():
            log_p, total = self._log_probs(F.linear(hidden, weight), labels)
            if self.teacher is not None and self.divergence is not None:
                log_q, _ = self._log_probs(self.teacher.logits(rows, weight), labels)
                ids = self.divergence.ids(log_p, log_q, labels)
                assert ids is not None, "a divergence over all ids is compared whole"
                out = self._of_teacher(log_p, log_q, labels)
                of_teacher, out["teacher_entropy"] = _reduced(log_q, ids)
            of_student, out["entropy"] = _reduced(log_p, ids)
            of_student = torch.cat([log_p.gather(-1, labels[:, None]), of_student], dim=-1)
            log_p = log_q = None  # the next chunk's take their place
        of_student = LogProbs.apply(hidden, weight, labels, ids, of_student, total, self.temperature, gradient)
        out["log_probs"] = of_student[:, 0]
        if self.divergence is not None and of_teacher is not None:
            out["divergence"], mass = self.divergence.compare(of_student[:, 1:], of_teacher, _places(ids))
            out |= mass
        return out

    def _score_whole(
        self, hidden: torch.Tensor, weight: torch.Tensor, rows: slice, gradient: GradientSum
    ) -> HeadOutput:
        """One chunk of a divergence over the whole vocabulary, all of which is recomputed in backward."""
        return checkpoint(self._compare_whole, hidden, weight, rows, gradient, use_reentrant=False)

    def _compare_whole(
        self, hidden: torch.Tensor, weight: torch.Tensor, rows: slice, gradient: GradientSum
    ) -> HeadOutput:
        # What has a gradient comes first: the recomputation in backward ends where nothing more is needed for it.
        labels = self.labels[rows]
        logits = ChunkLinear.apply(hidden, weight, gradient).float() / self.temperature
        out = {"log_probs": _label_log_probs(logits, labels)}
        if self.teacher is not None and self.divergence is not None:
            with torch.no_grad():
                teacher_logits = self.teacher.logits(rows, weight) / self.temperature
            out["divergence"], mass = self.divergence(logits, teacher_logits, labels)
            out |= mass
            with torch.no_grad():
                log_q = _floored(teacher_logits)
                out |= self._of_teacher(_floored(logits), log_q, labels) | {"teacher_entropy": _entropy(log_q)}
        with torch.no_grad():
            out["entropy"] = _entropy(_floored(logits))
        return out

    def _log_probs(self, product: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From the head's output, which may be overwritten: log-probabilities (n, V), and logsumexp of the logits (n, 1)."""
        logits = divided(product, self.temperature)
        log_probs = logits.log_softmax(-1)
        total = logits.gather(-1, labels[:, None]) - log_probs.gather(-1, labels[:, None])
        return log_probs.clamp_(min=MIN_LOG_PROB), total

    def _of_teacher(self, log_p: torch.Tensor, log_q: torch.Tensor, labels: torch.Tensor) -> HeadOutput:
        """What the loss reports and the selection learns from, of log-probabilities (n, V); without gradient."""
        out = {"teacher_log_probs": log_q.gather(-1, labels[:, None]).squeeze(-1)}
        if self.utility_topk is not None:
            out["utility"] = utility(log_p, log_q, self.utility_topk)
        return out

    def _empty(self, hidden: torch.Tensor, weight: torch.Tensor) -> HeadOutput:
        """No position at all (every response is empty): zeros that stay in the graph, so that FSDP can run backward."""
        zero = hidden.sum(-1) + weight.flatten()[:1].sum() * 0.0
        keys = ["log_probs", "entropy"]
        if self.teacher:
            keys += ["divergence", "teacher_log_probs", "teacher_entropy", "student_mass", "teacher_mass"]
            keys += ["utility"] if self.utility_topk is not None else []
        return dict.fromkeys(keys, zero.float())


def _places(ids: torch.Tensor) -> torch.Tensor:
    """Where :func:`_reduced` has put the ids, (n, K)."""
    return torch.where(ids == NO_ID, NO_ID, torch.arange(ids.shape[-1], device=ids.device))


def _reduced(log_probs: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K + 1 outcomes: log-probabilities of the ids and of all others together; and the entropy over the whole vocabulary.

    Shapes: (n, V), (n, K) -> (n, K + 1), (n,). The others are summed, not what is left of 1: their sum keeps its digits.
    """
    places = named(ids)
    kept = log_probs.gather(-1, places)
    probs = log_probs.exp().scatter_(-1, places, 0.0)
    others = probs.sum(-1, keepdim=True).log().clamp(min=MIN_LOG_PROB)
    own = (kept.exp() * kept).masked_fill(ids == NO_ID, 0.0)
    entropy = -(probs.mul_(log_probs).sum(-1) + own.sum(-1))
    return torch.cat([kept.masked_fill(ids == NO_ID, MIN_LOG_PROB), others], dim=-1), entropy


def _label_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.gather(-1, labels[:, None]).squeeze(-1) - logits.logsumexp(-1)


def _floored(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).clamp_(min=MIN_LOG_PROB)


def _entropy(log_probs: torch.Tensor) -> torch.Tensor:
    return -log_probs.exp().mul_(log_probs).sum(-1)
