"""A run is killed in one way after another and started again each time: what it says, how soon, and that nothing is lost.

In the end weights, optimizer, teacher, selection and place in the data are those of a run that was left alone, bit for bit.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.distributed.tensor import DTensor

from opd_recipes.checkpoints import DATA_FILE, SHARDS, TEACHER_FOLDER, last_step, rank_files, read_state
from opd_recipes.curve import read_metrics
from opd_recipes.runs import Process
from opd_recipes.trainer import SELECTOR_FILE
from tests.e2e.conftest import WHOLE_STATE
from tests.e2e.runs import command

pytestmark = pytest.mark.e2e

#: Seconds from a fault to the end of the run.
SOON = 45
START_S = 300
#: Ray's own, which notice the end of their node within about a minute.
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
CONTENTS = ("model", "optimizer", "extra")


Moment = Callable[[Process], bool]
Fault = Callable[[Process], None]


def never(_: Process) -> bool:
    return False


def nothing(_: Process) -> None:
    pass


@dataclass
class Life:
    """From one start to one end."""

    folder: Path
    log: str = ""
    code: int | None = None
    seconds: float = 0.0
    steps: list[int] = field(default_factory=list)
    #: Names of its processes that were still there a little later.
    left: list[str] = field(default_factory=list)


class Story:
    """One command, its lives, and the checkpoints that each finds and leaves."""

    def __init__(self, folder: Path, data: Path):
        self.folder, self.lives = folder, dict[str, Life]()
        options = ("trainer.save_freq=1", "trainer.resume_mode=auto", "trainer.max_actor_ckpt_to_keep=2")
        self.command = command(folder, data, *WHOLE_STATE, *options, recipe="bas_opd")
        self.checkpoints = folder / "checkpoints"

    def live(self, name: str, moment: Moment = never, fault: Fault = nothing) -> Life:
        """Start; at the ``moment`` let the ``fault`` happen; wait for the end."""
        life = self.lives[name] = Life(self.folder / name.replace(" ", "_"))
        process = Process(self.command, life.folder)
        family: dict[int, psutil.Process] = {}
        happened = looked = 0.0
        try:
            while process.exit_code is None:
                waited = time.time() - (happened or process.began)
                if waited > (SOON if happened else START_S):
                    break
                if time.time() - looked > 0.5:
                    looked, family = time.time(), family | {child.pid: child for child in descendants(process.pid)}
                if not happened and moment(process):
                    fault(process)
                    happened = time.time()
                time.sleep(0.02)
            life.seconds, life.code = time.time() - (happened or time.time()), process.exit_code
        finally:
            process.end()
        own = [child for child in family.values() if not title_of(child).startswith(AGENTS)]
        life.left = [title_of(child) for child in psutil.wait_procs(own, timeout=30)[1]]
        life.log = process.log.read_text(errors="replace")
        life.steps = [step for step, _ in read_metrics(process.metrics)]
        assert happened or fault is nothing, life.log[-4000:]
        return life


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def title_of(process: psutil.Process) -> str:
    """Empty where it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def of_kind(process: Process, title: str) -> psutil.Process | None:
    """The process of the run with these words in its title: class or name of an actor, and what it does at present."""
    return next((child for child in descendants(process.pid) if re.search(rf"^ray::.*{title}", title_of(child))), None)


SERVER, AGENT_LOOP, ACTOR = "EntropyServer", "AgentLoopWorker", "WorkerDict"


def kill(title: str) -> Fault:
    def fault(process: Process) -> None:
        found = of_kind(process, title)
        assert found, f"no {title}"
        found.kill()

    return fault


def kill_while_it_waits_for_an_answer(process: Process) -> None:
    """The agent loop, with all of its prompts under way: nobody is left who could report one of them."""
    server = of_kind(process, SERVER)
    assert server, "no server"
    server.suspend()
    time.sleep(2)
    kill(AGENT_LOOP)(process)


class Spoiled:
    """The third checkpoint goes to a folder in which the place of the teacher's shard is taken; the student's comes first."""

    def __init__(self, story: Story):
        self.link, self.folder = story.checkpoints / "global_step_3", story.folder / "spoiled"
        (self.folder / "actor" / TEACHER_FOLDER).mkdir(parents=True)
        self.shard = self.folder / "actor" / TEACHER_FOLDER / SHARDS["model"].format(world=1, rank=0)
        self.link.symlink_to(self.folder)

    def is_being_written(self, _: Process) -> bool:
        return (self.folder / "actor" / SHARDS["extra"].format(world=1, rank=0)).exists()

    def remove(self) -> None:
        self.link.unlink()
        shutil.rmtree(self.folder)


