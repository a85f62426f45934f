import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from opd_recipes.advantage import distillation_advantage, divergence_for_advantage, opd_topk
from opd_recipes.loss import Objective

DIVERGENCE = torch.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 7.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def objective(**settings):
    return Objective(kind="advantage", rollout_is_cap=None, is_clip=None, **settings)


def test_without_discount_each_token_has_its_own():
    out = distillation_advantage(DIVERGENCE, MASK, coefficient=0.5)
    assert out.tolist() == [[-0.5, -1.0, -2.0], [-1.5, -2.5, 0]]


def test_discounted_sums_by_hand():
    out = distillation_advantage(DIVERGENCE, MASK, discount=0.5)
    assert out.tolist() == [[-(1 + 1 + 1), -(2 + 2), -4], [-(3 + 2.5), -5, 0]]
    assert distillation_advantage(DIVERGENCE, MASK, discount=1.0).tolist() == [[-7, -6, -4], [-8, -5, 0]]


def test_a_masked_token_inside_adds_nothing_and_gets_nothing():
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    assert distillation_advantage(DIVERGENCE[:1], mask, discount=0.5).tolist() == [[-2.0, 0, -4.0]]


def test_padding_changes_nothing():
    padded = torch.cat([DIVERGENCE, torch.full((2, 2), 9.0)], dim=1)
    mask = torch.cat([MASK, torch.zeros(2, 2)], dim=1)
    out = distillation_advantage(padded, mask, discount=0.9)
    torch.testing.assert_close(out[:, :3], distillation_advantage(DIVERGENCE, MASK, discount=0.9))
    assert (out[:, 3:] == 0).all()


def test_verl_finds_it_and_it_works_alone():
    estimator = get_adv_estimator_fn("opd_topk")
    with divergence_for_advantage(DIVERGENCE, objective(discount=1.0)):
        advantages, returns = estimator(token_level_rewards=torch.full((2, 3), 5.0), response_mask=MASK, config=None)
    assert advantages.tolist() == [[-7, -6, -4], [-8, -5, 0]] and torch.equal(advantages, returns)


@pytest.mark.parametrize("by_std", [True, False])
def test_added_to_a_task_reward(by_std):
    """GRPO over two responses of one prompt with rewards 1 and 0: +-0.5, over the unbiased spread of 0.7071 when scaled."""
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    with divergence_for_advantage(DIVERGENCE, objective(coefficient=0.1, discount=1.0, task_advantage="grpo")):
        advantages, _ = opd_topk(
            rewards, MASK, config={"norm_adv_by_std_in_grpo": by_std}, index=np.array(["a", "a"], dtype=object)
        )
    task = 0.5 / (0.5**0.5 + 1e-6) if by_std else 0.5
    expected = torch.tensor([[task - 0.7, task - 0.6, task - 0.4], [-task - 0.8, -task - 0.5, 0]])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)


def test_without_a_divergence_it_says_who_computes_one():
    with pytest.raises(RuntimeError, match="trainer.v1.trainer_mode=opd_sync"):
        opd_topk(torch.zeros(2, 3), MASK)
