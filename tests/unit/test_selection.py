import io
import math

import numpy as np
import pytest
import torch

from opd_recipes.registry import RecipeError, Registry
from opd_recipes.selection import (
    FEATURES,
    SELECTIONS,
    Candidates,
    captured_utility,
    ceil_share,
    features,
    floor_share,
    rank_correlation,
)
from opd_recipes.selector import ModelOptions

KINDS = ("all", "random", "entropy", "learned")


def selection(kind, **options):
    return SELECTIONS.build({"kind": kind, **options})()


def every_kind(budget=0.25):
    return [selection(kind, **({} if kind == "all" else {"budget": budget})) for kind in KINDS]


def candidates(count, seed=0, **given):
    rng = np.random.default_rng(seed)
    nll = rng.gamma(2.0, 0.2, count)
    values = {
        "mean_nll": nll,
        "p90_nll": nll * rng.uniform(1.5, 3, count),
        "mean_entropy": nll * rng.uniform(0.7, 1.3, count),
        "response_length": rng.integers(20, 400, count),
        "prompt_length": rng.integers(300, 2000, count),
        "area_ratio": rng.uniform(0.005, 0.1, count),
    }
    return Candidates(**values | given)


def utility(rows):
    """A rule for the predictor to find: surprise counts, and the more the smaller the evidence is."""
    return rows.mean_nll * np.exp(-30 * rows.area_ratio)


def run(policy, steps, count=64, seed=0):
    """Steps of choice and learning; the choices and the metrics of each."""
    trace = []
    for step in steps:
        rows = candidates(count, seed=1000 * seed + step)
        chosen = policy.choose(rows, step)
        trace.append((chosen, policy.learn(step, {i: float(utility(rows)[i]) for i in chosen})))
    return trace


# Candidates


def test_candidates_are_columns_in_a_fixed_order():
    rows = Candidates([1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12])
    assert rows.matrix().tolist() == [[1, 3, 5, 7, 9, 11], [2, 4, 6, 8, 10, 12]]
    assert len(rows) == 2


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_feature_that_is_not_finite_is_named(name, value):
    column = np.ones(4)
    column[2] = value
    with pytest.raises(ValueError, match=f"{name} of candidate 2 is {value}"):
        candidates(4, **{name: column})


@pytest.mark.parametrize("column", [np.ones(3), np.ones((4, 1)), 1.0])
def test_columns_of_different_lengths_are_refused(column):
    with pytest.raises(ValueError, match="area_ratio has shape .* there are 4 candidates"):
        candidates(4, area_ratio=column)


# How many


@pytest.mark.parametrize(
    ("share", "count", "floor", "ceiling"),
    [
        (0.25, 100, 25, 25),
        (0.29, 100, 29, 29),  # 28.999999999999996 in floating point
        (0.07, 100, 7, 7),  # 7.000000000000001
        (1 / 3, 3, 1, 1),
        (1.0, 767, 767, 767),
        (0.25, 99, 24, 25),
        (0.1, 9, 0, 1),
        (0.5, 0, 0, 0),
        (0.0, 10, 0, 0),
    ],
)
def test_shares_are_rounded_as_written(share, count, floor, ceiling):
    assert (floor_share(share, count), ceil_share(share, count)) == (floor, ceiling)


def test_every_whole_percentage_is_exact():
    for percent in range(1, 101):
        for count in (100, 700, 1000, 12300):
            assert floor_share(percent / 100, count) == ceil_share(percent / 100, count) == percent * count // 100


@pytest.mark.parametrize("kind", ["random", "entropy", "learned"])
@pytest.mark.parametrize(("budget", "count", "wanted"), [(0.25, 96, 24), (0.29, 100, 29), (0.3, 7, 2), (0.1, 9, 0)])
def test_the_budget_is_kept(kind, budget, count, wanted):
    chosen = selection(kind, budget=budget).choose(candidates(count), 1)
    assert len(chosen) == wanted
    assert chosen == sorted(set(chosen))
    assert all(type(row) is int and 0 <= row < count for row in chosen)


