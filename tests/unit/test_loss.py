import math

import pytest
import torch

from opd_recipes.loss import Normaliser, Objective, distill_loss, pearson
from opd_recipes.registry import RecipeError


def outputs(divergence, log_probs=None):
    divergence = torch.tensor(divergence, requires_grad=True)
    zeros = torch.zeros(len(divergence))
    log_probs = zeros if log_probs is None else torch.tensor(log_probs)
    keys = ("entropy", "teacher_entropy", "student_mass", "teacher_mass", "teacher_log_probs")
    return {"divergence": divergence, "log_probs": log_probs, **dict.fromkeys(keys, zeros)}


def run(out, lengths, mask=None, total=None, objective=None, **kwargs):
    mask = torch.ones(sum(lengths)) if mask is None else torch.tensor(mask, dtype=torch.float)
    lengths = torch.tensor(lengths)
    rows = [part.any().item() for part in mask.split(lengths.tolist())]
    total = total or Normaliser(tokens=int(mask.sum()), responses=sum(rows), world=1)
    objective = objective or Objective()
    return distill_loss(out, objective=objective, mask=mask, lengths=lengths, total=total, **kwargs)


def test_sequence_mean_by_hand():
    loss, _ = run(outputs([1.0, 2.0, 3.0, 10.0]), [3, 1])
    assert loss.item() == pytest.approx((2 + 10) / 2)


def test_token_mean_by_hand():
    loss, _ = run(outputs([1.0, 2.0, 3.0, 10.0]), [3, 1], objective=Objective(aggregation="token_mean"))
    assert loss.item() == pytest.approx(16 / 4)


def test_masked_tokens_and_empty_responses_do_not_count():
    loss, metrics = run(outputs([1.0, math.nan, 3.0, 10.0, math.inf]), [3, 0, 1, 1], mask=[1, 0, 1, 1, 0])
    assert loss.item() == pytest.approx((2 + 10) / 2)
    assert metrics["opd/divergence"] == pytest.approx(14 / 3)
    out = outputs([1.0, math.nan])
    loss, _ = run(out, [2], mask=[0, 0])
    loss.backward()
    assert loss.item() == 0 and (out["divergence"].grad == 0).all()


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_no_split_into_micro_batches_or_ranks_changes_it(aggregation):
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 1, 4, 0, 2, 5]
    values = torch.rand(sum(lengths), generator=generator).tolist()
    mask = (torch.rand(sum(lengths), generator=generator) > 0.3).float()
    parts = list(zip(torch.tensor(values).split(lengths), mask.split(lengths), lengths, strict=True))
    rows = sum(bool(m.any()) for _, m, _ in parts)
    objective = Objective(aggregation=aggregation)

    def part(selected, world):
        total = Normaliser(int(mask.sum()), rows, world)
        joined = torch.cat([v for v, _, _ in selected]).tolist()
        m = torch.cat([m for _, m, _ in selected]).tolist()
        return run(outputs(joined), [n for *_, n in selected], mask=m, total=total, objective=objective)

    whole, whole_metrics = part(parts, 1)
    by_micro = [part(parts[:2], 1), part(parts[2:5], 1), part(parts[5:], 1)]
    assert sum(loss for loss, _ in by_micro).item() == pytest.approx(whole.item(), rel=1e-6)
    by_rank = [part(parts[:3], 2), part(parts[3:], 2)]  # FSDP averages over ranks
    assert sum(loss for loss, _ in by_rank).item() / 2 == pytest.approx(whole.item(), rel=1e-6)
    for key, value in whole_metrics.items():
        assert sum(m[key] for _, m in by_micro) == pytest.approx(value, rel=1e-6, abs=1e-12), key


def test_truncated_importance_weight_by_hand():
    out = outputs([1.0, 1.0, 1.0], log_probs=[-1.0, -1.0, -1.0])
    rollout = torch.tensor([-1.0, -1.0 - math.log(1.5), -1.0 - math.log(9.0)])
    loss, metrics = run(out, [3], rollout_log_probs=rollout)
    assert loss.item() == pytest.approx((1 + 1.5 + 2) / 3)
    assert metrics["opd/importance_capped"] == pytest.approx(1 / 3)
    loss, _ = run(out, [3], rollout_log_probs=rollout, objective=Objective(rollout_is_cap=None))
    assert loss.item() == pytest.approx(1)


def test_token_weights_by_hand():
    """OPD-V: the weighted sum over all valid tokens, the unselected ones included in the denominator."""
    weights = torch.tensor([0.0, 0.5, 2.0, 1.0])
    by_token = Objective(aggregation="token_mean")
    loss, _ = run(outputs([1.0, 2.0, 3.0, 10.0]), [3, 1], objective=by_token, token_weights=weights)
    assert loss.item() == pytest.approx((0.5 * 2 + 2 * 3 + 10) / 4)
    total = Normaliser(tokens=4, responses=2, world=1, weight=3.5)
    loss, _ = run(outputs([1.0, 2.0, 3.0, 10.0]), [3, 1], objective=by_token, token_weights=weights, total=total)
    assert loss.item() == pytest.approx((0.5 * 2 + 2 * 3 + 10) / 3.5)
    nothing = Normaliser(tokens=4, responses=2, world=1, weight=0.0)
    loss, _ = run(outputs([1.0, 2.0, 3.0, 10.0]), [3, 1], objective=by_token, token_weights=weights * 0, total=nothing)
    assert loss.item() == 0


def test_several_updates_use_the_old_policy():
    out = outputs([1.0, 1.0], log_probs=[-1.0, -1.0])
    old = torch.tensor([-1.0 - math.log(1.2), -1.0 - math.log(5.0)])
    rollout = old - math.log(1.1)
    loss, _ = run(out, [2], rollout_log_probs=rollout, old_log_probs=old)
    assert loss.item() == pytest.approx((1.1 * 1.2 + 1.1 * 2) / 2)
    loss, _ = run(out, [2], rollout_log_probs=rollout, old_log_probs=old, objective=Objective(is_clip=None))
    assert loss.item() == pytest.approx((1.1 * 1.2 + 1.1 * 5) / 2)


def test_importance_carries_no_gradient():
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    factors = Objective().importance(log_probs, torch.tensor([-1.5, -2.0]), None)
    assert not any(factor.requires_grad for factor in factors)


def test_pearson_from_moments():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, generator=generator).double()
    y = 0.5 * x + torch.randn(50, generator=generator).double()
    moments = {"x": x.mean(), "y": y.mean(), "xx": (x * x).mean(), "yy": (y * y).mean(), "xy": (x * y).mean()}
    expected = torch.corrcoef(torch.stack([x, y]))[0, 1].item()
    assert pearson({k: v.item() for k, v in moments.items()}) == pytest.approx(expected, abs=1e-12)
    assert pearson({"x": 1.0, "y": 1.0, "xx": 1.0, "yy": 1.0, "xy": 1.0}) == 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "advantages"}, "opd.objective.kind"),
        ({"aggregation": "mean"}, "known: seq_mean_token_mean, token_mean"),
        ({"rollout_is_cap": 0}, "rollout_is_cap: must be above 0"),
        ({"is_clip": -1}, "is_clip: must be above 0"),
    ],
)
def test_refuses(settings, words):
    with pytest.raises(RecipeError, match=words):
        Objective(**settings)
