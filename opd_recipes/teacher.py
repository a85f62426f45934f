"""Teacher rules: how the teacher's weights follow the student's.

A rule is called once for each parameter after each *finite* optimizer step, ``rule(teacher, student, step, ...)``, on
the local shards of both (fp32, same shape), and changes ``teacher`` in place. ``step`` counts finite steps from 1.
Every parameter follows the rule, the vision tower's included; buffers are left alone.

Two rules say more than how weights move: ``trust_region`` mixes the live student into the teacher's logits, and
``external`` starts from another checkpoint. :class:`Teacher` has both as plain fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from opd_recipes.registry import RecipeError, Registry

TEACHERS = Registry("opd.teacher")


@dataclass(frozen=True)
class Teacher:
    """The teacher of a recipe.

    Args:
        rule: Moves the teacher's weights, see above.
        live_share: Share of the live student in the teacher's logits, in [0, 1); 0: the teacher's weights alone.
        path: Checkpoint that the teacher starts from; None: the student's.
    """

    rule: Callable
    live_share: float = 0.0
    path: str | None = None

    @classmethod
    def load(cls, spec: Any) -> Teacher:
        """Build from the ``opd.teacher`` section.

        Raises:
            RecipeError: An unknown rule, or an option that is missing or out of its range.
        """
        rule = TEACHERS.build(spec)
        options = rule.keywords
        rate, every, path = options.get("rate"), options.get("every"), options.get("path")
        mixes = rule.func is trust_region
        if rate is not None and not (0 < rate < 1 if mixes else 0 < rate <= 1):
            interval = "(0, 1): at 1 it would be the student itself" if mixes else "(0, 1]"
            raise RecipeError(f"opd.teacher.rate: the student's share must be in {interval}, got {rate}")
        if every is not None and every < 1:
            raise RecipeError(f"opd.teacher.every: must be at least 1 step, got {every}")
        return cls(rule, live_share=rate if mixes and rate is not None else 0.0, path=path)


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


@TEACHERS.register("current")
def current(teacher: torch.Tensor, student: torch.Tensor, step: int) -> None:
    """The live student, only with another view. Collapses in Vision-OPD's ablation: a control, not a method."""
    teacher.copy_(student)


@TEACHERS.register("trust_region")
def trust_region(teacher: torch.Tensor, student: torch.Tensor, step: int, *, rate: float) -> None:
    """The initial checkpoint; the teacher's logits are (1 - rate) of it and ``rate`` of the live student on the same view."""


@TEACHERS.register("external")
def external(teacher: torch.Tensor, student: torch.Tensor, step: int, *, path: str) -> None:
    """Another checkpoint with the same tokenizer, never changed. It may have other sizes than the student."""


def stays(rule: Callable) -> bool:
    """Whether the rule never changes the teacher's weights."""
    return getattr(rule, "func", rule) in (frozen, trust_region, external)


def follow(rule: Callable, teacher: nn.Module, student: nn.Module, step: int) -> None:
    """Apply ``rule`` to every parameter, paired by name.

    Raises:
        ValueError: The two models have different parameters.
    """
    if stays(rule):
        return  # an external teacher's parameters need not pair with the student's
    for model in (teacher, student):
        reshard(model)
    theirs, ours = ({name: local(p) for name, p in model.named_parameters()} for model in (teacher, student))
    move(rule, theirs, ours, step)


@torch.no_grad()
def move(rule: Callable, theirs: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor], step: int) -> None:
    """Apply ``rule`` to the teacher's shards of some parameters, paired with the student's by name.

    Raises:
        ValueError: The names differ.
    """
    if theirs.keys() != ours.keys():
        odd = sorted(theirs.keys() ^ ours.keys())
        raise ValueError(f"teacher and student differ in {len(odd)} parameters, e.g. {odd[:3]}")
    for name, target in theirs.items():
        rule(target, ours[name].to(device=target.device, dtype=target.dtype), step)


def reshard(model: nn.Module) -> None:
    """Drop gathered weights, which are copies: after a forward FSDP2 may have some in place (reshard_after_forward=false)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter; the whole of it when it is not sharded."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