def kill_the_command(process: Process) -> None:
    time.sleep(2)
    psutil.Process(process.pid).kill()


@pytest.fixture(scope="module")
def story(folder, data):
    told = Story(folder / "story", data)
    told.live("server", lambda _: last_step(told.checkpoints) == 1, kill(SERVER))
    told.live("actor", lambda process: bool(of_kind(process, "actor_rollout_update_actor")), kill(ACTOR))
    told.live(
        "agent loop", lambda process: bool(list(read_metrics(process.metrics))), kill_while_it_waits_for_an_answer
    )
    spoiled = Spoiled(told)
    os.mkfifo(spoiled.shard)  # which nobody reads: the checkpoint stays half written
    told.live("driver", spoiled.is_being_written, kill_the_command)
    spoiled.remove()
    spoiled = Spoiled(told)
    spoiled.shard.symlink_to("/dev/full")
    told.live("disk")
    spoiled.remove()
    told.live("last")
    return told


FAULTS = {
    "server": ("processes of the run have died: vllm_server", "goes on from the checkpoint of step 1"),
    "actor": ("processes of the run have died: ", "goes on from the checkpoint of step 1"),
    "agent loop": ("processes of the run have died: agent_loop_worker_0", "goes on from the checkpoint of step 2"),
    "driver": (),
    "disk": ("the checkpoint of step 3 could not be written", "goes on from the checkpoint of step 2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_it_ends_soon_says_why_and_what_to_do_and_leaves_nothing_running(story, name):
    life = story.lives[name]
    assert life.code not in (None, 0) and life.seconds < SOON and life.left == []
    end = life.log.splitlines()[-5:]
    for words in FAULTS[name]:
        assert any(words in line for line in end), "\n".join(end)


def test_each_start_goes_on_after_the_last_checkpoint(story):
    """By what they log at the end of a step, after checkpoint and weight sync."""
    steps = {name: life.steps for name, life in story.lives.items()}
    assert steps == {"server": [], "actor": [], "agent loop": [2], "driver": [], "disk": [], "last": [3]}
    assert story.lives["last"].code == 0
    assert sorted(folder.name for folder in story.checkpoints.glob("global_step_*")) == [
        "global_step_2",
        "global_step_3",
    ]


def test_it_ends_where_a_run_that_was_left_alone_ends(story, bas_opd):
    """Bit for bit: the shards of student, optimizer and teacher, the rate, selection and place in the data."""
    ours, theirs = (home / "global_step_3" for home in (story.checkpoints, bas_opd.folder / "checkpoints"))
    *tensors, state = rank_files(ours / "actor", 1, 0, CONTENTS)
    for file in [*tensors, ours / SELECTOR_FILE, ours / DATA_FILE]:
        mine, other = (torch.load(path, weights_only=False) for path in (file, theirs / file.relative_to(ours)))
        for saved in (mine, other):
            saved.pop("rng", None)  # each run begins with its own, and nothing draws from it
        assert differences(mine, other) == [], file.name
    assert read_state(state) == read_state(theirs / state.relative_to(ours))


def test_random_states_go_from_life_to_life(story):
    """Nothing draws from them, so that those of the last life are those of the one that wrote the checkpoint before."""
    files = (story.checkpoints / f"global_step_{step}" / "actor" / SHARDS["extra"] for step in (2, 3))
    before, after = (torch.load(str(file).format(world=1, rank=0), weights_only=False)["rng"] for file in files)
    assert before.keys() == after.keys() >= {"cpu", "numpy", "random"} and differences(before, after) == []


def differences(mine, other, place: str = "") -> list[str]:
    """Where two nested things differ."""
    if isinstance(mine, DTensor):
        return differences(mine.to_local(), other.to_local(), place)
    if isinstance(mine, torch.Tensor):
        return [] if torch.equal(mine, other) else [place]
    if isinstance(mine, dict):
        found = [] if mine.keys() == other.keys() else [place]
        return found + sum(
            (differences(mine[key], other[key], f"{place}.{key}") for key in mine.keys() & other.keys()), []
        )
    if isinstance(mine, list | tuple):
        found = [] if len(mine) == len(other) else [place]
        return found + sum(
            (differences(*pair, f"{place}.{i}") for i, pair in enumerate(zip(mine, other, strict=False))), []
        )
    return [] if np.array_equal(mine, other) else [place]
