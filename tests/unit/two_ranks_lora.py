"""One of two FSDP2 ranks for ``test_lora``: ``two_ranks_lora.py RANK PORT FOLDER``. Not a test by itself."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import tests.conftest  # noqa: F401  the environment of every test

rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
os.environ.update(RANK=str(rank), WORLD_SIZE="2")

import torch  # noqa: E402

from tests import harness  # noqa: E402
from tests.unit.lora_helpers import adapters, engines, scatter  # noqa: E402

harness.start(rank, 2, port)
rows = torch.load(folder / "rows.pt", weights_only=False)
student, teacher = engines(micro_tokens=120)
scatter(student)
gradients = {}


def keep():
    gradients.update(harness.full_gradients(student.module))
    return 1.0


student.optimizer_step = keep
mine = rows[:2] if rank == 0 else rows[2:]
rollout = dict(student.get_per_tensor_param()[0])
before = {}
with teacher.eval_mode():
    before = adapters(student)
out = harness.update(student, harness.batch(mine, micro_tokens=120))  # the teacher follows all the same
with teacher.eval_mode():
    after = adapters(student)
student.save_checkpoint(str(folder / "student"))
teacher.save_checkpoint(str(folder / "teacher"))
loss = torch.tensor(out["loss"])
torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.SUM)
if rank == 0:
    result = {
        "gradients": gradients,
        "loss": loss.item() / 2,
        "rollout": rollout,
        "teacher_before": before,
        "teacher_after": after,
        "student_after": adapters(student),
    }
else:
    adapters(student)
if rank == 0:
    torch.save(result, folder / "result.pt")
torch.distributed.barrier()
