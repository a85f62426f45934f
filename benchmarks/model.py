"""A model with its head and loss, forward and backward, without verl: ours and :mod:`benchmarks.plain`'s, on a GPU or CPU.

A random Qwen3-VL of transformers stands for student and teacher. Ours are the parts that the engines use (``StreamedHead``, its
requests, the vision tower once per distinct image, the recipe's loss) in the engines' order; FSDP, optimizer and teacher
rule are left out on both sides. ``python -m benchmarks.model SETTINGS`` runs one side once and prints its peak memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import engines, plain
from benchmarks.engines import Rows, Shape
from benchmarks.measure import alternate, in_child, peak_memory
from opd_recipes.divergence import Divergence
from opd_recipes.loss import Normaliser, Objective, distill_loss
from opd_recipes.topk_head import HiddenRequest, ScoreRequest, StreamedHead, TeacherStates
from opd_recipes.vision_tower import DistinctImages


@dataclass(frozen=True)
class Case:
    """A model, one micro-batch of rows and where it runs."""

    shape: Shape
    rows: Rows
    dtype: str = "float32"
    device: str = "cpu"
    topk: int = 100
    chunk: int = 256

    @classmethod
    def of(cls, values: dict[str, Any]) -> Case:
        """From what ``asdict`` made, by way of JSON."""
        rows: dict[str, Any] = dict(values["rows"])
        rows |= {key: tuple(value) for key, value in rows.items() if isinstance(value, list)}
        return cls(**{**values, "shape": Shape(**values["shape"]), "rows": Rows(**rows)})


#: On a GPU: the vocabulary of Qwen3-VL, a narrow model around it, and the 8 rollouts of a prompt at the papers' lengths.
LARGE = Case(
    Shape(151_936, 1024, 3072, 8, 16, 8, vision_hidden=512, vision_depth=8),
    Rows(8, 8, image=(32, 32), teacher_image=(32, 32), text=64, response=512, micro_rows=8),
    dtype="bfloat16",
    device="cuda",
)
#: On two CPU cores.
SMALL = Case(
    Shape(15_872), Rows(8, 8, image=(12, 16), teacher_image=(12, 16), text=8, response=48, micro_rows=8), chunk=64
)
TINY = Case(
    Shape(512, 64, 128, 2, 2, 1, vision_hidden=32, vision_depth=2),
    Rows(4, 2, image=(4, 6), teacher_image=(2, 3), text=4, response=6, micro_rows=4),
    topk=20,
    chunk=8,
)


class Ours:
    """One micro-batch as the engines run it."""

    def __init__(self, case: Case):
        self.case = case
        self.student, self.teacher, self.batch = prepared(case)
        self.heads = [StreamedHead.install(model) for model in (self.student, self.teacher)]
        for model in (self.student, self.teacher):
            DistinctImages.install(model)

    def __call__(self) -> torch.Tensor:
        case, batch = self.case, self.batch
        student, teacher = self.heads
        with torch.no_grad(), teacher.serving(HiddenRequest(batch["teacher_index"])):
            hidden = plain.all_logits(self.teacher, batch["teacher"])["hidden"]
        request = ScoreRequest(
            batch["student_index"],
            batch["labels"],
            chunk=case.chunk,
            teacher=TeacherStates(hidden, teacher.weight.detach()),
            divergence=Divergence("jsd", "student", "bucket", case.topk),
        )
        with student.serving(request):
            answer = plain.all_logits(self.student, batch["student"])
        loss, _ = distill_loss(
            answer,
            objective=Objective(aggregation="token_mean"),
            mask=torch.ones_like(batch["labels"]),
            lengths=torch.full((case.rows.count,), case.rows.response, device=case.device),
            total=Normaliser(tokens=len(batch["labels"]), responses=case.rows.count, world=1),
            rollout_log_probs=batch["rollout_log_probs"],
        )
        loss.backward()
        return loss.detach()


class Plain:
    """The same in the published way."""

    def __init__(self, case: Case):
        self.case = case
        self.student, self.teacher, self.batch = prepared(case)

    def __call__(self) -> torch.Tensor:
        loss = plain.distill(
            partial(plain.all_logits, self.student, self.batch["student"]),
            partial(plain.all_logits, self.teacher, self.batch["teacher"]),
            topk=self.case.topk,
            **{key: self.batch[key] for key in ("student_index", "teacher_index", "labels", "rollout_log_probs")},
        )
        loss.backward()
        return loss.detach()


SIDES: dict[str, Callable[[Case], Any]] = {"plain": Plain, "ours": Ours}


def prepared(case: Case) -> tuple[torch.nn.Module, torch.nn.Module, dict[str, Any]]:
    """Student, teacher, which differ, and the micro-batch; the same whenever they are made."""
    student, teacher = (engines.random_model(case.shape, seed) for seed in (0, 1))
    dtype = getattr(torch, case.dtype)
    batch = engines.collate(engines.make_rows(case.rows))
    for view in ("student", "teacher"):
        batch[view] = {key: value.to(case.device) for key, value in batch[view].items()}
    batch = {key: value if isinstance(value, dict) else value.to(case.device) for key, value in batch.items()}
    return (
        student.to(case.device, dtype).train(),
        teacher.to(case.device, dtype).eval().requires_grad_(False),
        batch,
    )


def measure(case: Case, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Peak bytes and seconds of both sides."""
    say("peak memory of a model with head and loss")
    settings = asdict(case)
    peaks = {side: in_child("benchmarks.model", {"side": side, **settings})["bytes"] for side in SIDES}
    say("time of a model with head and loss")
    runs = {name: side(case) for name, side in SIDES.items()}

    def once(name: str) -> None:
        runs[name].student.zero_grad(set_to_none=True)
        runs[name]()

    seconds = alternate({name: lambda name=name: once(name) for name in runs}, repeats, case.device)  # type: ignore[misc]
    return {"bytes": peaks, "seconds": seconds, "inputs": settings}


def measure_peak(settings: dict[str, Any]) -> dict[str, int]:
    """Of one side, above weights and inputs."""
    case = Case.of({key: value for key, value in settings.items() if key != "side"})
    run = SIDES[settings["side"]](case)
    with peak_memory(case.device) as found:
        run()
    return {"bytes": found.bytes}


if __name__ == "__main__":
    print(json.dumps(measure_peak(json.loads(sys.argv[1]))))
