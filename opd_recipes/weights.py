"""Per-token weights of the distillation loss, from two views of one teacher: ``weight(positive, negative, ...) -> (N,)``.

``positive`` and ``negative`` are the teacher's log-probabilities of the sampled tokens, (N,), after the teacher's view and
after the negative view (``opd.views.negative``). The margin ``positive - negative`` tells how much of a token rests on the
evidence. A weight has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from opd_recipes.registry import RecipeError, Registry

WEIGHTS = Registry("opd.weights")


@WEIGHTS.register("none")
def none(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Every response token counts the same; no negative view is needed."""
    return torch.ones_like(positive)


@WEIGHTS.register("margin")
def margin(
    positive: torch.Tensor, negative: torch.Tensor, *, threshold: float = 0.0, normaliser: str = "valid_tokens"
) -> torch.Tensor:
    """The margin itself where it is above ``threshold``, else 0 (OPD-V, arXiv 2608.05131: relu of the margin)."""
    delta = positive - negative
    return delta.where(delta > threshold, 0.0)


@WEIGHTS.register("binary_margin")
def binary_margin(
    positive: torch.Tensor, negative: torch.Tensor, *, threshold: float = 0.0, normaliser: str = "valid_tokens"
) -> torch.Tensor:
    """1 where the margin is above ``threshold``, else 0 (OPD-V's ablation)."""
    return (positive - negative > threshold).to(positive.dtype)


#: What a sum of weighted token losses is divided by: (weights (N,), mask (N,)) -> a number that adds up over rows.
NORMALISERS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "valid_tokens": lambda weights, mask: mask.sum(),
    "selected": lambda weights, mask: (mask * (weights > 0)).sum(),
    "weight_sum": lambda weights, mask: (mask * weights).sum(),
}


@dataclass(frozen=True)
class Weights:
    """The token weights of a recipe.

    Args:
        rule: From the two log-probabilities to a weight.
        name: Its key in the registry.
        normaliser: ``valid_tokens`` (all response tokens, as published), ``selected`` (those with a weight above 0) or
            ``weight_sum``.
        contrast: Whether the weights need a negative view.
    """

    rule: Callable
    name: str = "none"
    normaliser: str = "valid_tokens"
    contrast: bool = False

    @classmethod
    def load(cls, spec: Any) -> Weights:
        """Build from the ``opd.weights`` section.

        Raises:
            RecipeError: An unknown weight or normaliser, or an option that is missing or out of its range.
        """
        rule = WEIGHTS.build(spec)
        if rule.func is none:
            return cls(rule)
        normaliser, threshold = rule.keywords.get("normaliser", "valid_tokens"), rule.keywords.get("threshold", 0.0)
        if normaliser not in NORMALISERS:
            raise RecipeError(f"opd.weights.normaliser: unknown value {normaliser!r}; known: {', '.join(NORMALISERS)}")
        if threshold < 0:
            raise RecipeError(
                f"opd.weights.threshold: must not be negative, got {threshold}: it would give weight (or, with kind=margin, "
                "a negative loss) to tokens that the negative view makes more likely"
            )
        return cls(rule, rule.func.__name__, normaliser, contrast=True)

    def __call__(self, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        return self.rule(positive, negative).detach()

    def total(self, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """These tokens' part of the loss's denominator."""
        return NORMALISERS[self.normaliser](weights, mask.to(weights.dtype))