def test_no_candidates_give_no_choice():
    for policy in every_kind():
        assert policy.choose(candidates(0), 1) == []
        policy.learn(1, {})


def test_the_whole_budget_is_everything():
    for policy in every_kind(budget=1):
        for step in range(1, 6):
            rows = candidates(40, seed=step)
            assert policy.choose(rows, step) == list(range(40))
            policy.learn(step, dict(enumerate(utility(rows).tolist())))
    assert policy.model.updates > 0  # the last of them is the learned one


# all, random, entropy


def test_all_takes_everything_whatever_the_features():
    assert selection("all").choose(candidates(5), 1) == [0, 1, 2, 3, 4]


def test_random_depends_on_seed_and_step_alone():
    first, again, other = (selection("random", budget=0.5, seed=seed) for seed in (3, 3, 4))
    chosen = [first.choose(candidates(20, seed=1), step) for step in range(1, 9)]
    assert [again.choose(candidates(20, seed=2), step) for step in reversed(range(1, 9))] == chosen[::-1]
    assert [other.choose(candidates(20, seed=1), step) for step in range(1, 9)] != chosen
    assert len(set(map(tuple, chosen))) == 8


def test_random_budgets_are_nested():
    """They are heads of one permutation: what a small budget takes, a larger one takes too."""
    small, large = (selection("random", budget=budget).choose(candidates(40), 5) for budget in (0.25, 0.5))
    assert set(small) < set(large)


@pytest.mark.parametrize("kind", ["random", "learned"])
def test_uniform_choice_takes_every_candidate_as_often(kind):
    """Chi-square over 12 candidates and 2000 steps. Draws without repetition vary less than independent ones, by
    (1 - 1/4), so X / 0.75 / (12/11) is about chi-square with 11 degrees; 31.3 is its 99.9% point."""
    policy, counts = selection(kind, budget=0.25), np.zeros(12)
    for step in range(2000):
        counts[policy.choose(candidates(12), step)] += 1
    expected = 2000 * 0.25
    statistic = ((counts - expected) ** 2 / expected).sum() / (0.75 * 12 / 11)
    assert counts.sum() == 2000 * 3
    assert statistic < 31.3


def test_entropy_takes_the_highest_and_of_equal_ones_the_first():
    rows = candidates(8, mean_entropy=[0.1, 0.9, 0.5, 0.5, 0.9, 0.0, 0.5, 0.2])
    assert selection("entropy", budget=0.5).choose(rows, 1) == [1, 2, 3, 4]
    assert selection("entropy", budget=0.25).choose(rows, 7) == [1, 4]
    ties = candidates(200, mean_entropy=np.arange(200) % 2)
    assert selection("entropy", budget=0.25).choose(ties, 1) == list(range(1, 100, 2))


# learned


def trained(**options):
    policy = selection("learned", **{"budget": 0.25, "warmup": 32, **options})
    run(policy, range(1, 6))
    assert policy.model.updates > 0
    return policy


def parts(policy, rows, step):
    """What the policy took by prediction and to explore, from its own prediction."""
    order = sorted(range(len(rows)), key=lambda i: -policy.model.predict(torch.from_numpy(rows.matrix()))[i])
    chosen = policy.choose(rows, step)
    explored = math.ceil(round(policy.exploration * len(chosen), 6))
    best = set(order[: len(chosen) - explored])
    return best, set(chosen) - best, set(chosen)


@pytest.mark.parametrize(
    ("budget", "count", "exploration", "predicted", "explored"),
    [
        (0.25, 40, 0.1, 9, 1),
        (0.25, 4, 0.1, 0, 1),
        (0.25, 44, 0.1, 9, 2),
        (0.25, 400, 0.07, 93, 7),
        (0.25, 40, 0.0, 10, 0),
        (0.25, 40, 1.0, 0, 10),
    ],
)
def test_the_best_predictions_and_some_others(budget, count, exploration, predicted, explored):
    policy = trained(budget=budget, exploration=exploration, warmup=16)
    best, others, chosen = parts(policy, candidates(count, seed=99), 6)
    assert best <= chosen
    assert (len(best), len(others)) == (predicted, explored)


