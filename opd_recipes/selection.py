"""Selection: which of a step's finished rollouts the teacher is asked about and the student trains on.

A selection chooses K = floor(budget * C) of the step's C candidates from what is known without the teacher. Once the
teacher has scored these, ``learn`` tells it their utilities.

Source: BAS-OPD, arXiv 2609.25891.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from opd_recipes.registry import RecipeError, Registry
from opd_recipes.selector import Draw, ModelOptions, UtilityModel, generator, require

SELECTIONS = Registry("opd.selection")

#: What a candidate is judged by, in the order of the predictor's inputs.
FEATURES = ("mean_nll", "p90_nll", "mean_entropy", "response_length", "prompt_length", "area_ratio")


@dataclass(frozen=True, eq=False)
class Candidates:
    """The rollouts of a step that may be chosen; arrays of length C.

    Args:
        mean_nll, p90_nll: Mean and 90th percentile of the sampled tokens' negative log-probability, in nats.
        mean_entropy: Mean entropy of the student's next-token distribution over the response, in nats.
        response_length, prompt_length: In tokens.
        area_ratio: Area of the evidence crop / area of the full image.

    Raises:
        ValueError: Arrays of different lengths, or a value that is not finite.
    """

    mean_nll: np.ndarray
    p90_nll: np.ndarray
    mean_entropy: np.ndarray
    response_length: np.ndarray
    prompt_length: np.ndarray
    area_ratio: np.ndarray

    def __post_init__(self):
        for name in FEATURES:
            values = np.asarray(getattr(self, name), dtype=np.float64)
            object.__setattr__(self, name, values)
            if values.shape != (len(self),):
                raise ValueError(f"{name} has shape {values.shape}, but there are {len(self)} candidates")
            bad = np.flatnonzero(~np.isfinite(values))
            if len(bad):
                raise ValueError(f"{name} of candidate {bad[0]} is {values[bad[0]]}: every feature must be finite")

    def __len__(self) -> int:
        return len(self.mean_nll)

    def matrix(self) -> np.ndarray:
        """(C, 6) in the order of :data:`FEATURES`."""
        return np.stack([getattr(self, name) for name in FEATURES], axis=1)


class Selection:
    """Which candidates are used. Four kinds share this interface.

    A step calls ``choose`` and, when the teacher has answered, ``learn``. Checkpoints are taken between steps.
    """

    #: Share of the candidates that are chosen, in (0, 1].
    budget: float

    #: Features that ``choose`` reads; the others may hold anything finite.
    needs: ClassVar[tuple[str, ...]] = ()

    def choose(self, candidates: Candidates, step: int) -> list[int]:
        """Sorted indices of the K = floor(budget * C) chosen candidates."""
        raise NotImplementedError

    def learn(self, step: int, utilities: dict[int, float]) -> dict[str, float]:
        """Take in the utilities of the last ``choose``'s rows, by candidate index, and return metrics."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the recipe: numbers, lists, tensors and dictionaries of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``'s answer.

        Raises:
            RecipeError: The state is of another kind of selection.
        """
        if state:
            raise RecipeError(
                f"opd.selection: the checkpoint holds a selector ({', '.join(sorted(state))}), but this kind keeps none; "
                "resume with kind=learned, or start a new run"
            )

    def _count(self, candidates: Candidates) -> int:
        return floor_share(self.budget, len(candidates))


@SELECTIONS.register("all")
class All(Selection):
    """Every candidate."""

    budget = 1.0

    def choose(self, candidates: Candidates, step: int) -> list[int]:
        return list(range(len(candidates)))


@SELECTIONS.register("random")
@dataclass(kw_only=True, eq=False)
class Random(Selection):
    """The head of a permutation that seed and step alone determine."""

    budget: float
    seed: int = 0

    def __post_init__(self):
        _check_budget(self.budget)
        require(self.seed >= 0, "seed", "0 or above", self.seed)

    def choose(self, candidates: Candidates, step: int) -> list[int]:
        return uniform(len(candidates), self._count(candidates), self.seed, step)


@SELECTIONS.register("entropy")
@dataclass(kw_only=True, eq=False)
class Entropy(Selection):
    """The candidates of highest mean entropy; of equal ones the first."""

    budget: float
    needs: ClassVar[tuple[str, ...]] = ("mean_entropy",)

    def __post_init__(self):
        _check_budget(self.budget)

    def choose(self, candidates: Candidates, step: int) -> list[int]:
        return sorted(descending(candidates.mean_entropy)[: self._count(candidates)].tolist())


@dataclass(frozen=True)
class _Turn:
    """What ``choose`` did, until ``learn`` hears how good it was. ``predicted`` (C,) is None before the first update."""

    step: int
    features: torch.Tensor
    chosen: list[int]
    explored: frozenset[int]
    predicted: np.ndarray | None


@SELECTIONS.register("learned")
@dataclass(kw_only=True, eq=False)
class Learned(ModelOptions, Selection):
    """The candidates of highest predicted utility and, to explore, some others (BAS-OPD, arXiv 2609.25891).

    Before the predictor's first update the choice is uniform. The normaliser moves in ``learn``, by all candidates of the
    step and not only by the chosen ones; so a step that is given up without ``learn`` leaves no trace.

    Args:
        exploration: Share of the chosen rows, rounded up, that is drawn uniformly from those not taken by prediction.

    The other options are those of :class:`~opd_recipes.selector.ModelOptions`.
    """

    budget: float
    exploration: float = 0.10
    needs: ClassVar[tuple[str, ...]] = FEATURES

    def __post_init__(self):
        super().__post_init__()
        _check_budget(self.budget)
        require(0 <= self.exploration <= 1, "exploration", "in [0, 1]", self.exploration)
        self.model = UtilityModel(len(FEATURES), self)
        self._turn: _Turn | None = None

    def choose(self, candidates: Candidates, step: int) -> list[int]:
        features, wanted = torch.from_numpy(candidates.matrix()), self._count(candidates)
        if self.model.updates == 0:
            chosen = uniform(len(candidates), wanted, self.seed, step)
            self._turn = _Turn(step, features, chosen, frozenset(chosen), None)
            return chosen
        predicted = self.model.predict(features)
        best, explore = descending(predicted), ceil_share(self.exploration, wanted)
        taken, rest = best[: wanted - explore], best[wanted - explore :]
        explored = generator(self.seed, Draw.EXPLORE, step).permutation(rest)[:explore].tolist()
        chosen = sorted([*taken.tolist(), *explored])
        self._turn = _Turn(step, features, chosen, frozenset(explored), predicted)
        return chosen

    def learn(self, step: int, utilities: dict[int, float]) -> dict[str, float]:
        """Store the utilities and update the predictor. Without any utility nothing moves.

        Returns:
            ``selection/stored`` and ``selection/updates`` (of the whole run); the mean losses of this step's updates; the
            mean utility of the rows taken by prediction and of the others; the rank correlation of prediction and
            utility. Those that have no rows to speak of are left out.

        Raises:
            ValueError: ``step`` is not that of the last ``choose``, a row was not chosen, or a utility is not finite.
        """
        turn = self._finish(step, utilities)
        metrics = {}
        if utilities:
            rows = sorted(utilities)
            self.model.normaliser.update(turn.features)
            actual = torch.tensor([float(utilities[row]) for row in rows], dtype=torch.float64)
            self.model.replay.append(turn.features[rows], actual, step)
            metrics = self.model.update(step) | _outcome(turn, utilities)
        counts = {"selection/stored": float(len(self.model.replay)), "selection/updates": float(self.model.updates)}
        return counts | metrics

    def _finish(self, step: int, utilities: dict[int, float]) -> _Turn:
        turn = self._turn
        if turn is None or turn.step != step:
            last = (
                "there was no choose() to learn from" if turn is None else f"the last choose() was for step {turn.step}"
            )
            raise ValueError(f"learn() for step {step}, but {last}")
        chosen = set(turn.chosen)
        for row, utility in utilities.items():
            if row not in chosen:
                raise ValueError(f"candidate {row} has a utility but was not chosen in step {step}")
            if not math.isfinite(utility):
                raise ValueError(f"the utility of candidate {row} in step {step} is {utility}: it must be finite")
        self._turn = None
        return turn

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)
        self._turn = None


def uniform(count: int, wanted: int, seed: int, step: int) -> list[int]:
    """``wanted`` of ``range(count)``, sorted: the head of the permutation that seed and step determine."""
    return sorted(generator(seed, Draw.UNIFORM, step).permutation(count)[:wanted].tolist())


def descending(values: np.ndarray) -> np.ndarray:
    """Indices from the highest value to the lowest, equal ones by index. Shapes: (C,) -> (C,)."""
    return np.argsort(-values, kind="stable")


def floor_share(share: float, count: int) -> int:
    """floor(share * count). 1e-9 more, or 0.29 * 100 = 28.999999999999996 would be 28."""
    return math.floor(share * count + 1e-9)


def ceil_share(share: float, count: int) -> int:
    """ceil(share * count). 1e-9 less, or 0.07 * 100 = 7.000000000000001 would be 8."""
    return math.ceil(share * count - 1e-9)


def features(log_probs: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and 90th percentile (linear interpolation) of the negative log-probabilities of one response's tokens.

    Raises:
        ValueError: The response has no token.
    """
    nll = -np.asarray(log_probs, dtype=np.float64)
    if nll.size == 0:
        raise ValueError("a response without tokens has no features: it is no candidate")
    return float(nll.mean()), float(np.percentile(nll, 90))


