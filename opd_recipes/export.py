"""``opd_recipes export CHECKPOINT --to FOLDER``: the student or the teacher of a checkpoint as a Hugging Face folder.

verl's merger picks the model class and puts the shards of a parameter together; what is different here: shards are loaded as
tensors only (``weights_only``), a checkpoint that lacks a part is refused by name, weights may stay in fp32, and the folder is
there with everything or not at all.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from opd_recipes.registry import RecipeError

#: The models of a checkpoint; the teacher's folder lies in the student's under this name (worker.TEACHER_FOLDER).
STUDENT, TEACHER = "student", "teacher"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
#: What verl writes beside the shards: the model's configuration, tokenizer, processor and chat template.
MODEL_FOLDER = "huggingface"
SHARD = "model_world_size_{world}_rank_{rank}.pt"
#: Written anew with the weights; every other file of :data:`MODEL_FOLDER` is copied as it is.
WRITTEN = {"config.json", "model.safetensors.index.json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="a global_step_N folder of a run, or its actor folder")
    parser.add_argument("--to", type=Path, required=True, help="the folder to write; must not exist, or be empty")
    parser.add_argument("--which", choices=[STUDENT, TEACHER], default=STUDENT, help="which model (default: student)")
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="bfloat16", help="of the weights (default: bfloat16, as vLLM ran them)"
    )


def run(args: argparse.Namespace) -> int:
    try:
        export(args.checkpoint, args.to, which=args.which, dtype=args.dtype)
    except (RecipeError, OSError) as error:
        print(f"opd_recipes: {error}", file=sys.stderr)
        return 1
    print(f"opd_recipes: the {args.which} of {args.checkpoint} is in {args.to}")
    return 0


def export(checkpoint: Path, target: Path, *, which: str = STUDENT, dtype: str = "bfloat16") -> None:
    """Write a model of an FSDP2 checkpoint as a folder that transformers and vLLM load.

    Args:
        checkpoint: ``global_step_N`` as the trainer writes it, or the folder in it that has the shards.
        target: The folder to write; it appears when it is complete.
        which: ``student``, or ``teacher``: the moving average beside it.
        dtype: ``bfloat16`` or ``float32``, in which the shards are.

    Raises:
        RecipeError: The target is not empty; or the checkpoint lacks a shard or the teacher, or has what is not a model's.
    """
    target = target.resolve()
    _check_target(target)
    source = find_model(checkpoint, which)
    shards = find_shards(source)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    try:
        merger = _merger(source, partial)
        _save(merger, source / MODEL_FOLDER, merge_shards(shards, DTYPES[dtype], merger), partial)
        os.replace(partial, target)  # an empty target is replaced as well
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_target(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RecipeError(f"--to {target}: exists and is not empty; name another folder, or remove it")


def find_model(checkpoint: Path, which: str) -> Path:
    """The folder with the shards of ``which`` model.

    Raises:
        RecipeError: There is none.
    """
    student = checkpoint / "actor" if (checkpoint / "actor").is_dir() else checkpoint
    source = student if which == STUDENT else student / TEACHER
    if (source / "fsdp_config.json").is_file():
        return source
    if (student / "fsdp_config.json").is_file():
        raise RecipeError(f"{student} has no {TEACHER} folder: the run had no teacher; use --which student")
    raise RecipeError(f"{checkpoint} is no checkpoint of FSDP: neither it nor its actor folder has a fsdp_config.json")


def find_shards(source: Path) -> list[Path]:
    """The shard of each rank, in their order.

    Raises:
        RecipeError: Some are missing, named.
    """
    world = json.loads((source / "fsdp_config.json").read_text())["world_size"]
    shards = [source / SHARD.format(world=world, rank=rank) for rank in range(world)]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise RecipeError(
            f"{source} lacks {len(missing)} of {world} shards: {shown}. Where nodes saved to disks of their own, "
            "bring all ranks' files into this folder; else the checkpoint is incomplete: take an earlier one"
        )
    if not (source / MODEL_FOLDER / "config.json").is_file():
        raise RecipeError(
            f"{source / MODEL_FOLDER} has no config.json: the checkpoint is incomplete; take an earlier one"
        )
    return shards


def load_shard(path: Path) -> dict[str, torch.Tensor]:
    """One rank's tensors, mapped from disk. Nothing but tensors is unpickled.

    Raises:
        RecipeError: The file is damaged, or has other objects in it.
    """
    import torch.distributed.tensor  # what a shard may have beside plain tensors is declared safe there

    # It warns of a mesh without processes, which is all that a mesh is here.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise RecipeError(f"{path}: cannot be read as a file of tensors: {str(error).splitlines()[0]}") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise RecipeError(f"{path}: is not a model's shard, a mapping of names to tensors")
    return dict(state)


def _merger(source: Path, folder: Path) -> Any:
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    model = str(source / MODEL_FOLDER)
    return FSDPModelMerger(
        ModelMergerConfig(
            operation="merge", backend="fsdp", local_dir=str(source), hf_model_config_path=model, target_dir=str(folder)
        )
    )


def merge_shards(paths: list[Path], dtype: torch.dtype, merger: Any) -> dict[str, torch.Tensor]:
    """The whole tensors, by parameter name; one parameter at a time is read.

    Args:
        merger: verl's, which knows how the parts of a placement go together.

    Raises:
        RecipeError: The shards do not fit one another.
    """
    shards = [load_shard(path) for path in paths]
    for path, shard in zip(paths, shards, strict=True):
        if odd := sorted(shard.keys() ^ shards[0].keys()):
            raise RecipeError(f"{path}: differs from {paths[0].name} in {len(odd)} names, e.g. {odd[0]}")
    if lora := next((name for name in shards[0] if "lora_" in name), None):
        raise RecipeError(f"{paths[0]}: has an adapter ({lora}); merge it with python -m verl.model_merger")
    return {name: _merge(name, [shard[name] for shard in shards], dtype, merger) for name in shards[0]}


def _merge(name: str, parts: list[Any], dtype: torch.dtype, merger: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor
    from verl.model_merger.fsdp_model_merger import merge_non_dtensor_shards

    source, first = merger.config.local_dir, parts[0]
    if not isinstance(first, DTensor):
        return merge_non_dtensor_shards(name, parts).to(dtype)
    mesh = first.device_mesh
    if mesh.mesh_dim_names not in (("fsdp",), ("ddp", "fsdp")):
        raise RecipeError(f"{source}: {name} is sharded over {mesh.mesh_dim_names}; only FSDP2's own sharding is known")
    # Replicas repeat the first group's shards, whose ranks are the first ones.
    local = [part.to_local().to(dtype) for part in parts[: mesh.shape[-1]]]
    whole = merger._merge_by_placement(local, first.placements[-1])
    if whole.shape != first.shape:
        raise RecipeError(f"{source}: {name} has shape {tuple(whole.shape)} after merging, not {tuple(first.shape)}")
    return whole


def _save(merger: Any, described: Path, state: dict[str, torch.Tensor], folder: Path) -> None:
    """Weights and configuration by transformers; the other files are copied from where the model is ``described``."""
    from accelerate import init_empty_weights
    from verl.model_merger.output_validation import validate_hf_model_output
    from verl.utils.transformers_compat import drop_tied_target_keys

    dtype = next(iter(state.values())).dtype
    with init_empty_weights():
        model: Any = merger.get_transformers_auto_model_class().from_config(merger.model_config, dtype=dtype)
    _check_names(described, model, state)
    model = merger.patch_model_generation_config(model)
    drop_tied_target_keys(state, model, merger.model_config)
    model.save_pretrained(folder, state_dict=state)
    for file in described.iterdir():
        if file.is_file() and file.name not in WRITTEN and file.suffix != ".safetensors":
            shutil.copy2(file, folder / file.name)
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors gives the weights to their owner alone
    validate_hf_model_output(folder)


def _check_names(described: Path, model: Any, state: Mapping[str, torch.Tensor]) -> None:
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    odd = sorted(name for name in expected.keys() | state.keys() if name not in expected or name not in state)
    if not odd:
        odd = sorted(name for name, shape in expected.items() if state[name].shape != shape)
    if odd:
        raise RecipeError(
            f"{described.parent}: its weights are not those of the {type(model).__name__} that {described.name}/config.json "
            f"describes; {len(odd)} differ, e.g. {odd[0]}"
        )
