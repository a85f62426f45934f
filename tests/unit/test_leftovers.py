"""What a killed run has left is removed, and nothing else is: real processes, in a folder that stands for /dev/shm."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from opd_recipes import leftovers
from opd_recipes.leftovers import Keeper, bound_sockets, descendants, held, processes, remove

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")

HOLD = """
import mmap, socket, sys
kept = []
for path in sys.argv[1:]:
    if path.count("-") == 4:
        kept.append(socket.socket(socket.AF_UNIX)); kept[-1].bind(path)
    else:
        with open(path, "a+b") as file:
            file.truncate(8192); kept.append(mmap.mmap(file.fileno(), 0))
print("held", flush=True)
sys.stdin.readline()
"""
UUID = "0382bc6b-1279-4a80-85b6-105cc658a86c"


class Holder:
    """A process that has files mapped, and sockets open."""

    def __init__(self, *paths: Path):
        command = [sys.executable, "-S", "-E", "-c", HOLD, *map(str, paths)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout and self.process.stdout.readline() == "held\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def shm(monkeypatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a socket's path has at most 107 characters
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def hold(shm) -> Iterator:
    holders: list[Holder] = []

    def start(*names: str) -> Holder:
        holders.append(Holder(*(shm / name for name in names)))
        return holders[-1]

    yield start
    for holder in holders:
        holder.kill()


def keeper(root: int | None = None) -> Keeper:
    """One that has looked once, for a run whose processes descend from this one."""
    made = Keeper(os.getpid() if root is None else root, watch=False)
    made.look()
    return made


def names(shm: Path) -> set[str]:
    """What is there beside the folder of records."""
    return {path.name for path in shm.iterdir() if not path.name.startswith("opd_recipes.")}


def record(shm: Path) -> Path:
    (file,) = shm.glob("opd_recipes.*/*.json")
    return file


def change(shm: Path, name: str, **values) -> None:
    """Tamper with what is recorded of a file."""
    file = record(shm)
    content = json.loads(file.read_text())
    content["files"][str(shm / name)].update(values)
    file.write_text(json.dumps(content))


KINDS = ["psm_0364c390", "sem.mp-f7hutie0", "verl_weights_00ff", "nccl-AbC12", "torch_12_34_0", UUID]


@pytest.mark.parametrize("name", KINDS)
def test_what_a_killed_process_held_is_removed_once_it_is_dead(shm, hold, name):
    holder = hold(name)
    keeper()
    assert not remove() and names(shm) == {name}
    holder.kill()
    assert names(shm) == {name}  # the leak
    removed = remove()
    assert (removed.segments, removed.sockets) == ((0, 1) if name == UUID else (1, 0))
    assert names(shm) == set() and not list(shm.glob("opd_recipes.*/*.json"))


def test_a_start_removes_it_and_says_so(shm, hold, capsys):
    holder = hold("psm_1", UUID)
    keeper()
    holder.kill()
    keeper()
    assert names(shm) == set()
    assert "removed 1 files of shared memory" in (said := capsys.readouterr().out) and "and 1 of sockets" in said


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_the_end_of_a_run_waits_for_its_processes_and_removes_what_they_leave(shm, hold, monkeypatch, seconds):
    holder = hold("psm_1", UUID)
    keeper()
    ray = SimpleNamespace(shutdown=threading.Timer(seconds, holder.process.kill).start)
    monkeypatch.setitem(sys.modules, "ray", ray)
    leftovers.end_ray()
    assert names(shm) == set()


def test_the_end_of_a_run_does_not_wait_for_ever(shm, hold, monkeypatch):
    hold("psm_1")
    keeper()
    monkeypatch.setattr(leftovers, "END_SECONDS", 0.2)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(shutdown=lambda: None))
    leftovers.end_ray()
    assert names(shm) == {"psm_1"}  # for the next start


def test_what_was_never_seen_with_this_run_stays(shm, hold):
    hold("psm_1").kill()  # before any keeper
    other = hold("psm_2")
    keeper(root=hold().process.pid)  # another run beside it
    other.kill()
    assert not remove() and names(shm) == {"psm_1", "psm_2"}


def test_what_anybody_uses_stays_until_it_is_free(shm, hold):
    maker, reader = hold("psm_1", "psm_2"), None
    keeper()
    reader = hold("psm_1")  # came after the look
    maker.kill()
    assert remove().segments == 1 and names(shm) == {"psm_1"}
    reader.kill()
    assert remove().segments == 1 and names(shm) == set()


@pytest.mark.parametrize("name", ["model.safetensors", "psm_x.bin", "opd"])
def test_files_of_other_kinds_are_not_touched(shm, hold, name):
    holder = hold(name)
    keeper()
    holder.kill()
    remove()
    assert names(shm) == {name}


def test_a_new_file_under_an_old_name_stays(shm, hold):
    holder = hold("psm_1")
    keeper()
    holder.kill()
    change(shm, "psm_1", inode=1)
    assert not remove() and names(shm) == {"psm_1"}


def test_a_number_that_another_process_has_now_is_not_the_owner(shm, hold):
    holder = hold("psm_1")
    keeper()
    holder.kill()
    mine = processes()[os.getpid()][1]
    change(shm, "psm_1", owners={str(os.getpid()): mine})
    assert not remove()
    change(shm, "psm_1", owners={str(os.getpid()): mine - 1})
    assert remove().segments == 1


@pytest.mark.parametrize("visible", [["another boot", "pid:[1]"], []])
def test_nothing_is_removed_where_its_owners_would_not_be_seen(shm, hold, visible):
    holder = hold("psm_1")
    keeper()
    holder.kill()
    file = record(shm)
    file.write_text(json.dumps({**json.loads(file.read_text()), "visible": visible}))
    assert not remove() and names(shm) == {"psm_1"} and file.exists()


def test_a_record_cannot_name_a_file_elsewhere(shm, hold, tmp_path):
    hold("psm_1").kill()
    keeper(hold("psm_2").process.pid)
    outside = tmp_path / "psm_3"
    outside.touch()
    file = record(shm)
    content = json.loads(file.read_text())
    content["files"] = {str(outside): {"inode": outside.stat().st_ino, "owners": {}}}
    file.write_text(json.dumps(content))
    assert not remove() and outside.exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"files": {}}'])
def test_a_damaged_record_is_left_alone(shm, text):
    folder = shm / f"opd_recipes.{os.geteuid()}"
    folder.mkdir()
    (folder / "1-1.json").write_text(text)
    assert not remove()


def test_the_folder_of_somebody_else_is_not_used(shm, hold, monkeypatch):
    hold("psm_1")
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    (shm / "opd_recipes.4000000").mkdir()
    made = Keeper(os.getpid(), watch=False)
    assert not remove()
    with pytest.raises(PermissionError, match="somebody else"):
        made.look()


def test_a_name_that_comes_again_is_recorded_again(shm, hold):
    first = hold("psm_1")
    made = keeper()
    first.kill()
    (shm / "psm_1").unlink()
    made.look()
    second = hold("psm_1")
    made.look()
    second.kill()
    assert remove().segments == 1


def test_what_the_kernel_shows(shm, hold):
    holder = hold("psm_1", UUID)
    table = processes()
    assert table[holder.process.pid][0] == os.getpid()
    assert holder.process.pid in descendants(os.getpid(), table) and os.getppid() not in descendants(os.getpid(), table)
    assert held(holder.process.pid, bound_sockets()) == {str(shm / "psm_1"), str(shm / UUID)}
    holder.kill()
    assert holder.process.pid not in processes()
    with socket.socket(socket.AF_UNIX) as unnamed:
        assert unnamed.fileno() and str(shm / UUID) not in bound_sockets().values()
