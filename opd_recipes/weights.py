"""Per-token weights of the distillation loss: ``weight(outputs) -> (N,)`` without gradient, from the head's outputs."""

from __future__ import annotations

import torch

from opd_recipes.registry import Registry

WEIGHTS = Registry("opd.weights")


@WEIGHTS.register("none")
def none(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every response token counts the same."""
    return torch.ones_like(outputs["divergence"]).detach()
