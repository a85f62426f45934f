"""Teacher rules: how the teacher's weights follow the student's.

A rule is called once for each parameter after each *finite* optimizer step, ``rule(teacher, student, step, ...)``, on
the local shards of both (fp32, same shape), and changes ``teacher`` in place. ``step`` counts finite steps from 1.
Every parameter follows the rule, the vision tower's included; buffers are left alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from opd_recipes.registry import Registry

TEACHERS = Registry("opd.teacher")


@TEACHERS.register("ema")
def ema(teacher: torch.Tensor, student: torch.Tensor, step: int, *, rate: float = 0.05) -> None:
    """teacher <- (1 - rate) teacher + rate student. ``rate`` is the student's share: 0.05 is slow, 0.95 is fast."""
    teacher.lerp_(student, rate)


@TEACHERS.register("frozen")
def frozen(teacher: torch.Tensor, student: torch.Tensor, step: int) -> None:
    """The initial checkpoint, never changed."""


@TEACHERS.register("progressive")
def progressive(teacher: torch.Tensor, student: torch.Tensor, step: int, *, every: int) -> None:
    """A hard copy of the student at every ``every``-th step."""
    if step % every == 0:
        teacher.copy_(student)


@torch.no_grad()
def follow(rule: Callable, teacher: nn.Module, student: nn.Module, step: int) -> None:
    """Apply ``rule`` to every parameter, paired by name.

    Raises:
        ValueError: The two models have different parameters.
    """
    for model in (teacher, student):
        for module in model.modules():
            # After a forward FSDP2 may have the gathered weights in place (reshard_after_forward=false): those are copies.
            if isinstance(module, FSDPModule):
                module.reshard()
    theirs, ours = dict(teacher.named_parameters()), dict(student.named_parameters())
    if theirs.keys() != ours.keys():
        odd = sorted(theirs.keys() ^ ours.keys())
        raise ValueError(f"teacher and student differ in {len(odd)} parameters, e.g. {odd[:3]}")
    for name, parameter in theirs.items():
        target, source = local(parameter), local(ours[name])
        rule(target, source.to(device=target.device, dtype=target.dtype), step)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter; the whole of it when it is not sharded."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
