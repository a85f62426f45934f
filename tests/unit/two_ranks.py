"""One of two FSDP2 ranks for ``test_engine``: ``two_ranks.py RANK PORT FOLDER [OVERRIDES]``. Not a test by itself."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import tests.conftest  # noqa: F401  the environment of every test

rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
os.environ.update(RANK=str(rank), WORLD_SIZE="2")

import torch  # noqa: E402

from tests import harness  # noqa: E402

harness.start(rank, 2, port)
rows = torch.load(folder / "rows.pt", weights_only=False)
student, teacher = harness.engines(harness.config(*sys.argv[4:]))
kept = {}


def keep():
    kept.update(harness.full_gradients(student.module))
    return 1.0


step = student.optimizer_step
student.optimizer_step = keep
mine = rows[:2] if rank == 0 else rows[2:]  # ranks with different numbers of rows and of micro-batches
out = harness.update(student, harness.batch(mine, micro_tokens=120))
loss = torch.tensor(out["loss"])
torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.SUM)

student.optimizer_step = step
before = {name: weight.clone() for name, weight in harness.full_weights(teacher.module).items()}
harness.update(student, harness.batch(mine, micro_tokens=120))
ours, theirs = harness.full_weights(student.module), harness.full_weights(teacher.module)
gap_before = sum((before[name] - ours[name]).abs().sum() for name in ours)
gap_after = sum((theirs[name] - ours[name]).abs().sum() for name in ours)
student.save_checkpoint(str(folder / "student"))
teacher.save_checkpoint(str(folder / "teacher"))
harness.update(student, harness.batch(mine, micro_tokens=120))
third = harness.full_weights(student.module), harness.full_weights(teacher.module)
if rank == 0:
    torch.save(
        {
            "saved": (ours, theirs),
            "third": third,
            "gradients": kept,
            "loss": loss.item() / 2,
            "margins": {key: float(value) for key, value in out.items() if "margin" in key},
            "teacher_gap_before": gap_before,
            "teacher_gap_after": gap_after,
        },
        folder / "result.pt",
    )
torch.distributed.barrier()
