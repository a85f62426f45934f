"""Checkpoints on disk: which one a run continues from, whether it is whole, and which ones may go.

verl's trainer starts from the beginning where the last checkpoint is not where it looks, reads data anew where ``data.pt`` is
missing, and loads a shard with damaged numbers as it is. None of that happens here: such a run ends, and says what to do.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from opd_recipes.registry import RecipeError

#: Inside an actor checkpoint: the teacher's shards; each rank's steps and what a resumed run must agree in.
TEACHER_FOLDER = "teacher"
STATE_FILE = "opd_state_world_size_{world}_rank_{rank}.json"
#: verl's files of a rank, by the name of each part in ``checkpoint.load_contents``.
SHARDS = {
    "model": "model_world_size_{world}_rank_{rank}.pt",
    "optimizer": "optim_world_size_{world}_rank_{rank}.pt",
    "extra": "extra_state_world_size_{world}_rank_{rank}.pt",
}
#: verl's: the step of the last whole checkpoint, written after everything else; the place in the data; the number of ranks.
TRACKER = "latest_checkpointed_iteration.txt"
DATA_FILE = "data.pt"
WORLD_FILE = "fsdp_config.json"
STEP_FOLDER = "global_step_"


def saved_world(actor: Path) -> int:
    """The number of ranks that wrote an ``actor`` (or ``teacher``) folder."""
    return json.loads((actor / WORLD_FILE).read_text())["world_size"]


def rank_files(actor: Path, world: int, rank: int, contents: Sequence[str]) -> list[Path]:
    """What a rank reads of an ``actor`` folder, tensors first, its state last.

    Args:
        contents: ``checkpoint.load_contents``.
    """
    names = [SHARDS[part] for part in SHARDS if part in contents]
    names += [f"{TEACHER_FOLDER}/{SHARDS['model']}", STATE_FILE]
    return [actor / name.format(world=world, rank=rank) for name in names]


def check_resume(config: Any) -> None:
    """Refuse a checkpoint that the run would continue from, but that is not whole, before anything is loaded.

    Contents are not compared here (:func:`check_contents`), but a file that ends too early is found.

    Raises:
        RecipeError: No checkpoint where the tracker says, a file of it that is missing or cut short; what is left to do.
    """
    trainer = config.trainer
    folder = resume_folder(trainer)
    if folder is None:
        return
    check_origin(folder / "actor")
    contents = config.actor_rollout_ref.actor.checkpoint.load_contents
    if faults := find_faults(folder, contents, everywhere=trainer.nnodes == 1):
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        whole = [step for step in steps(folder.parent) if not find_faults(step_folder(folder.parent, step), contents)]
        earlier = step_folder(folder.parent, max(whole)) if whole else None
        raise RecipeError(
            f"{folder} is not whole: {'; '.join(faults[:3])}{more}. "
            + (
                f"The last one that is: trainer.resume_mode=resume_path trainer.resume_from_path={earlier}"
                if earlier
                else "There is no other; to start anew: trainer.resume_mode=disable"
            )
        )


def resume_folder(trainer: Any) -> Path | None:
    """The ``global_step_N`` from which verl's trainer will continue; None: it starts from the beginning.

    Raises:
        RecipeError: It would start from the beginning although there are checkpoints, or cannot read which is the last.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        return _named_folder(trainer.resume_from_path)
    if "://" in trainer.default_local_dir:
        return None
    home = Path(trainer.default_local_dir).absolute()  # as verl: no ~
    tracker = home / TRACKER
    anew = "To start from the beginning: trainer.resume_mode=disable"
    there = ", ".join(str(step) for step in steps(home)) or "none"
    if not tracker.exists():
        if any((step_folder(home, step) / DATA_FILE).exists() for step in steps(home)):
            raise RecipeError(
                f"trainer.resume_mode=auto: {home} has checkpoints (of the steps {there}), but no {TRACKER}, which names the "
                f"last one, so the run would start from the beginning over them. Write the step into that file. {anew}"
            )
        return None
    text = tracker.read_text().strip()
    if not text.isdigit() or not step_folder(home, int(text)).is_dir():
        raise RecipeError(
            f"trainer.resume_mode=auto: {tracker} says {text!r}, and there is no such checkpoint in its folder (there are: "
            f"{there}). Write the step of one of them into the file. {anew}"
        )
    return step_folder(home, int(text))


def how_to_continue(config: Any) -> str:
    """A sentence for the end of a run that has died: what is kept of it."""
    trainer = config.trainer
    if trainer.save_freq <= 0:
        return "There is no checkpoint (trainer.save_freq): the run has to start anew"
    home = Path(trainer.default_local_dir).absolute()
    step = last_step(home)
    if not step:
        return (
            f"No checkpoint was seen in {trainer.default_local_dir}; the same command starts anew, or from the last one"
        )
    if trainer.resume_mode != "auto":
        return (
            f"The last checkpoint is {step_folder(home, step)}; with trainer.resume_mode=auto the same command goes "
            "on from there"
        )
    return f"The same command goes on from the checkpoint of step {step}"


