"""The distillation objective: token losses, importance weights, and their mean over the global batch.

All per-token tensors are flat, (N,): the response tokens of the micro-batch's rows, one row after another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from opd_recipes.registry import RecipeError, Registry

AGGREGATIONS = Registry("opd.objective.aggregation")


@dataclass(frozen=True)
class Normaliser:
    """Sizes of the whole mini-batch, over all ranks and micro-batches, so that no split changes the loss.

    Args:
        tokens: Response tokens that count.
        responses: Responses with at least one such token.
        world: Data-parallel ranks. Gradients are averaged over ranks, so each rank's sum is scaled by it.
        weight: What ``token_mean`` divides by where the recipe's weights ask for something else than ``tokens``.
    """

    tokens: int
    responses: int
    world: int
    weight: float | None = None


@AGGREGATIONS.register("token_mean")
def token_mean(mask: torch.Tensor, lengths: torch.Tensor, total: Normaliser) -> torch.Tensor:
    """Every token of the global batch counts the same (BAS-OPD, OPD-V). Shapes: (N,), (rows,) -> (N,)."""
    denominator = total.tokens if total.weight is None else total.weight
    return mask * (total.world / denominator if denominator > 0 else 0.0)


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(mask: torch.Tensor, lengths: torch.Tensor, total: Normaliser) -> torch.Tensor:
    """Every response counts the same, its tokens share that (Vision-OPD). Shapes: (N,), (rows,) -> (N,)."""
    rows = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
    counted = torch.zeros(len(lengths), device=mask.device).index_add_(0, rows, mask)
    return mask / counted.clamp(min=1)[rows] * (total.world / max(total.responses, 1))


@dataclass(frozen=True)
class Objective:
    """How token divergences become one loss.

    Args:
        kind: ``distill``: differentiate the divergence. ``advantage``: use it as a per-token advantage in verl's
            policy-gradient loss (:mod:`opd_recipes.advantage`); the settings from ``coefficient`` on are for this kind alone.
        aggregation: ``token_mean`` or ``seq_mean_token_mean``.
        rollout_is_cap: Upper threshold of the importance weight pi_train / pi_vllm of each token; null: no correction.
        is_clip: Upper threshold of pi / pi_old when a batch is used for several updates; null: no threshold.
        coefficient: Factor of the distillation advantage.
        discount: Factor per token by which a token answers for the divergence that comes after it; 0: for its own alone.
        task_advantage: verl estimator of the task reward's advantage that is added (``grpo``, ...); null: none.
    """

    kind: str = "distill"
    aggregation: str = "seq_mean_token_mean"
    rollout_is_cap: float | None = 2.0
    is_clip: float | None = 2.0
    coefficient: float = 1.0
    discount: float = 0.0
    task_advantage: str | None = None

    def __post_init__(self):
        if self.kind not in ("distill", "advantage"):
            raise RecipeError(f"opd.objective.kind: unknown value {self.kind!r}; known: advantage, distill")
        if not 0 <= self.discount <= 1:
            raise RecipeError(f"opd.objective.discount: must be in [0, 1], got {self.discount}")
        if self.coefficient <= 0:
            raise RecipeError(f"opd.objective.coefficient: must be above 0, got {self.coefficient}")
        if self.kind == "distill" and (self.coefficient, self.discount, self.task_advantage) != (1.0, 0.0, None):
            raise RecipeError(
                "opd.objective: coefficient, discount and task_advantage belong to kind=advantage; with kind=distill leave "
                "them at 1.0, 0.0 and null"
            )
        AGGREGATIONS.get(self.aggregation)
        for name in ("rollout_is_cap", "is_clip"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise RecipeError(f"opd.objective.{name}: must be above 0 (or null to switch it off), got {value}")

    def token_coefficients(self, mask: torch.Tensor, lengths: torch.Tensor, total: Normaliser) -> torch.Tensor:
        """The share of each token in the loss, (N,); 0 where ``mask`` is 0."""
        return AGGREGATIONS.get(self.aggregation)(mask, lengths, total)

    def importance(
        self, log_probs: torch.Tensor, rollout: torch.Tensor | None, old: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two detached factors of each token's importance weight, (N,): between engines and between policies.

        With one update per batch ``old`` is None: the policy that trains is the one that sampled, and only the two
        engines differ. With several, the engine's part uses ``old`` and the policy's part is clipped by itself.
        """
        log_probs = log_probs.detach()
        behaviour = log_probs if old is None else old
        engines = policies = torch.ones_like(log_probs)
        if self.rollout_is_cap is not None and rollout is not None:
            engines = (behaviour - rollout).exp().clamp(max=self.rollout_is_cap)
        if old is not None:
            policies = (log_probs - old).exp().clamp(max=math.inf if self.is_clip is None else self.is_clip)
        return engines, policies


