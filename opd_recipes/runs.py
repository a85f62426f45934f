"""Training runs as processes: started, watched, ended and remembered. What the demo and the study share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import data_prep.toy

#: The tiny model of the toy data.
BASE = Path(data_prep.toy.__file__).parent / "base"
#: Lines of a log that are shown when its run fails.
TAIL = 40


class Process:
    """A command whose output goes to ``log.txt`` and whose metrics go to ``metrics.jsonl`` in ``folder``.

    Args:
        command: As for :class:`subprocess.Popen`.
        folder: Made if needed; earlier metrics in it are removed.
        environment: Variables beside those of this process.
        name: Of the log and metrics files, where a run has several commands.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None, name: str = ""
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self.metrics = folder / f"{name}log.txt", folder / f"{name}metrics.jsonl"
        self.metrics.unlink(missing_ok=True)
        self.began = time.time()
        variables = {**os.environ, **(environment or {}), "VERL_FILE_LOGGER_PATH": str(self.metrics)}
        with self.log.open("w") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=variables)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def minutes(self) -> float:
        return (time.time() - self.began) / 60

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Ask it to end, as Ctrl-C would, and wait: Ray takes its processes along."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL:])


def end_on_signal() -> None:
    """Turn a request to end this process into an exit that runs ``finally`` clauses, which end the training."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def make_data(folder: Path, train: int, val: int) -> Path:
    """Make the toy data set, unless it is there already."""
    made = folder / f"made_{train}_{val}"
    if not made.exists():
        sizes = ("--train", str(train), "--val", str(val))
        subprocess.run([sys.executable, "-m", "data_prep", "toy", "--out", str(folder), *sizes], check=True)
        made.touch()
    return folder.resolve()


def recall(folder: Path, arguments: Sequence[Any]) -> Any:
    """What :func:`remember` kept of the run in ``folder``, if it had the same arguments; else None."""
    file = folder / "record.json"
    if file.exists() and (past := json.loads(file.read_text()))["arguments"] == list(arguments):
        return past["run"]
    return None


def remember(folder: Path, arguments: Sequence[Any], run: Any) -> None:
    unfinished = folder / "record.json.new"
    unfinished.write_text(json.dumps({"arguments": list(arguments), "run": run}))
    unfinished.replace(folder / "record.json")


class ProgressLine:
    """One line that changes on a terminal; elsewhere a new line when ``stage`` changes, and then every half minute."""

    def __init__(self, prefix: str = ""):
        self.prefix = prefix
        self.began = self.printed = time.time()
        self.text = self.stage = ""

    def show(self, text: str, stage: str = "") -> None:
        """``stage`` stands for the part of ``text`` that is worth a line at once; by default none is."""
        now = time.time()
        clock = f"[{int(now - self.began) // 60}:{int(now - self.began) % 60:02d}] {self.prefix}{text}"
        if sys.stdout.isatty():
            print(f"\r\033[K{clock}", end="", flush=True)
        elif text != self.text and (stage != self.stage or now - self.printed >= 30):
            print(clock, flush=True)
            self.text, self.stage, self.printed = text, stage, now

    def end(self) -> None:
        if sys.stdout.isatty():
            print()
