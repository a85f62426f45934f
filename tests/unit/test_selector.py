import math

import numpy as np
import pytest
import torch

from opd_recipes.registry import RecipeError
from opd_recipes.selector import (
    Draw,
    ModelOptions,
    Normaliser,
    Predictor,
    Replay,
    UtilityModel,
    age_weights,
    generator,
    selector_loss,
)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def rows(count, seed=0, size=6):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, size)))


def reference_loss(predicted, utilities, weights, delta, rank_weight):
    """The loss of the paper with loops, and its derivative in each prediction, worked out by hand."""
    n, total = len(predicted), sum(weights)
    gradient = [0.0] * n
    huber = rank = pairs = 0.0
    for f, u, w in zip(predicted, utilities, weights, strict=True):
        error = abs(f - u)
        huber += w * (error**2 / 2 if error <= delta else delta * (error - delta / 2))
    for k in range(n):
        gradient[k] += weights[k] * max(-delta, min(delta, predicted[k] - utilities[k])) / total
    ordered = [(i, j) for i in range(n) for j in range(n) if utilities[i] - utilities[j] > 1e-6]
    for i, j in ordered:
        pairs += weights[i] * weights[j]
    for i, j in ordered:
        margin, weight = predicted[i] - predicted[j], weights[i] * weights[j] / pairs
        rank += weight * math.log(1 + math.exp(-margin))
        slope = rank_weight * weight / (1 + math.exp(margin))
        gradient[i] -= slope
        gradient[j] += slope
    return huber / total + rank_weight * rank, huber / total, rank, gradient


@pytest.mark.parametrize(("delta", "rank_weight"), [(1.0, 0.2), (0.3, 1.7), (1.0, 0.0)])
def test_the_loss_and_its_gradient_are_those_of_loops(delta, rank_weight):
    rng = np.random.default_rng(1)
    predicted, utilities = rng.normal(size=9).tolist(), rng.gamma(1.0, size=9).tolist()
    utilities[3], utilities[5] = utilities[1], utilities[1] + 5e-7  # ties: no pair
    weights = [2 ** (-age / 10) for age in (0, 0, 1, 1, 2, 4, 8, 16, 32)]
    inputs = tensor(predicted).requires_grad_()
    parts = selector_loss(inputs, tensor(utilities), tensor(weights), delta=delta, rank_weight=rank_weight)
    parts[0].backward()
    *expected, gradient = reference_loss(predicted, utilities, weights, delta, rank_weight)
    assert [part.item() for part in parts] == pytest.approx(expected, rel=1e-12)
    assert inputs.grad.tolist() == pytest.approx(gradient, rel=1e-12)


def test_the_loss_of_two_rows_by_hand():
    predicted, utilities, weights = tensor([0.0, 0.0]), tensor([3.0, 0.5]), tensor([1.0, 0.5])
    loss, huber, rank = selector_loss(predicted, utilities, weights, delta=1.0, rank_weight=0.2)
    assert huber.item() == pytest.approx((1.0 * 2.5 + 0.5 * 0.125) / 1.5)  # 3 is beyond delta, 0.5 within
    assert rank.item() == pytest.approx(math.log(2))
    assert loss.item() == pytest.approx(huber.item() + 0.2 * math.log(2))


@pytest.mark.parametrize("utilities", [[0.4], [0.4, 0.4, 0.4]])
def test_without_a_pair_there_is_no_rank_loss(utilities):
    predicted = torch.zeros(len(utilities), dtype=torch.float64, requires_grad=True)
    weights = torch.ones(len(utilities), dtype=torch.float64)
    loss, huber, rank = selector_loss(predicted, tensor(utilities), weights, delta=1.0, rank_weight=0.2)
    loss.backward()
    assert (loss.item(), rank.item()) == (pytest.approx(0.08), 0.0)
    assert predicted.grad.isfinite().all()