#: Prefix of the metrics from which :func:`pearson` is computed once they have been added up over the global batch.
MOMENTS = "opd/moments/"


def _moments(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}


def pearson(moments: dict[str, float]) -> float:
    """Correlation of two variables from the means of x, y, xx, yy and xy; 1 where one of them does not vary."""
    covariance = moments["xy"] - moments["x"] * moments["y"]
    variances = [moments[2 * axis] - moments[axis] ** 2 for axis in "xy"]
    return covariance / math.sqrt(variances[0] * variances[1]) if min(variances) > 0 else 1.0


def distill_loss(
    outputs: dict[str, torch.Tensor],
    *,
    objective: Objective,
    mask: torch.Tensor,
    lengths: torch.Tensor,
    total: Normaliser,
    token_weights: torch.Tensor | None = None,
    rollout_log_probs: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """One micro-batch's part of the loss: sum over tokens of coefficient * importance * weight * divergence.

    Args:
        outputs: What :class:`~opd_recipes.topk_head.ScoreRequest` returned.
        mask: (N,) 1 for tokens that count.
        lengths: (rows,) response lengths, summing to N.
        total: Sizes of the global mini-batch.
        token_weights: (N,) of the recipe's weights; None: all 1.
        rollout_log_probs, old_log_probs: (N,) of the sampled tokens, from vLLM and from before the first update.

    Returns:
        The loss (a sum whose total over micro-batches and mean over ranks is the loss of the global batch) and metrics
        that add up in the same way.
    """
    mask = mask.to(outputs["divergence"].dtype)
    coefficient = objective.token_coefficients(mask, lengths, total)
    engines, policies = objective.importance(outputs["log_probs"], rollout_log_probs, old_log_probs)
    importance = engines * policies
    token_loss = importance * outputs["divergence"]
    if token_weights is not None:
        token_loss = token_loss * token_weights
    loss = (coefficient * token_loss.where(mask > 0, 0.0)).sum()

    share = mask.double() * (total.world / max(total.tokens, 1))
    means = {
        "opd/divergence": outputs["divergence"].detach(),
        "opd/entropy": outputs["entropy"],
        "opd/teacher_entropy": outputs["teacher_entropy"],
        "opd/student_mass": outputs["student_mass"],
        "opd/teacher_mass": outputs["teacher_mass"],
        "opd/teacher_minus_student": outputs["teacher_log_probs"] - outputs["log_probs"].detach(),
        "opd/importance_weight": importance,
    }
    if rollout_log_probs is not None:
        ours, theirs = outputs["log_probs"].detach().double(), rollout_log_probs.double()
        means["opd/rollout_gap"] = (ours - theirs).abs()
        means |= {MOMENTS + name: value for name, value in _moments(ours, theirs).items()}
    if objective.rollout_is_cap is not None:
        means["opd/importance_capped"] = (engines >= objective.rollout_is_cap).float()
    return loss, {key: (share * value.where(mask > 0, 0.0)).sum().item() for key, value in means.items()}