def test_exploration_is_uniform_over_the_rest():
    policy, counts, rows = trained(), np.zeros(12), candidates(12, seed=99)
    best, _, _ = parts(policy, rows, 6)  # budget 3: two by prediction, one to explore
    for step in range(6, 2006):
        for row in set(policy.choose(rows, step)) - best:
            counts[row] += 1
    rest = [row for row in range(12) if row not in best]
    assert counts.sum() == 2000
    assert counts[list(best)].sum() == 0
    assert ((counts[rest] - 200) ** 2 / 200).sum() < 27.9  # chi-square, 9 degrees, 99.9%


def test_before_the_first_update_it_is_random():
    learned, random = selection("learned", budget=0.25, seed=7), selection("random", budget=0.25, seed=7)
    steps = range(1, 7)  # 16 rows a step: the sixth reaches 96, and the first update follows its choice
    chosen = [c for c, _ in run(learned, steps)]
    assert chosen == [random.choose(candidates(64), step) for step in steps]
    assert learned.model.updates == 2
    assert learned.choose(candidates(64), 7) != random.choose(candidates(64), 7)


def test_choosing_changes_nothing():
    policy, rows = trained(), candidates(64, seed=99)
    before = policy.model.predict(torch.from_numpy(rows.matrix()))
    assert policy.choose(rows, 6) == policy.choose(rows, 6)
    assert (policy.model.predict(torch.from_numpy(rows.matrix())) == before).all()
    policy.learn(6, {})  # a step that was given up
    assert (policy.model.predict(torch.from_numpy(rows.matrix())) == before).all()


def test_the_normaliser_sees_every_candidate_and_the_replay_the_queried_ones():
    policy, rows = selection("learned", budget=0.25), candidates(16)
    chosen = policy.choose(rows, 1)
    policy.learn(1, {row: 0.5 + row for row in reversed(chosen[1:])})  # one row came back without a utility
    np.testing.assert_allclose(policy.model.normaliser.mean.numpy(), rows.matrix().mean(0), rtol=1e-12)
    np.testing.assert_array_equal(policy.model.replay.features.numpy(), rows.matrix()[chosen[1:]])
    assert policy.model.replay.utilities.tolist() == [0.5 + row for row in chosen[1:]]


def test_it_finds_what_is_useful():
    """Paper's defaults, 96 rollouts a step: after 60 steps a quarter of them holds nearly all that the best quarter holds."""
    policies = {kind: selection(kind, budget=0.25) for kind in ("learned", "random", "entropy")}
    captured = {kind: [] for kind in policies}
    for step in range(1, 81):
        rows = candidates(96, seed=step)
        values = utility(rows)
        for kind, policy in policies.items():
            chosen = policy.choose(rows, step)
            policy.learn(step, {i: float(values[i]) for i in chosen})
            if step > 60:
                captured[kind].append(captured_utility(chosen, values))
    means = {kind: np.mean(values) for kind, values in captured.items()}
    assert means["learned"] > means["entropy"] + 0.1 > means["random"] + 0.3
    assert means["learned"] > 0.85


# Metrics


def test_metrics_of_a_uniform_and_of_a_predicted_step():
    policy = selection("learned", budget=0.25, warmup=32)
    trace = run(policy, range(1, 4))
    (first, metrics), (_, second), (third, last) = trace
    values = utility(candidates(64, seed=1))
    assert metrics == {
        "selection/stored": 16,
        "selection/updates": 0,
        "selection/utility_explored_rows": pytest.approx(values[first].mean()),
    }
    assert set(second) - set(metrics) == {"selection/loss", "selection/huber", "selection/rank_loss"}
    assert set(last) - set(second) == {"selection/utility_predicted_rows", "selection/rank_correlation"}
    assert (last["selection/stored"], last["selection/updates"]) == (48, 4)
    assert last["selection/loss"] == pytest.approx(last["selection/huber"] + 0.2 * last["selection/rank_loss"])
    mean = (14 * last["selection/utility_predicted_rows"] + 2 * last["selection/utility_explored_rows"]) / 16
    assert mean == pytest.approx(utility(candidates(64, seed=3))[third].mean())