def test_a_large_error_in_the_order_stays_finite():
    loss, _, rank = selector_loss(
        tensor([0.0, 1e4]), tensor([1.0, 0.0]), tensor([1.0, 1.0]), delta=1.0, rank_weight=1.0
    )
    assert rank.item() == 1e4
    assert loss.isfinite()


def test_age_halves_the_weight_every_half_life():
    steps = torch.tensor([30, 25, 20, 10])
    assert age_weights(steps, 30, 10.0).tolist() == pytest.approx([1, 2**-0.5, 0.5, 0.25])
    assert age_weights(steps, 31, 1.0).tolist() == pytest.approx([2.0**-1, 2.0**-6, 2.0**-11, 2.0**-21])


def test_rows_of_the_future_are_refused():
    with pytest.raises(ValueError, match="step 7 is before step 9"):
        age_weights(torch.tensor([3, 9]), 7, 10.0)


def test_the_first_batch_sets_the_normaliser():
    normaliser = Normaliser(1, 0.99)
    normaliser.update(tensor([[1.0], [3.0]]))
    assert (normaliser.mean.item(), normaliser.variance.item()) == (2.0, 1.0)
    assert normaliser(tensor([[4.0]])).item() == pytest.approx(2.0, rel=1e-7)


def test_later_batches_move_it_geometrically():
    """mean_T = m^(T-1) b_1 + (1 - m) sum_t m^(T-t) b_t over t = 2 ... T, and the variance alike."""
    batches, normaliser, m = [rows(5, seed=s) * (s + 1) + s for s in range(6)], Normaliser(6, 0.9), 0.9
    for batch in batches:
        normaliser.update(batch)
    factors = [m**5, *((1 - m) * m ** (6 - t) for t in range(2, 7))]
    values = [batch.numpy() for batch in batches]
    mean = sum(factor * batch.mean(0) for factor, batch in zip(factors, values, strict=True))
    variance = sum(factor * batch.var(0) for factor, batch in zip(factors, values, strict=True))
    np.testing.assert_allclose(normaliser.mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(normaliser.variance.numpy(), variance, rtol=1e-12)


def test_a_feature_that_does_not_vary_becomes_zero():
    normaliser = Normaliser(2, 0.99)
    normaliser.update(tensor([[0.1, 1.0], [0.1, 2.0], [0.1, 3.0]]))
    assert normaliser(tensor([[0.1, 2.0]])).tolist() == [[pytest.approx(0, abs=1e-9), pytest.approx(0)]]


def test_the_predictor_is_norm_linear_silu_linear():
    predictor, x = Predictor(6, 32, generator(3, Draw.WEIGHTS, 0)), rows(4).numpy()
    with torch.no_grad():
        predictor.norm.weight.copy_(rows(1, seed=1)[0])
        predictor.norm.bias.copy_(rows(1, seed=2)[0])
    p = {name: value.detach().numpy() for name, value in predictor.named_parameters()}
    z = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * p["norm.weight"] + p["norm.bias"]
    h = z @ p["hidden.weight"].T + p["hidden.bias"]
    expected = h / (1 + np.exp(-h)) @ p["output.weight"][0] + p["output.bias"]
    np.testing.assert_allclose(predictor(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-10)
    assert (p["hidden.weight"].shape, p["output.weight"].shape) == ((32, 6), (1, 32))
    assert 0.9 * 6**-0.5 < abs(p["hidden.weight"]).max() <= 6**-0.5
    assert abs(p["output.weight"]).max() <= 32**-0.5


def test_the_replay_drops_the_oldest_rows():
    replay = Replay(1, capacity=5)
    for step in (1, 2, 3):
        replay.append(tensor([[10.0 * step], [10.0 * step + 1]]), tensor([step, step + 0.5]), step)
    assert replay.features[:, 0].tolist() == [11, 20, 21, 30, 31]
    assert replay.utilities.tolist() == [1.5, 2, 2.5, 3, 3.5]
    assert replay.steps.tolist() == [1, 2, 2, 3, 3]
    assert replay.features.untyped_storage().nbytes() == 5 * 8  # what has left is not saved


def test_a_step_larger_than_the_replay_keeps_its_last_rows():
    replay = Replay(1, capacity=2)
    replay.append(tensor([[1.0], [2.0], [3.0]]), tensor([1, 2, 3]), 1)
    assert replay.features[:, 0].tolist() == [2, 3]


def test_a_minibatch_is_drawn_without_repetition():
    replay = Replay(1, capacity=50)
    replay.append(torch.arange(50.0, dtype=torch.float64)[:, None], torch.arange(50.0, dtype=torch.float64), 1)
    rng, drawn = np.random.default_rng(0), []
    for _ in range(20):
        features, utilities, steps = replay.sample(20, rng)
        assert len(set(features[:, 0].tolist())) == 20
        assert features[:, 0].tolist() == utilities.tolist()
        assert steps.tolist() == [1] * 20
        drawn += utilities.tolist()
    assert set(drawn) == set(range(50))
    assert sorted(replay.sample(60, rng)[1].tolist()) == list(range(50))


def filled(**options):
    model = UtilityModel(6, ModelOptions(**{"warmup": 20, **options}))
    for step in (1, 2, 3):
        batch = rows(10, seed=step)
        model.normaliser.update(batch)
        model.replay.append(batch, batch[:, 0].abs(), step)
        if step < 3:
            model.update(step)
    return model


def test_updates_begin_with_the_warmup():
    model = UtilityModel(6, ModelOptions())  # the paper: 96 stored, 2 updates per step
    model.replay.append(rows(95), torch.ones(95, dtype=torch.float64), 1)
    assert (model.update(1), model.updates) == ({}, 0)
    model.replay.append(rows(1), torch.ones(1, dtype=torch.float64), 2)
    assert set(model.update(2)) == {"selection/loss", "selection/huber", "selection/rank_loss"}
    assert model.updates == 2


def test_an_update_is_a_step_of_adam_on_the_loss_of_normalised_features():
    """Adam's first step moves each parameter by lr against the sign of its gradient (up to eps = 1e-8)."""
    options = ModelOptions(warmup=8, updates_per_step=1, lr=0.01, half_life=2.0)
    model, batch = UtilityModel(6, options), rows(8) * 100 + 7
    utilities = batch[:, 0] / 50
    model.normaliser.update(batch)
    model.replay.append(batch[:4], utilities[:4], 1)
    model.replay.append(batch[4:], utilities[4:], 3)
    before = [p.detach().clone() for p in model.predictor.parameters()]
    normal = (batch - batch.mean(0)) / (batch.var(0, correction=0) + 1e-8).sqrt()
    weights = tensor([0.5] * 4 + [1.0] * 4)
    loss, *_ = selector_loss(model.predictor(normal), utilities, weights, delta=1.0, rank_weight=0.2)
    gradients = torch.autograd.grad(loss, list(model.predictor.parameters()))
    assert model.update(3)["selection/loss"] == pytest.approx(loss.item())
    for parameter, old, gradient in zip(model.predictor.parameters(), before, gradients, strict=True):
        expected = old - 0.01 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-7)


def test_the_reported_losses_are_means_over_the_updates():
    once, twice = filled(updates_per_step=1, minibatch=30), filled(updates_per_step=1, minibatch=30)
    twice.options.updates_per_step = 2
    first, second = once.update(3), once.update(3)  # minibatch = all rows: both updates see the same
    both = twice.update(3)
    assert both["selection/huber"] == pytest.approx((first["selection/huber"] + second["selection/huber"]) / 2)


def test_nothing_touches_the_global_random_state():
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(1).item(), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    filled().update(3)
    assert (torch.rand(1).item(), np.random.rand()) == expected


def test_it_computes_on_one_thread_and_leaves_the_others_alone(monkeypatch):
    model, seen = filled(), []
    forward = model.predictor.forward
    monkeypatch.setattr(model.predictor, "forward", lambda x: seen.append(torch.get_num_threads()) or forward(x))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model.predict(rows(3))
        model.update(3)
        assert torch.get_num_threads() == 2
        assert set(seen) == {1}
    finally:
        torch.set_num_threads(before)


def test_the_seed_sets_the_first_weights():
    first, again, other = (UtilityModel(6, ModelOptions(seed=seed)).predict(rows(3)).tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_draws_for_different_ends_differ():
    drawn = {generator(seed, purpose, step).random() for seed in range(3) for purpose in Draw for step in range(3)}
    assert len(drawn) == 3 * len(Draw) * 3


def test_a_state_is_a_snapshot_and_loading_copies_it():
    model = filled()
    state = model.state_dict()
    saved = torch.utils._pytree.tree_map(lambda x: x.clone() if torch.is_tensor(x) else x, state)
    other = UtilityModel(6, ModelOptions(warmup=20))
    other.load_state_dict(state)
    for step in (3, 4):
        model.update(step)
        other.update(step)
    assert torch.utils._pytree.tree_all(
        lambda pair: pair, torch.utils._pytree.tree_map(lambda a, b: bool(torch.as_tensor(a == b).all()), state, saved)
    )
    assert (model.predict(rows(5)) == other.predict(rows(5))).all()


def test_options_come_from_the_recipe_and_not_from_the_state():
    other = UtilityModel(6, ModelOptions(warmup=20, lr=0.5, capacity=20, minibatch=10))
    other.load_state_dict(filled().state_dict())
    assert other.adam.param_groups[0]["lr"] == 0.5
    assert other.replay.steps.tolist() == [2] * 10 + [3] * 10  # the newest of 30 rows


def test_a_state_of_another_width_is_refused():
    with pytest.raises(RecipeError, match="opd.selection.hidden: must be 32 as in the checkpoint, got 16"):
        UtilityModel(6, ModelOptions(hidden=16)).load_state_dict(filled().state_dict())


@pytest.mark.parametrize(("state", "found"), [({}, "nothing"), ({"updates": 3}, "updates")])
def test_a_state_that_is_no_selectors_is_refused(state, found):
    with pytest.raises(RecipeError, match=f"holds no learned selector .found: {found}."):
        filled().load_state_dict(state)


def test_the_defaults_are_the_papers():
    assert vars(ModelOptions()) == {
        "hidden": 32,
        "capacity": 512,
        "minibatch": 256,
        "updates_per_step": 2,
        "warmup": 96,
        "lr": 1e-3,
        "huber_delta": 1.0,
        "rank_weight": 0.2,
        "half_life": 10.0,
        "momentum": 0.99,
        "seed": 0,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hidden": 0}, "hidden: must be at least 1, got 0"),
        ({"capacity": 0}, "capacity: must be at least 1"),
        ({"minibatch": 0}, "minibatch: must be at least 1"),
        ({"updates_per_step": 0}, "updates_per_step: must be at least 1"),
        ({"warmup": 0}, "warmup: must be at least 1"),
        ({"warmup": 513}, "warmup: must be at most capacity=512, or it is never reached, got 513"),
        ({"capacity": 200}, "minibatch: must be at most capacity=200, .* got 256"),
        ({"lr": 0.0}, "lr: must be above 0"),
        ({"lr": math.nan}, "lr: must be above 0"),
        ({"huber_delta": -1.0}, "huber_delta: must be above 0"),
        ({"half_life": 0.0}, "half_life: must be above 0"),
        ({"half_life": math.inf}, "half_life: must be above 0 and finite"),
        ({"rank_weight": -0.1}, "rank_weight: must be 0 or above"),
        ({"momentum": 1.0}, r"momentum: must be in \[0, 1\)"),
        ({"momentum": -0.1}, r"momentum: must be in \[0, 1\)"),
        ({"seed": -1}, "seed: must be 0 or above"),
    ],
)
def test_refused_options(options, words):
    with pytest.raises(RecipeError, match="opd.selection." + words):
        ModelOptions(**options)
