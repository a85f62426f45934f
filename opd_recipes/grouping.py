"""Rows of one prompt on one rank and in one micro-batch, where their image is computed once (:mod:`opd_recipes.vision_tower`).

verl balances ranks and micro-batches by tokens alone, which takes the rollouts of a prompt apart: they are alike in length.
Nothing that is computed depends on either.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils as tu

#: How much more than verl's own choice gives it the busiest rank may get: a rank's surplus keeps all others waiting.
SLACK = 0.03


def members(keys: Sequence[Hashable]) -> list[list[int]]:
    """Indices of equal keys, in the order in which a key is first seen."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def for_ranks(loads: Sequence[int], prompts: Sequence[Hashable], ranks: int, limit: float) -> list[list[int]] | None:
    """As many rows for each rank, prompts whole where that leaves no rank with a larger load than ``limit``.

    Largest prompt first, to the rank with the least load that has room for all of it; then single rows of the busiest and
    the idlest rank change places.

    Args:
        loads: Cost of each row.
        prompts: What rows of one prompt have in common.
        ranks: Divides the number of rows.

    Returns:
        Rows of each rank, those of a prompt one after another; None where the limit is not reached.
    """
    room = len(loads) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    groups = members(prompts)
    for rows in sorted(groups, key=lambda rows: -sum(loads[i] for i in rows)):
        while rows:
            fitting = [rank for rank in range(ranks) if len(shares[rank]) + len(rows) <= room]
            rank = min(fitting, key=sums.__getitem__) if fitting else min(range(ranks), key=lambda r: len(shares[r]))
            taken = rows[: room - len(shares[rank])]
            shares[rank] += taken
            sums[rank] += sum(loads[i] for i in taken)
            rows = rows[len(taken) :]
    if not _levelled(loads, shares, sums, limit):
        return None
    number = {row: number for number, rows in enumerate(groups) for row in rows}
    return [sorted(share, key=lambda row: (number[row], row)) for share in shares]


def _levelled(loads: Sequence[int], shares: list[list[int]], sums: list[int], limit: float) -> bool:
    """Let rows change places, at most one for each rank and row, until no rank is above the limit."""
    cost = torch.tensor(loads, dtype=torch.float64)
    for _ in range(len(loads)):
        high, low = sums.index(max(sums)), sums.index(min(sums))
        gap = sums[high] - sums[low]
        if sums[high] <= limit:
            return True
        moved = cost[shares[high]][:, None] - cost[shares[low]]
        best = int((moved - gap / 2).abs().argmin())
        i, j = divmod(best, len(shares[low]))
        if not 0 < moved[i, j] < gap:
            return False
        shares[high][i], shares[low][j] = shares[low][j], shares[high][i]
        sums[high] -= int(moved[i, j])
        sums[low] += int(moved[i, j])
    return max(sums) <= limit


def filled(lengths: Sequence[int], order: Sequence[int], limit: int) -> list[list[int]]:
    """Rows in their order, as many in each part as have ``limit`` tokens together."""
    parts: list[list[int]] = []
    tokens = 0
    for row in order:
        if not parts or tokens + lengths[row] > limit:
            parts.append([])
            tokens = 0
        parts[-1].append(row)
        tokens += lengths[row]
    return parts


def levelled_parts(lengths: Sequence[int], order: Sequence[int], count: int, budget: int) -> list[list[int]]:
    """``count`` parts of rows in their order, the largest as small as that allows; largest first, as on the other ranks.

    Args:
        lengths: Tokens of each row.
        order: Rows of a prompt one after another.
        count: At least what ``budget`` needs, at most the number of rows.
        budget: Tokens of a part.
    """
    low, high = max(lengths), budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(filled(lengths, order, middle)) <= count else (middle + 1, high)
    parts = filled(lengths, order, low)
    while len(parts) < count:
        longest = max((part for part in parts if len(part) > 1), key=lambda part: sum(lengths[i] for i in part))
        at = parts.index(longest)
        parts[at : at + 1] = [longest[: len(longest) // 2], longest[len(longest) // 2 :]]
    return sorted(parts, key=lambda part: -sum(lengths[i] for i in part))


class Parts:
    """A batch whose micro-batches are chosen already: verl gets one stand-in for each, and takes them one at a time.

    Args:
        rows: The batch.
        parts: Its rows in each micro-batch; as many on every rank.
    """

    def __init__(self, rows: TensorDict, parts: list[list[int]]):
        self.rows, self.parts = rows, parts
        self._outputs: list[tuple[list[int], dict[str, torch.Tensor]]] = []

    def stand_ins(self) -> TensorDict:
        """What verl's engine reads of a batch before it is cut: how many tokens count, and settings."""
        counts = torch.stack([row.sum() for row in self.rows["loss_mask"].unbind()])
        data = TensorDict({"part": torch.arange(len(self.parts))}, batch_size=len(self.parts))
        data["loss_mask"] = torch.stack([counts[part].sum() for part in self.parts])
        tu.assign_non_tensor(data, **_settings(self.rows))
        return tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=1)

    def open(self, stand_in: TensorDict) -> TensorDict:
        """The rows of a micro-batch, with the settings that verl has added."""
        rows = tu.index_select_tensor_dict(self.rows, self.parts[int(stand_in["part"])])
        added = {key: value for key, value in _settings(stand_in).items() if key not in rows}
        return tu.assign_non_tensor(rows, **added)

    def keep(self, stand_in: TensorDict, output: dict[str, torch.Tensor]) -> None:
        """Keep a micro-batch's output, each value one row for each of its rows."""
        self._outputs.append((self.parts[int(stand_in["part"])], output))

    def output(self) -> dict[str, torch.Tensor]:
        """All outputs, nested, in the order of the rows."""
        columns: dict[str, list[Any]] = {}
        for part, output in self._outputs:
            for name, values in output.items():
                column = columns.setdefault(name, [None] * len(self.rows))
                for row, value in zip(part, values.unbind(), strict=True):
                    column[row] = value
        return {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()}


def _settings(data: TensorDict) -> dict[str, NonTensorData]:
    """What is one value for all rows."""
    return {key: NonTensorData(value.data) for key, value in data.items() if isinstance(value, NonTensorData)}