def test_rank_correlation_is_of_the_prediction_at_the_time_of_the_choice():
    policy, rows = trained(), candidates(64, seed=99)
    predicted = policy.model.predict(torch.from_numpy(rows.matrix()))
    chosen = policy.choose(rows, 6)
    assert policy.learn(6, {i: float(np.exp(predicted[i])) for i in chosen})[
        "selection/rank_correlation"
    ] == pytest.approx(1)
    chosen = policy.choose(rows, 7)
    assert "selection/rank_correlation" not in policy.learn(7, dict.fromkeys(chosen, 0.5))
    chosen = policy.choose(rows, 8)
    assert "selection/rank_correlation" not in policy.learn(8, {i: float(i) for i in chosen[:2]})


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [10, 20, 1000], 1),
        ([1, 2, 3], [3, 2, 1], -1),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),  # 1 - 6 * 2 / (4 * 15)
        ([1, 1, 2, 3], [5, 6, 7, 8], 4.5 / math.sqrt(4.5 * 5)),  # ranks 1.5 1.5 3 4 against 1 2 3 4
        ([1, 1, 1], [1, 2, 3], math.nan),
    ],
)
def test_rank_correlation_by_hand(a, b, expected):
    assert rank_correlation(np.array(a), np.array(b)) == pytest.approx(expected, nan_ok=True)


def test_the_others_have_nothing_to_learn():
    for policy in every_kind()[:3]:
        policy.choose(candidates(8), 1)
        assert policy.learn(1, {0: 0.5}) == {}


def test_captured_utility_by_hand():
    assert captured_utility([0, 2], [0.1, 0.5, 0.2, 0.3]) == pytest.approx(0.3 / 0.8)
    assert captured_utility([1, 3], [0.1, 0.5, 0.2, 0.3]) == 1.0
    assert captured_utility([], [0.1]) == 1.0
    assert captured_utility([0], [0.0, 0.0]) == 1.0


def test_features_of_a_response_by_hand():
    mean, p90 = features([-1.0, -2.0, -3.0, -4.0, -10.0])  # 90%: at 3.6 of 0 ... 4, so 4 + 0.6 * 6
    assert (mean, p90) == (pytest.approx(4.0), pytest.approx(7.6))
    assert features(torch.tensor([-0.5])) == (0.5, 0.5)
    assert type(mean) is type(p90) is float
    with pytest.raises(ValueError, match="without tokens"):
        features([])


# Checkpoints


@pytest.mark.parametrize("saved_after", [2, 5])  # before the first update, and after it
def test_a_restored_selector_goes_on_bit_for_bit(saved_after):
    policy = selection("learned", budget=0.25, warmup=40, seed=3)
    run(policy, range(1, saved_after + 1))
    file = io.BytesIO()
    torch.save(policy.state_dict(), file)
    restored = selection("learned", budget=0.25, warmup=40, seed=3)
    run(restored, range(50, 53), seed=9)  # whatever it had learned is replaced
    restored.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    steps = range(saved_after + 1, saved_after + 6)
    assert run(restored, steps) == run(policy, steps)
    first, second = io.BytesIO(), io.BytesIO()
    torch.save(policy.state_dict(), first)
    torch.save(restored.state_dict(), second)
    assert first.getvalue() == second.getvalue()


@pytest.mark.parametrize("kind", ["all", "random", "entropy"])
def test_the_others_keep_no_state(kind):
    policy = every_kind()[KINDS.index(kind)]
    assert policy.state_dict() == {}
    policy.load_state_dict({})
    with pytest.raises(RecipeError, match="opd.selection: the checkpoint holds a selector"):
        policy.load_state_dict(trained().state_dict())