def _named_folder(path: Any) -> Path:
    if not isinstance(path, str) or not Path(path).name.removeprefix(STEP_FOLDER).isdigit() or path.endswith("/"):
        raise RecipeError(
            f"trainer.resume_from_path={path}: must be the path of a {STEP_FOLDER}N folder, without a slash at its end"
        )
    if not os.path.isdir(path):
        raise RecipeError(f"trainer.resume_from_path={path}: there is no such folder")
    return Path(path).absolute()


def check_origin(actor: Path) -> None:
    """Refuse a checkpoint of another trainer.

    Raises:
        RecipeError: It has no teacher.
    """
    if actor.is_dir() and not (actor / TEACHER_FOLDER).is_dir():
        raise RecipeError(
            f"{actor} has no '{TEACHER_FOLDER}' folder: it was not written by this trainer. Resuming from it would restart the "
            "teacher from the base model. To start a new run from these weights, merge them into a Hugging Face folder "
            "(opd_recipes export) and set actor_rollout_ref.model.path and trainer.resume_mode=disable"
        )


def find_faults(folder: Path, contents: Sequence[str], everywhere: bool = True) -> list[str]:
    """What is wrong with a ``global_step_N`` by the names and ends of its files, each in a few words.

    Args:
        everywhere: All ranks' files must be here; else those that are not may be on other nodes' disks.
    """
    actor = folder / "actor"
    if not _is_whole(actor / WORLD_FILE):
        return [f"actor/{WORLD_FILE} is missing or cut short"]
    world = saved_world(actor)
    faults = [] if _is_whole(folder / DATA_FILE) else [f"{DATA_FILE} is missing or cut short"]
    for rank in range(world):
        for file in rank_files(actor, world, rank, contents):
            name = file.relative_to(folder)
            if not file.exists():
                faults += [f"{name} is missing"] if everywhere else []
            elif not _is_whole(file):
                faults.append(f"{name} is cut short")
    return faults


def _is_whole(file: Path) -> bool:
    """By its end: torch writes zip archives, which end with their list of contents."""
    if file.suffix == ".json":
        try:
            return isinstance(json.loads(file.read_text()), dict)
        except (OSError, ValueError):
            return False
    return zipfile.is_zipfile(file)


def check_contents(files: Sequence[Path]) -> None:
    """Read torch's files and compare them with their checksums, which torch writes and does not look at.

    Raises:
        RecipeError: One is missing, is no such file, or differs.
    """
    for file in files:
        try:
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
        except (OSError, zipfile.BadZipFile) as error:
            raise RecipeError(f"{file} cannot be read as a file of tensors: {error}; {_OTHER}") from error
        if damaged:
            raise RecipeError(f"{file} is damaged: {damaged} in it does not have its checksum; {_OTHER}")


def read_state(file: Path) -> dict[str, Any]:
    """The last of :func:`rank_files`.

    Raises:
        RecipeError: It is missing or cut short.
    """
    if not _is_whole(file):
        raise RecipeError(f"{file} is missing or cut short; {_OTHER}")
    return json.loads(file.read_text())


_OTHER = "take an earlier checkpoint (trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_N)"


def begin(home: Path, step: int) -> None:
    """Before a checkpoint is written: remove what an interrupted or abandoned run has left in its place."""
    shutil.rmtree(step_folder(home, step), ignore_errors=True)


def prune(home: Path, keep: int | None, step: int) -> None:
    """After the checkpoint of ``step`` is whole: remove all but the last ``keep`` up to it, those of earlier starts as well.

    verl's own limit counts from the start of the process, and leaves the rest of what it removes. Later steps stay: they are
    of a run that this one has branched off from.
    """
    known = [known for known in steps(home) if known <= step]
    for old in known[: -keep or None] if keep else []:
        shutil.rmtree(step_folder(home, old), ignore_errors=True)


def steps(home: Path) -> list[int]:
    """The steps of which there is a folder, in their order."""
    return sorted(_steps(home))


def _steps(home: Path) -> Iterator[int]:
    for folder in home.glob(f"{STEP_FOLDER}*"):
        number = folder.name.removeprefix(STEP_FOLDER)
        if number.isdigit() and folder.is_dir():
            yield int(number)


def last_step(home: Path) -> int:
    """The step of the last whole checkpoint by verl's tracker; 0 before the first."""
    tracker = home / TRACKER
    text = tracker.read_text().strip() if tracker.exists() else ""
    return int(text) if text.isdigit() else 0


def step_folder(home: Path, step: int) -> Path:
    return home / f"{STEP_FOLDER}{step}"
