"""Every place where this package reaches inside verl, with the behaviour of verl that makes it needed.

Tested with the release in :data:`TESTED_VERL`. Moving to another release means reading this file and running the tests in
``tests/unit/test_verl_compat.py``, each of which fails when its workaround has become unneeded or has stopped working.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

TESTED_VERL = "0.9.1"

#: Key of our engine in verl's EngineRegistry. verl's own engines hold the keys cuda and npu for every model, so ours
#: has a key of its own and is asked for by verl's override, the environment variable VERL_ENGINE_DEVICE.
ENGINE_DEVICE = "opd"


def check_version() -> None:
    """Warn when another release of verl is installed than the one this package was tested with."""
    import verl

    if verl.__version__ != TESTED_VERL:
        warnings.warn(
            f"opd_recipes was tested with verl {TESTED_VERL}, but {verl.__version__} is installed: run "
            "pytest tests/unit/test_verl_compat.py before trusting a run",
            stacklevel=2,
        )


@contextmanager
def engine_device() -> Iterator[None]:
    """Let verl's EngineRegistry build our engine; other engines of the process (critic, reference) stay verl's."""
    before = os.environ.get("VERL_ENGINE_DEVICE")
    os.environ["VERL_ENGINE_DEVICE"] = ENGINE_DEVICE
    try:
        yield
    finally:
        if before is None:
            del os.environ["VERL_ENGINE_DEVICE"]
        else:
            os.environ["VERL_ENGINE_DEVICE"] = before


def undecorated(ray_actor: Any) -> Any:
    """The class behind ``@ray.remote``: verl publishes some of its workers only as decorated, which cannot be derived."""
    return ray_actor.__ray_metadata__.modified_class


def row_major_positions(positions: torch.Tensor) -> torch.Tensor:
    """Turn verl's nested mRoPE positions into one nested tensor with a row of (length, planes) for each sequence.

    verl stores (planes, length) for each sequence. The ragged dimension is then the last one, which torch's jagged layout
    cannot infer: it is lost when the tensor is pickled, and where all sequences of a batch have the same length the tensor
    is built ragged over the planes. verl's ``maybe_fix_3d_position_ids`` relabels both cases alike, which crashes the
    update and silently shifts the log-probs in the second one. With the length first there is nothing to infer.

    Args:
        positions: As it arrives at a worker: nested or dense (B, planes, L), before verl has relabelled it.

    Returns:
        Nested (B, ragged length, planes); positions with one plane, (B, length), come back as they are.
    """
    if positions.dim() != 3:
        return positions
    if not positions.is_nested:
        rows = list(positions)
    else:
        values, offsets = positions.values(), positions.offsets()
        by_planes = (
            len(offsets) > 2 and values.shape[0] == offsets[-1]
        )  # also where the length is planes * B: then both fit
        if (
            values.shape[-1] == offsets[-1] and not by_planes
        ):  # (planes, all lengths): well formed, whatever the label says
            rows = list(values.split(offsets.diff().tolist(), dim=-1))
        else:  # (B * planes, length): equal lengths, ragged over the planes
            rows = list(values.split(offsets.diff().tolist(), dim=0))
    return torch.nested.as_nested_tensor([row.transpose(0, 1).contiguous() for row in rows], layout=torch.jagged)


def plane_major_positions(positions: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`row_major_positions`, in the one form that verl's model inputs are right for."""
    if positions.dim() != 3:
        return positions
    return torch.nested.nested_tensor_from_jagged(
        positions.values().transpose(0, 1).contiguous(), positions.offsets(), jagged_dim=2
    )


def tower_of_tensors(model: Any) -> None:
    """Let the tower of Qwen2-VL and Qwen2.5-VL return the features alone.

    A micro-batch without an image (verl's padding rows are text) runs the tower on a blank one, and verl's forward of these
    two families takes its answer for a tensor; since transformers 5 it is an object that has no mean.
    """
    if model.config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        model.model.visual.register_forward_hook(lambda tower, args, output: getattr(output, "pooler_output", output))


def start_process_group() -> None:
    """Start gloo before verl does: on CPU verl would ask for ``cpu:gloo,cpu:gloo``, which torch refuses."""
    from verl.utils.device import get_device_name

    if get_device_name() == "cpu" and not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend="cpu:gloo")


@contextmanager
def warnings_only(logger: logging.Logger) -> Iterator[None]:
    """Without what a logger says below a warning: verl's separate_async trainer passes ``flush=True`` to one such message,
    which ``logging`` does not know, so without hybrid replicas it would not start."""
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


class LiteralMode:
    """A trainer's ``trainer_mode``: verl compares it to the literals of its own modes, and looks for the mode's settings
    (``trainer.v1.<mode>``) under it, whatever name the trainer was registered by.

    Args:
        mode: verl's own, ``sync``, ``colocate_async`` or ``separate_async``.
    """

    def __init__(self, mode: str):
        self.mode = mode

    def __get__(self, trainer: Any, owner: type | None = None) -> str:
        return self.mode

    def __set__(self, trainer: Any, value: str) -> None:
        pass
