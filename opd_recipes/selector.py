"""Parts of the learned selection (BAS-OPD, arXiv 2609.25891): what guesses a rollout's utility before the teacher is asked.

Everything runs on the driver's CPU in float64: a step has some hundred rows of six numbers. Nothing here reads or moves
the global random state: every draw is a function of the seed, the step and what the draw is for (:func:`generator`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from opd_recipes.registry import RecipeError

#: Utilities closer than this are a tie: their pair does not enter the rank loss.
TIE = 1e-6

#: Added to the running variance, so that a feature that does not vary becomes 0 instead of 0 / 0.
VARIANCE_FLOOR = 1e-8


class Draw(IntEnum):
    """What a random draw is for. Each has a stream of its own."""

    UNIFORM = 0
    EXPLORE = 1
    REPLAY = 2
    WEIGHTS = 3


def generator(seed: int, purpose: Draw, step: int) -> np.random.Generator:
    """The random numbers of one step; nothing of them has to be kept in a checkpoint."""
    return np.random.default_rng([seed, int(purpose), step])


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on the calling thread, so that a choice does not depend on the number of cores.

    It is faster too: so little work is done before threads have found each other, above all where the cores are busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(kw_only=True, eq=False)
class ModelOptions:
    """How utility is learned; the defaults are the paper's.

    Args:
        hidden: Width of the predictor.
        capacity: Rows of the replay.
        minibatch: Replay rows per update; all of them while there are fewer.
        updates_per_step: Updates of the predictor in each step.
        warmup: Stored rows before the first update.
        lr: Adam's learning rate.
        huber_delta: Error at which the Huber loss turns from square to linear.
        rank_weight: Weight of the rank loss.
        half_life: Age, in steps, at which a row counts half.
        momentum: Of the features' running mean and variance.
        seed: Of every draw, the predictor's first weights included.
    """

    hidden: int = 32
    capacity: int = 512
    minibatch: int = 256
    updates_per_step: int = 2
    warmup: int = 96
    lr: float = 1e-3
    huber_delta: float = 1.0
    rank_weight: float = 0.2
    half_life: float = 10.0
    momentum: float = 0.99
    seed: int = 0

    def __post_init__(self):
        require(0 <= self.momentum < 1, "momentum", "in [0, 1)", self.momentum)
        require(0 <= self.rank_weight < math.inf, "rank_weight", "0 or above", self.rank_weight)
        require(self.seed >= 0, "seed", "0 or above", self.seed)
        for name in ("hidden", "capacity", "minibatch", "updates_per_step", "warmup"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("lr", "huber_delta", "half_life"):
            require(0 < getattr(self, name) < math.inf, name, "above 0 and finite", getattr(self, name))
        for name in ("warmup", "minibatch"):
            value = getattr(self, name)
            require(value <= self.capacity, name, f"at most capacity={self.capacity}, or it is never reached", value)


def require(holds: bool, option: str, rule: str, value: Any) -> None:
    """Raise :class:`RecipeError` that names the option of ``opd.selection`` unless the rule holds."""
    if not holds:
        raise RecipeError(f"opd.selection.{option}: must be {rule}, got {value}")


class Normaliser:
    """Running mean and variance of each feature, ``normaliser(features) -> (features - mean) / sqrt(variance)``.

    The first batch sets both; each later one moves them, running <- momentum running + (1 - momentum) batch. The variance
    of a batch is its mean squared distance from its own mean (population variance), so a drift of the mean between
    batches does not enter it.

    Args:
        size: Features per row.
        momentum: Share of the running value that stays, 0.99 in the paper.
    """

    def __init__(self, size: int, momentum: float):
        self.momentum = momentum
        self.seen = 0
        self.mean = torch.zeros(size, dtype=torch.float64)
        self.variance = torch.ones(size, dtype=torch.float64)

    def update(self, batch: torch.Tensor) -> None:
        """Take in one step's rows (N, size), N >= 1."""
        mean, variance = batch.mean(0), batch.var(0, correction=0)
        share = 1 - self.momentum if self.seen else 1.0
        self.mean = self.mean.lerp(mean, share)
        self.variance = self.variance.lerp(variance, share)
        self.seen += 1

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Shapes: (N, size) -> (N, size)."""
        return (features - self.mean) / (self.variance + VARIANCE_FLOOR).sqrt()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": self.mean.clone(), "variance": self.variance.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = int(state["seen"])
        self.mean, self.variance = state["mean"].clone(), state["variance"].clone()


class Predictor(nn.Module):
    """Utility from normalised features: LayerNorm, Linear, SiLU, Linear. Shapes: (N, size) -> (N,).

    Args:
        size: Features per row.
        hidden: Width of the hidden layer, 32 in the paper.
        rng: Draws the first weights, uniform in +-1 / sqrt(fan in) as PyTorch's linear layers do.
    """

    def __init__(self, size: int, hidden: int, rng: np.random.Generator):
        super().__init__()
        self.norm = nn.LayerNorm(size, dtype=torch.float64)
        # Built without their own initialisation, which would draw from the global generator.
        self.hidden = nn.utils.skip_init(nn.Linear, size, hidden, dtype=torch.float64)
        self.output = nn.utils.skip_init(nn.Linear, hidden, 1, dtype=torch.float64)
        for layer in (self.hidden, self.output):
            bound = layer.in_features**-0.5
            for parameter in (layer.weight, layer.bias):
                drawn = rng.uniform(-bound, bound, tuple(parameter.shape))
                parameter.data.copy_(torch.from_numpy(drawn))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.output(functional.silu(self.hidden(self.norm(features)))).squeeze(-1)


class Replay:
    """The last ``capacity`` rows whose utility is known, first in, first out.

    Features are stored as they were measured and normalised when used: the normaliser drifts, and rows stored under
    different statistics would be different inputs for the same measurement.

    Args:
        size: Features per row.
        capacity: Rows kept, 512 in the paper.
    """

    def __init__(self, size: int, capacity: int):
        self.capacity = capacity
        self.features = torch.empty(0, size, dtype=torch.float64)
        self.utilities = torch.empty(0, dtype=torch.float64)
        self.steps = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, features: torch.Tensor, utilities: torch.Tensor, step: int) -> None:
        """Store one step's rows, (N, size) and (N,); the oldest leave when the replay is full."""
        steps = torch.full((len(utilities),), step, dtype=torch.int64)
        self._keep(
            torch.cat([self.features, features]), torch.cat([self.utilities, utilities]), torch.cat([self.steps, steps])
        )

    def sample(self, count: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features (n, size), utilities (n,) and steps (n,) of n = min(count, stored) different rows, drawn uniformly."""
        rows = torch.from_numpy(rng.permutation(len(self))[:count])
        return self.features[rows], self.utilities[rows], self.steps[rows]

    def _keep(self, features: torch.Tensor, utilities: torch.Tensor, steps: torch.Tensor) -> None:
        last = slice(-self.capacity, None)
        # Copies: a slice would keep the storage of what has left, and a checkpoint would write it.
        self.features, self.utilities, self.steps = features[last].clone(), utilities[last].clone(), steps[last].clone()

    def state_dict(self) -> dict[str, Any]:
        return {"features": self.features.clone(), "utilities": self.utilities.clone(), "steps": self.steps.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows; of more than ``capacity`` the newest."""
        self._keep(state["features"], state["utilities"], state["steps"])


def age_weights(steps: torch.Tensor, now: int, half_life: float) -> torch.Tensor:
    """2 ** (-age / half_life) of rows stored at ``steps``, seen from step ``now``; ages in steps. Shapes: (N,) -> (N,).

    Raises:
        ValueError: A row is from a later step than ``now``.
    """
    ages = now - steps
    if (ages < 0).any():
        raise ValueError(f"step {now} is before step {int(steps.max())}, from which the selector already has utilities")
    return torch.exp2(-ages.double() / half_life)


def selector_loss(
    predicted: torch.Tensor, utilities: torch.Tensor, weights: torch.Tensor, *, delta: float, rank_weight: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Age-weighted Huber loss + ``rank_weight`` * pairwise rank loss; all three arguments are (N,).

    The paper does not say how the two are normalised. Here both are weighted means: Huber over rows with weights w_i, the
    rank loss over the unordered pairs with |u_i - u_j| > 1e-6 with weights w_i w_j. So neither the size of the minibatch
    nor its age as a whole changes their balance. Without such a pair the rank loss is 0.

    Returns:
        Scalars: the sum, the Huber loss, the rank loss (before its weight).
    """
    huber = _weighted_mean(functional.huber_loss(predicted, utilities, reduction="none", delta=delta), weights)
    i, j = torch.triu_indices(len(utilities), len(utilities), offset=1)
    difference = utilities[i] - utilities[j]
    wrong = functional.softplus(-difference.sign() * (predicted[i] - predicted[j]))
    rank = _weighted_mean(wrong, weights[i] * weights[j] * (difference.abs() > TIE))
    return huber + rank_weight * rank, huber, rank


def _weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


class UtilityModel:
    """Predicts utility from features and learns it from the rows whose utility became known.

    Args:
        size: Features per row.
        options: How it learns.
    """

    def __init__(self, size: int, options: ModelOptions):
        self.options = options
        #: Updates of the predictor so far; its guesses mean nothing before the first.
        self.updates = 0
        self.normaliser = Normaliser(size, options.momentum)
        self.replay = Replay(size, options.capacity)
        self.predictor = Predictor(size, options.hidden, generator(options.seed, Draw.WEIGHTS, 0))
        self.adam = torch.optim.Adam(self.predictor.parameters(), lr=options.lr)

    @one_thread()
    @torch.no_grad()
    def predict(self, features: torch.Tensor) -> np.ndarray:
        """Utilities; shapes: (N, size) -> (N,)."""
        return self.predictor(self.normaliser(features)).numpy()

    @one_thread()
    def update(self, step: int) -> dict[str, float]:
        """Train on the replay once it has ``warmup`` rows; return the mean losses of this step's updates."""
        if len(self.replay) < self.options.warmup:
            return {}
        rng = generator(self.options.seed, Draw.REPLAY, step)
        losses = np.mean([self._update(step, rng) for _ in range(self.options.updates_per_step)], axis=0)
        return dict(zip(("selection/loss", "selection/huber", "selection/rank_loss"), losses.tolist(), strict=True))

    def _update(self, step: int, rng: np.random.Generator) -> list[float]:
        features, utilities, steps = self.replay.sample(self.options.minibatch, rng)
        weights = age_weights(steps, step, self.options.half_life)
        predicted = self.predictor(self.normaliser(features))
        delta, rank_weight = self.options.huber_delta, self.options.rank_weight
        parts = selector_loss(predicted, utilities, weights, delta=delta, rank_weight=rank_weight)
        self.adam.zero_grad()
        parts[0].backward()
        self.adam.step()
        self.updates += 1
        return [part.item() for part in parts]

    def state_dict(self) -> dict[str, Any]:
        """What was learned. The options, the learning rate and the seed among them, are the recipe's and not kept."""
        return {
            "updates": self.updates,
            "normaliser": self.normaliser.state_dict(),
            "replay": self.replay.state_dict(),
            "predictor": copy.deepcopy(dict(self.predictor.state_dict())),
            "adam": copy.deepcopy(self.adam.state_dict()["state"]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``'s answer.

        Raises:
            RecipeError: It is not the state of a learned selector, or of one of another width.
        """
        if set(state) != set(self.state_dict()):
            found = ", ".join(sorted(state)) or "nothing"
            raise RecipeError(
                f"opd.selection: the checkpoint holds no learned selector (found: {found}); resume with the kind of "
                "selection that the run had, or start a new run"
            )
        width = len(state["predictor"]["hidden.bias"])
        require(width == self.options.hidden, "hidden", f"{width} as in the checkpoint", self.options.hidden)
        self.updates = int(state["updates"])
        self.normaliser.load_state_dict(state["normaliser"])
        self.replay.load_state_dict(state["replay"])
        self.predictor.load_state_dict(state["predictor"])
        # Only Adam's moments: its own loading would bring back the old learning rate, and share tensors with ``state``.
        groups = self.adam.state_dict()["param_groups"]
        self.adam.load_state_dict({"state": copy.deepcopy(state["adam"]), "param_groups": groups})
