"""``python -m benchmarks.soak``: a long run that is killed again and again, each time in another way, and started again.

The toy training, with a checkpoint every ``--save`` steps. Every ``--every`` steps a process of it is killed outright; then the
same command is given again, as a supervisor would (``trainer.resume_mode=auto``). From outside are measured: what each death
costs, memory and open files of every process over the steps, and what is left of the run on the machine. Leaves with 1 where a
life hangs, more is lost than the steps since the last checkpoint, or anything is left at the end. Linux only.

``--faults ''`` is one long life. Writes ``soak.json``, ``soak.md`` and ``soak.png``, or what ``--name`` says instead.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import soak_report
from benchmarks.soak_watch import Sample, Watch, Who
from opd_recipes.checkpoints import last_step
from opd_recipes.curve import read_metrics
from opd_recipes.runs import BASE, Process, ProgressLine, end_on_signal, make_data

#: What is killed: the pattern of its title (none: everything at once), and the signal. In the order in which they are tried.
FAULTS: dict[str, tuple[str, signal.Signals]] = {
    "server": (r"^ray::vLLMHttpServer", signal.SIGKILL),
    "actor": (r"^ray::WorkerDict", signal.SIGKILL),
    "rollout": (r"^ray::TwoViewAgentLoopWorker", signal.SIGKILL),
    "driver": (r"-m opd_recipes --config-name", signal.SIGKILL),
    "driver-term": (r"-m opd_recipes --config-name", signal.SIGTERM),
    "everything": ("", signal.SIGKILL),
}
#: The kind of a death that was not ours.
BY_ITSELF = "by itself"
LOOK_SECONDS = 0.5
SAMPLE_SECONDS = 10.0
#: So long the processes of a run that has ended may take to follow.
FOLLOW_SECONDS = 60.0
#: But for these two of Ray: after a killed driver they look for it for a minute. The next life does not wait for them.
AGENTS = re.compile(r"^ray::(DashboardAgent|RuntimeEnvAgent)")
AGENT_SECONDS = 120.0
#: A start that has not reached its first step by then has failed.
START_SECONDS = 900.0


@dataclass
class Fault:
    """One death, and what it cost.

    Attributes:
        at: Last step that was logged before.
        checkpoint: Step of the last checkpoint then.
        time: Of the signal.
        resumed: Last step that was not repeated.
        to_end, to_gone, to_next_step: Seconds from the signal until the command had ended, until the last process of the run
            had (but for :data:`AGENTS`), and until the next life had logged its first step.
        segments: Bytes under /dev/shm that stayed, by name.
        sockets: How many files of sockets stayed.
        orphans: Titles of processes that were still there after :data:`FOLLOW_SECONDS`.
        said: Last line of the log.
    """

    kind: str
    at: int
    checkpoint: int
    time: float
    resumed: int | None = None
    code: int | None = None
    to_end: float = 0.0
    to_gone: float = 0.0
    to_next_step: float | None = None
    segments: dict[str, int] = field(default_factory=dict)
    sockets: int = 0
    orphans: list[str] = field(default_factory=list)
    said: str = ""
    hung: bool = False

    @property
    def repeated(self) -> int | None:
        return None if self.resumed is None else self.at - self.resumed


@dataclass
class Life:
    """One start of the command, to its end."""

    number: int
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    #: (minutes since the first life's start, last step logged, number of actors, samples)
    samples: list[tuple[float, int, int, list[Sample]]] = field(default_factory=list)
    seconds_to_first_step: float | None = None
    fault: Fault | None = None
    code: int | None = None


@dataclass
class Soak:
    """A command that is killed at some steps and started again, until it has reached the last.

    Attributes:
        hang: A run that has not ended so many seconds after a fault hangs: it is ended.
    """

    command: list[str]
    folder: Path
    steps: int
    plan: list[tuple[int, str]]
    checkpoints: Path
    line: ProgressLine
    hang: float
    began: float = field(default_factory=time.time)
    lives: list[Life] = field(default_factory=list)
    watches: list[Watch] = field(default_factory=list)

    def run(self) -> None:
        """All lives.

        Raises:
            SystemExit: Two lives after each other ended by themselves before the last step.
        """
        plan = list(self.plan)
        while True:
            life = self.live(plan[0] if plan else None)
            if life.fault is not None and life.fault.kind != BY_ITSELF:
                plan.pop(0)
            elif life.fault is None:
                return
            elif len(self.lives) > 1 and (before := self.lives[-2].fault) and before.kind == BY_ITSELF:
                sys.exit(
                    f"lives {life.number - 1} and {life.number} ended by themselves; see their logs in {self.folder}"
                )

    def live(self, planned: tuple[int, str] | None) -> Life:
        """Start the command and, at the planned step, kill what is planned; wait for its end and that of its processes."""
        number = len(self.lives) + 1
        life = Life(number)
        self.lives.append(life)
        # Beside other runs on this machine, as the study's: see opd_recipes/backends/side_by_side.py.
        apart = {"VERL_USE_EXTERNAL_MODULES": "opd_recipes.backends.side_by_side", "OPD_RUN_ID": f"soak-{os.getpid()}"}
        process = Process(self.command, self.folder, apart, name=f"{number}_")
        watch = Watch(process.pid)
        self.watches.append(watch)
        killed = sampled = 0.0
        try:
            while process.exit_code is None:
                alive = watch.look()
                life.metrics = dict(read_metrics(process.metrics))
                step = max(life.metrics, default=0)
                now = time.time()
                if life.metrics and life.seconds_to_first_step is None:
                    life.seconds_to_first_step = now - process.began
                    self._resumed(min(life.metrics), now)
                if now - sampled >= SAMPLE_SECONDS and not killed:
                    sampled = now
                    life.samples.append(((now - self.began) / 60, step, watch.actors(alive), watch.measure(alive)))
                if planned and not killed and step >= planned[0]:
                    killed = self._kill(planned[1], life, watch)
                if (killed and now - killed > self.hang) or (not life.metrics and now - process.began > START_SECONDS):
                    self._hung(life, process)
                self.line.show(self._status(life, step, bool(killed)), f"{number}{bool(killed)}{bool(life.metrics)}")
                time.sleep(LOOK_SECONDS)
        finally:
            process.end()
        life.code = process.exit_code
        life.metrics = dict(read_metrics(process.metrics))
        ended = time.time()
        if life.fault is None and (life.code != 0 or max(life.metrics, default=0) < self.steps):
            life.fault = Fault(BY_ITSELF, 0, last_step(self.checkpoints), ended)
            killed = ended
        orphans = self._follow(watch)
        if life.fault:
            life.fault.at = max(life.metrics, default=life.fault.checkpoint)
            life.fault.code, life.fault.to_end, life.fault.to_gone = life.code, ended - killed, time.time() - killed
            life.fault.orphans, life.fault.said = orphans, _last_line(process)
            life.fault.segments, life.fault.sockets = watch.left_segments(), len(watch.left_sockets())
        return life

    def _kill(self, kind: str, life: Life, watch: Watch) -> float:
        alive = watch.look()
        watch.measure(alive)  # what is held at the moment of death
        pattern, number = FAULTS[kind]
        victims = alive if not pattern else list(filter(None, [watch.find(pattern, alive)]))
        if not victims:
            sys.exit(f"no process to kill for {kind!r}; there are: {sorted(watch.known[who][:60] for who in alive)}")
        life.fault = Fault(kind, max(life.metrics), last_step(self.checkpoints), time.time())
        _signal(victims, number)
        return life.fault.time

    def _resumed(self, step: int, now: float) -> None:
        """Note, in the fault before, where the new life goes on and when."""
        before = self.lives[-2].fault if len(self.lives) > 1 else None
        if before is not None:
            before.resumed = step - 1
            before.to_next_step = now - before.time

    @staticmethod
    def _hung(life: Life, process: Process) -> None:
        if life.fault is None:
            sys.exit(f"life {life.number} did not begin within {START_SECONDS:.0f} s; its log is {process.log}")
        life.fault.hung = True
        process.end()

    def _follow(self, watch: Watch) -> list[str]:
        """Wait until the run's processes are gone; kill those that stay, and return what they are."""
        end = time.time() + FOLLOW_SECONDS
        while (left := [who for who in watch.look() if not AGENTS.match(watch.known[who])]) and time.time() < end:
            time.sleep(0.1)
        _signal(left, signal.SIGKILL)
        return [watch.known[who][:80] for who in left]

    def finish(self) -> list[str]:
        """Wait for Ray's agents of all lives; what is left then."""
        end = time.time() + AGENT_SECONDS
        while True:
            left = [(who, watch.known[who]) for watch in self.watches for who in watch.look()]
            if not left or time.time() > end:
                break
            self.line.show("waiting for Ray's last processes")
            time.sleep(1)
        _signal([who for who, _ in left], signal.SIGKILL)
        return [title[:80] for _, title in left]

    def _status(self, life: Life, step: int, killed: bool) -> str:
        doing = f"step {step}/{self.steps}" if life.metrics else "starting"
        if killed and life.fault:
            doing = f"step {step}/{self.steps}, killed: {life.fault.kind}, waiting for the end"
        return f"life {life.number} of {len(self.plan) + 1}, {doing}"


