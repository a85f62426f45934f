"""A checkpoint as verl writes it, of the tiny model on three FSDP2 ranks: ``sharded_checkpoint.py FOLDER``. Not a test.

The ranks take turns in one process: FSDP2 cuts each rank's part of a weight without asking the others.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForImageTextToText

from tests.harness import BASE

WORLD = 3  # 128 rows are then 43, 43 and 42
TEACHER_SCALE = 0.5


def placement(weight: torch.Tensor) -> Shard:
    """verl's choice: the first dimension that the ranks divide, else unequal rows."""
    return Shard(next((i for i, size in enumerate(weight.shape) if size % WORLD == 0), 0))


def save(model: torch.nn.Module, folder: Path, rank: int) -> None:
    torch.save(model.state_dict(), folder / f"model_world_size_{WORLD}_rank_{rank}.pt")


if __name__ == "__main__":
    student = Path(sys.argv[1]) / "actor"
    teacher = student / "teacher"
    for folder in (student, teacher):
        folder.mkdir(parents=True)
        shutil.copytree(BASE, folder / "huggingface", ignore=shutil.ignore_patterns("*.safetensors", "base.json"))
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))
    for rank in range(WORLD):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
        model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32)
        for layer in [*model.model.language_model.layers, model]:
            fully_shard(layer, mesh=mesh, shard_placement_fn=placement)
        save(model, student, rank)
        with torch.no_grad():
            for weight in model.parameters():
                weight.to_local().mul_(TEACHER_SCALE)
        save(model, teacher, rank)
        dist.destroy_process_group()
