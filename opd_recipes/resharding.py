"""FSDP2 shards of one number of ranks, cut anew for another: weights and Adam's moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from opd_recipes.registry import RecipeError


@torch.no_grad()
def load_weights(model: nn.Module, shards: Sequence[dict[str, torch.Tensor]], partial: bool = False) -> None:
    """Fill the model's own shards in place.

    Args:
        shards: The state of each rank that wrote, in their order.
        partial: The model may have weights of which they know nothing.

    Raises:
        RecipeError: They are of another model.
    """
    targets = model.state_dict()
    odd = shards[0].keys() - targets.keys() if partial else shards[0].keys() ^ targets.keys()
    if odd:
        raise RecipeError(f"the checkpoint is of another model: {len(odd)} names differ, e.g. {sorted(odd)[0]}")
    for name in shards[0]:
        target = targets[name]
        part = part_of(whole(name, [shard[name] for shard in shards]), target)
        (target.to_local() if isinstance(target, DTensor) else target).copy_(part)


def load_optimizer(optimizer: torch.optim.Optimizer, shards: Sequence[dict[str, Any]]) -> None:
    """Load an optimizer's state; its parameters have the order that they had, whatever the number of ranks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            key: _like(whole(key, [shard["state"][index][key] for shard in shards]), parameters[index]) for key in entry
        }
        for index, entry in shards[0]["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": shards[0]["param_groups"]})


def _like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A moment is sharded as its parameter is; a count of steps is one number."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    part = part_of(value, parameter).to(parameter.to_local().device)
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor of which these are the parts of all ranks, in their order.

    Raises:
        RecipeError: Not FSDP2's own sharding, over one group of ranks or over groups that repeat one another; or the parts
            do not fit together.
    """
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    mesh, placement = first.device_mesh, first.placements[-1]
    if mesh.mesh_dim_names not in (("fsdp",), ("ddp", "fsdp")) or not isinstance(placement, Shard | Replicate):
        raise RecipeError(
            f"{name} is placed {first.placements} over {mesh.mesh_dim_names}; only FSDP2's own way is known"
        )
    # Groups repeat the first one's shards, whose ranks are the first ones.
    local = [part.to_local() for part in parts[: mesh.shape[-1]]]
    put_together = torch.cat(local, dim=placement.dim) if isinstance(placement, Shard) else local[0]
    if put_together.shape != first.shape:
        raise RecipeError(f"{name} has shape {tuple(put_together.shape)} after merging, not {tuple(first.shape)}")
    return put_together


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor that is sharded as ``like`` is; FSDP2 cuts as ``torch.chunk`` does."""
    if not isinstance(like, DTensor) or not isinstance(like.placements[-1], Shard):
        return tensor
    mesh, dim = like.device_mesh, like.placements[-1].dim
    chunks = tensor.chunk(mesh.size(mesh.ndim - 1), dim)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)