def _signal(victims: Sequence[Who], number: signal.Signals) -> None:
    for who in victims:
        with suppress(ProcessLookupError):
            os.kill(who.pid, number)


def _last_line(process: Process) -> str:
    lines = [line for line in process.tail().splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def training_command(data: Path, folder: Path, steps: int, save: int, overrides: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "opd_recipes", "--config-name", "vision_opd", "+overlay=[cpu,toy,slim]"),
        "opd.teacher.rate=0.02",
        f"actor_rollout_ref.model.path={BASE}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        f"trainer.test_freq={save}",
        f"trainer.save_freq={save}",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.resume_mode=auto",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.logger=[console,file]",
        f"hydra.run.dir={folder}/hydra",
        *overrides,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=45, help="steps between two faults")
    parser.add_argument("--save", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument(
        "--faults", default=",".join(FAULTS), help="which, in order, with commas (default: %(default)s)"
    )
    parser.add_argument(
        "--hang", type=float, default=300.0, help="seconds after which a run that does not end is ended"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="folder for data and logs; must be new")
    parser.add_argument("--results", type=Path, help="where the results are written (default: --out)")
    parser.add_argument("--name", default="soak", help="of the files of results (default: %(default)s)")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=soak_report.WARM_UP,
        help="steps of each life that do not count for the growth of memory (default: %(default)s)",
    )
    parser.add_argument("overrides", nargs="*", help="more configuration overrides")
    args = parser.parse_args()
    folder = args.out.resolve()
    if (folder / "checkpoints").exists():
        parser.error(f"{folder} has checkpoints of another soak, which this one would continue; name another folder")
    kinds = [kind for kind in args.faults.split(",") if kind]
    if unknown := sorted(set(kinds) - set(FAULTS)):
        parser.error(f"--faults {unknown[0]}: known are {', '.join(FAULTS)}")
    plan = [(args.every * (i + 1), kind) for i, kind in enumerate(kinds) if args.every * (i + 1) < args.steps]
    data = make_data(folder / "data", 3072, 256)
    command = training_command(data, folder, args.steps, args.save, args.overrides)
    end_on_signal()
    soak = Soak(command, folder, args.steps, plan, folder / "checkpoints", ProgressLine(), args.hang)
    stopped = ""
    try:
        soak.run()
    except SystemExit as end:  # what was seen until then is written
        stopped = f"stopped: {end}"
    remaining = soak.finish()
    soak.line.end()
    shown = shlex.join(["python", "-m", "benchmarks.soak", *sys.argv[1:]])
    result = soak_report.result(soak, remaining, shown, datetime.date.today().isoformat(), args.warm_up)
    result["wrong"] += [stopped] if stopped else []
    soak_report.write(result, args.results or folder, args.name)
    print(soak_report.markdown(result))
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
