"""The divergence as a per-token advantage in verl's policy-gradient loss: ``algorithm.adv_estimator=opd_topk``.

The advantage of token t is minus the divergence from t on, discounted:

    A_t = - coefficient * sum over s >= t of discount^(s - t) D_s   [+ the task reward's advantage]

With ``discount: 0`` and the sampled token's k1, D_t = log p_S(y_t) - log p_T(y_t), it is the sampled-token reverse KL in the
place of a reward. A divergence of whole distributions at t does not depend on y_t, so there the discount must be above 0: token
t then answers for where its choice leads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn, register_adv_est

from opd_recipes.loss import Objective


@dataclass(frozen=True)
class _Pending:
    divergence: torch.Tensor
    objective: Objective


# verl hands an estimator rewards and masks only; the trainer leaves the divergence here around its call.
_pending: ContextVar[_Pending | None] = ContextVar("opd_divergence", default=None)


@contextmanager
def divergence_for_advantage(divergence: torch.Tensor, objective: Objective) -> Iterator[None]:
    """For the calls of ``opd_topk`` inside, the token divergences (B, L) of the rows that verl passes, in its order."""
    token = _pending.set(_Pending(divergence, objective))
    try:
        yield
    finally:
        _pending.reset(token)


def distillation_advantage(
    divergence: torch.Tensor, response_mask: torch.Tensor, *, coefficient: float = 1.0, discount: float = 0.0
) -> torch.Tensor:
    """Minus the discounted divergence from each token on; 0 where the mask is 0. Shapes: (B, L), (B, L) -> (B, L).

    A masked token adds nothing and takes no factor of the discount away: distances count tokens, masked or not.
    """
    cost = divergence * response_mask
    total = torch.zeros_like(cost)
    following = cost.new_zeros(len(cost))
    for t in reversed(range(cost.shape[1])):
        following = cost[:, t] + discount * following
        total[:, t] = following
    return -coefficient * total * response_mask


@register_adv_est("opd_topk")
def opd_topk(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, **others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distillation advantage, plus the task reward's where ``opd.objective.task_advantage`` names its estimator.

    Args:
        token_level_rewards: (B, L) task rewards; not read unless a task advantage is asked for.
        response_mask: (B, L).
        config: verl's ``algorithm`` section, for the task estimator.
        others: What verl passes besides (``index``: the prompt of each row), for the task estimator.

    Returns:
        Advantages and returns, both (B, L).

    Raises:
        RuntimeError: Called by a trainer that computes no divergence.
    """
    pending = _pending.get()
    if pending is None:
        raise RuntimeError(
            "algorithm.adv_estimator=opd_topk needs the divergences that this package's trainer computes; "
            "set trainer.v1.trainer_mode=opd_sync"
        )
    objective = pending.objective
    advantages = distillation_advantage(
        pending.divergence, response_mask, coefficient=objective.coefficient, discount=objective.discount
    )
    if objective.task_advantage is not None:
        if objective.task_advantage == AdvantageEstimator.GRPO.value:
            # As verl itself calls this one.
            others["norm_adv_by_std_in_grpo"] = config.get("norm_adv_by_std_in_grpo", True) if config else True
        estimator = get_adv_estimator_fn(objective.task_advantage)
        task, _ = estimator(
            token_level_rewards=token_level_rewards, response_mask=response_mask, config=config, **others
        )
        advantages = advantages + task
    return advantages, advantages
