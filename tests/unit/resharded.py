"""Shards of one number of ranks read by another, for ``test_resharding``: ``resharded.py FOLDER``. Not a test by itself.

The ranks take turns, each in a process of its own (torch remembers meshes): FSDP2 cuts each rank's part of a weight without
asking the others.
"""

import json
import sys
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2]))
from opd_recipes.resharding import load_optimizer, load_weights

#: Meshes as verl makes them: FSDP over all ranks, or in groups that repeat one another.
MESHES = {"1": (1,), "2": (2,), "3": (3,), "4": (4,), "2x2": (2, 2), "3x2": (3, 2)}
CASES = [("2", "1"), ("1", "3"), ("3", "2"), ("2", "4"), ("4", "3"), ("2x2", "3"), ("3", "2x2"), ("3x2", "2x2")]


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Rows that no number of ranks divides, rows fewer than ranks, columns that some divide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 2), nn.LayerNorm(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(5, 12)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Rank:
    """A rank of a mesh, for as long as it is entered, with a model and an optimizer without state."""

    def __init__(self, mesh: str, rank: int):
        self.shape, self.rank = MESHES[mesh], rank

    def __enter__(self):
        size = torch.Size(self.shape).numel()
        dist.init_process_group("fake", store=FakeStore(), rank=self.rank, world_size=size)
        names = ("fsdp",) if len(self.shape) == 1 else ("ddp", "fsdp")
        mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=names)
        groups = self.shape[-1]

        def placement(weight: torch.Tensor) -> Shard:
            """verl's choice: the first dimension that the ranks divide, else unequal rows."""
            return Shard(next((i for i, n in enumerate(weight.shape) if n % groups == 0), 0))

        self.model = deepcopy(whole_model)
        fully_shard(self.model, mesh=mesh, shard_placement_fn=placement)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.3)
        return self

    def __exit__(self, *_):
        dist.destroy_process_group()

    def cut(self, tensor: torch.Tensor, like: DTensor) -> DTensor:
        """As FSDP2's documentation says: chunks along the dimension, some of them empty where there are too few rows."""
        groups, dim = self.shape[-1], like.placements[-1].dim
        size = -(-tensor.shape[dim] // groups)
        part = tensor.split(size, dim)[self.rank % groups :][:1] or (tensor.narrow(dim, 0, 0),)
        assert part[0].shape == like.to_local().shape
        return DTensor.from_local(
            part[0].clone(), like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def moments(self) -> dict:
        """The state that the optimizer should have."""
        state = deepcopy(whole_optimizer.state_dict())
        for parameter, entry in zip(self.model.parameters(), state["state"].values(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                entry[key] = self.cut(entry[key], parameter)
        return state


def write(mesh: str, rank: int, folder: Path) -> None:
    with Rank(mesh, rank) as writer:
        torch.save(writer.model.state_dict(), folder / f"model-{mesh}-{rank}.pt")
        torch.save(writer.moments(), folder / f"optim-{mesh}-{rank}.pt")


def shards(folder: Path, part: str, mesh: str) -> list:
    files = [folder / f"{part}-{mesh}-{rank}.pt" for rank in range(world(mesh))]
    return [torch.load(file, weights_only=True, mmap=True) for file in files]


def read(written: str, mesh: str, rank: int, folder: Path) -> list[str]:
    """Load on a rank of ``mesh``, and return what is not as it should be."""
    wrong = []
    with Rank(mesh, rank) as reader:
        expected = {name: part.to_local().clone() for name, part in reader.model.state_dict().items()}
        for parameter in reader.model.parameters():
            parameter.to_local().data.zero_()
        load_weights(reader.model, shards(folder, "model", written))
        load_optimizer(reader.optimizer, shards(folder, "optim", written))
        found = {name: part.to_local() for name, part in reader.model.state_dict().items()}
        wrong += [f"{rank} {name}" for name in expected if not torch.equal(found[name], expected[name])]
        ours, theirs = reader.optimizer.state_dict(), reader.moments()
        wrong += [f"{rank} rate"] if ours["param_groups"] != theirs["param_groups"] else []
        for index, entry in theirs["state"].items():
            for key, value in entry.items():
                mine = ours["state"][index][key]
                same = type(mine) is type(value) and torch.equal(local(mine), local(value))
                wrong += [] if same else [f"{rank} {index} {key}"]
    return wrong


def world(mesh: str) -> int:
    return torch.Size(MESHES[mesh]).numel()


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


whole_model, whole_optimizer = trained()

if __name__ == "__main__":
    home = Path(sys.argv[1])
    with get_context("fork").Pool(1, maxtasksperchild=1) as alone:
        for name in {written for written, _ in CASES}:
            for number in range(world(name)):
                alone.apply(write, (name, number, home))
        results = {
            f"{written} to {mesh}": sum((alone.apply(read, (written, mesh, n, home)) for n in range(world(mesh))), [])
            for written, mesh in CASES
        }
    (home / "results.json").write_text(json.dumps(results))