def test_a_choice_is_not_carried_over_a_restart():
    policy = trained()
    policy.choose(candidates(8), 6)
    policy.load_state_dict(policy.state_dict())
    with pytest.raises(ValueError, match="no choose"):
        policy.learn(6, {})


# Refusals


@pytest.mark.parametrize("kind", ["random", "entropy", "learned"])
def test_a_budget_is_needed(kind):
    with pytest.raises(RecipeError, match=f"opd.selection: '{kind}' needs budget"):
        selection(kind)
    for budget in (0, -0.5, 1.01, math.nan):
        with pytest.raises(RecipeError, match=r"opd.selection.budget: must be in \(0, 1\]"):
            selection(kind, budget=budget)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "all", "budget": 0.5}, "'all' has no option 'budget'"),
        ({"kind": "entropy", "budget": 0.5, "seed": 1}, "'entropy' has no option 'seed'; its options: budget"),
        ({"kind": "best", "budget": 0.5}, "known: all, entropy, learned, random"),
        ({"kind": "learned", "budget": "half"}, "opd.selection.budget: expected float, got 'half'"),
        ({"kind": "learned", "budget": 0.5, "hidden": 32.0}, "opd.selection.hidden: expected int"),
        ({"kind": "learned", "budget": 0.5, "hidden": 0}, "opd.selection.hidden: must be at least 1"),
        ({"kind": "learned", "budget": 0.5, "exploration": 1.5}, r"opd.selection.exploration: must be in \[0, 1\]"),
        ({"kind": "learned", "budget": 0.5, "exploration": -0.1}, "opd.selection.exploration"),
        ({"kind": "random", "budget": 0.5, "seed": -1}, "opd.selection.seed: must be 0 or above"),
    ],
)
def test_refused_recipes(spec, words):
    with pytest.raises(RecipeError, match=words):
        SELECTIONS.build(spec)()


@pytest.mark.parametrize(
    ("step", "utilities", "words"),
    [
        (7, {}, "learn.. for step 7, but the last choose.. was for step 6"),
        (6, {"outside": 0.5}, "candidate .* has a utility but was not chosen in step 6"),
        (6, {"chosen": math.nan}, "the utility of candidate .* in step 6 is nan"),
        (6, {"chosen": math.inf}, "is inf: it must be finite"),
    ],
)
def test_refused_lessons(step, utilities, words):
    policy = trained()
    chosen = policy.choose(candidates(64), 6)
    rows = {"chosen": chosen[0], "outside": next(row for row in range(64) if row not in chosen)}
    with pytest.raises(ValueError, match=words):
        policy.learn(step, {rows[name]: value for name, value in utilities.items()})


def test_a_choice_teaches_once():
    policy = trained()
    chosen = policy.choose(candidates(64), 6)
    policy.learn(6, {chosen[0]: 0.5})
    with pytest.raises(ValueError, match="no choose"):
        policy.learn(6, {chosen[0]: 0.5})


# The registry on classes


def test_a_class_is_an_entry_whose_options_are_its_constructors():
    table = Registry("opd.part")

    class Base:
        size: str  # what it holds, not what it is built from

        def __init__(self, *, size: int = 3):
            self.size = "x" * size

    class Derived(Base):
        pass

    for name, entry in {"base": Base, "derived": Derived}.items():
        table.register(name)(entry)
        assert list(table.options(name)) == ["size"]
        assert table.build({"kind": name, "size": 2})().size == "xx"
        with pytest.raises(RecipeError, match="opd.part.size: expected int, got 'big'"):
            table.build({"kind": name, "size": "big"})


def test_learned_has_the_papers_options_and_defaults():
    options = {name: parameter.default for name, parameter in SELECTIONS.options("learned").items()}
    del options["budget"]
    assert options == {"exploration": 0.10, **vars(ModelOptions())}