def captured_utility(chosen: Sequence[int], utilities: Sequence[float]) -> float:
    """Utility of the chosen rows / utility of as many best rows of all; 1.0 where the latter is 0."""
    best = math.fsum(sorted(utilities, reverse=True)[: len(chosen)])
    return math.fsum(utilities[row] for row in chosen) / best if best else 1.0


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation of two (N,), tied values sharing their mean rank; nan where one does not vary."""
    ranks = [_mean_ranks(values) for values in (a, b)]
    x, y = (rank - rank.mean() for rank in ranks)
    scale = math.sqrt((x @ x) * (y @ y))
    return float(x @ y) / scale if scale else math.nan


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(sizes) - (sizes - 1) / 2)[group]


def _outcome(turn: _Turn, utilities: dict[int, float]) -> dict[str, float]:
    """How good the rows were; before the predictor chooses, all of them were taken to explore."""
    groups: dict[str, list[float]] = {"predicted": [], "explored": []}
    for row, utility in utilities.items():
        groups["explored" if row in turn.explored else "predicted"].append(float(utility))
    metrics = {f"selection/utility_{name}_rows": math.fsum(u) / len(u) for name, u in groups.items() if u}
    if turn.predicted is not None and len(utilities) >= 3:
        rows = sorted(utilities)
        correlation = rank_correlation(turn.predicted[rows], np.array([utilities[row] for row in rows]))
        if not math.isnan(correlation):
            metrics["selection/rank_correlation"] = correlation
    return metrics


def _check_budget(budget: float) -> None:
    require(0 < budget <= 1, "budget", "in (0, 1], the share of the rollouts that is used", budget)
