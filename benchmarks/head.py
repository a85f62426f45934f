"""Head and loss alone, forward and backward, from the same final hidden states: ours and :mod:`benchmarks.plain`'s.

``python -m benchmarks.head SETTINGS`` runs one side once and prints its peak memory; :mod:`benchmarks.measure` calls it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import plain
from benchmarks.measure import alternate, in_child, peak_memory
from opd_recipes.divergence import Divergence
from opd_recipes.loss import Normaliser, Objective, distill_loss
from opd_recipes.topk_head import HiddenRequest, ScoreRequest, StreamedHead, TeacherStates


@dataclass(frozen=True)
class Size:
    """One sequence: ``prompt`` + ``response`` tokens, ``hidden`` numbers each, ``vocabulary`` words, ``topk`` ids kept."""

    vocabulary: int
    prompt: int
    response: int
    hidden: int
    topk: int = 100
    chunk: int = 256
    dtype: str = "float32"
    device: str = "cpu"


def inputs(size: Size) -> dict[str, Any]:
    """Random hidden states and heads, the same for both sides; logits have a spread of about 3."""
    generator = torch.Generator().manual_seed(0)
    length, dtype = size.prompt + size.response, getattr(torch, size.dtype)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(size.device, dtype)

    weight = normal(size.vocabulary, size.hidden, scale=3 * size.hidden**-0.5)
    hidden = normal(1, length, size.hidden)
    labels = torch.randint(size.vocabulary, (size.response,), generator=generator).to(size.device)
    return {
        "hidden": hidden.requires_grad_(),
        "weight": torch.nn.Parameter(weight),
        "teacher_hidden": hidden.detach() + normal(1, length, size.hidden, scale=0.3),
        "teacher_weight": weight.detach().clone(),
        "index": torch.arange(size.prompt - 1, length - 1, device=size.device),
        "labels": labels,
        "rollout_log_probs": torch.full((size.response,), -8.0, device=size.device),
    }


def run_ours(size: Size, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """As the engine does it: the teacher leaves hidden states, the student's head compares; the recipe's own loss."""
    holder = torch.nn.Linear(1, 1, bias=False, device="meta")
    holder.weight = given["weight"]
    head = StreamedHead(holder)
    with torch.no_grad():
        seen = HiddenRequest(given["index"])(given["teacher_hidden"], given["teacher_weight"])
    request = ScoreRequest(
        given["index"],
        given["labels"],
        chunk=size.chunk,
        teacher=TeacherStates(seen["hidden"], given["teacher_weight"]),
        divergence=Divergence("jsd", "student", "bucket", size.topk),
    )
    with head.serving(request):
        answer = head(given["hidden"])
    loss, _ = distill_loss(
        answer,
        objective=Objective(),
        mask=torch.ones_like(given["labels"]),
        lengths=torch.tensor([size.response], device=size.device),
        total=Normaliser(tokens=size.response, responses=1, world=1),
        rollout_log_probs=given["rollout_log_probs"],
    )
    loss.backward()
    return loss.detach()


def run_plain(size: Size, given: dict[str, torch.Tensor]) -> torch.Tensor:
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight", "labels", "rollout_log_probs")
    index = given["index"]
    loss = plain.head(**{name: given[name] for name in names}, student_index=index, teacher_index=index, topk=size.topk)
    loss.backward()
    return loss.detach()


SIDES: dict[str, Callable[[Size, dict[str, torch.Tensor]], torch.Tensor]] = {"plain": run_plain, "ours": run_ours}


def fresh(given: dict[str, torch.Tensor]) -> None:
    given["hidden"].grad = given["weight"].grad = None


def seconds(size: Size, repeats: int, sides: tuple[str, ...] = ("plain", "ours")) -> dict[str, list[float]]:
    given = inputs(size)

    def once(side: str) -> None:
        fresh(given)
        SIDES[side](size, given)

    return alternate({side: lambda side=side: once(side) for side in sides}, repeats, size.device)  # type: ignore[misc]


def peak(side: str, size: Size) -> int:
    """Peak bytes of one side in a process of its own: head, loss and their gradients, without inputs and weights."""
    return in_child("benchmarks.head", {"side": side, **asdict(size)})["bytes"]


def measure_peak(settings: dict[str, Any]) -> dict[str, int]:
    side, size = settings["side"], Size(**{key: value for key, value in settings.items() if key != "side"})
    given = inputs(size)
    with peak_memory(size.device) as found:
        SIDES[side](size, given)
    return {"bytes": found.bytes}


if __name__ == "__main__":
    print(json.dumps(measure_peak(json.loads(sys.argv[1]))))
