"""``python -m benchmarks.startup``: what happens before the first step of a run, and what a step's time is.

The real run on the toy data, watched from outside: which process used how much processor time until the first step had been
logged, against what merely importing its libraries takes in a bare interpreter; then the parts of the steps by the run's own
timings. Writes ``docs/results/startup.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from opd_recipes.curve import read_metrics
from opd_recipes.runs import BASE, Process, make_data

#: Processes of a run by their titles, in the order in which they start: what it is, and what a bare interpreter imports for it.
PROCESSES = {
    "driver": (r"-m opd_recipes --config-name", "import verl.trainer.main_ppo"),
    "trainer": (r"ray::TaskRunner", "import opd_recipes.trainer, verl.workers.rollout.vllm_rollout.vllm_async_server"),
    "queue": (r"ray::(TransferQueueController|SimpleStorageUnit)", "import transfer_queue"),
    "actor": (r"ray::WorkerDict", "import opd_recipes.worker, verl.workers.rollout.vllm_rollout.vllm_rollout"),
    "scoring": (r"ray::RewardLoopWorker", "import verl.experimental.reward_loop"),
    "rollout server": (r"ray::vLLMHttpServer", "import verl.workers.rollout.vllm_rollout.vllm_async_server"),
    "vLLM engine": (r"VLLM::", "import vllm.v1.engine.core, vllm.v1.worker.cpu_model_runner"),
    "router": (r"ray::GlobalRequestLoadBalancer", "import verl.workers.rollout.vllm_rollout.vllm_async_server"),
    "rollout worker": (r"ray::TwoViewAgentLoopWorker", "import opd_recipes.rollout"),
    "Ray itself": (
        r"raylet|gcs_server|ray::IDLE|Dashboard|dashboard|log_monitor|monitor.py|RuntimeEnvAgent",
        "import ray",
    ),
}
#: Parts of a step in which a model works.
MODEL_WORK = ("timing_s/gen", "timing_s/update_actor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/startup"), help="folder for data and the run")
    parser.add_argument("--results", type=Path, default=Path("docs/results"), help="where the results are written")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    data = make_data(args.out / "data", 768, 32)
    imports = {name: import_seconds(code) for name, (_, code) in PROCESSES.items()}
    run = watch(command(data, args.out.resolve(), args.steps), args.out.resolve())
    result = {**run, "import_cpu_seconds": imports, "date": datetime.date.today().isoformat()}
    result |= {"cores": os.cpu_count(), "python": platform.python_version(), "command": "python -m benchmarks.startup"}
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "startup.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.results / "startup.md").write_text(text := markdown(result))
    print(text)


def command(data: Path, folder: Path, steps: int) -> list[str]:
    return [
        *(sys.executable, "-m", "opd_recipes", "--config-name", "vision_opd", "+overlay=[cpu,toy]"),
        f"actor_rollout_ref.model.path={BASE}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.resume_mode=disable",
        "trainer.logger=[console,file]",
        f"hydra.run.dir={folder}/hydra",
    ]


def import_seconds(code: str) -> float:
    """Processor seconds of a bare interpreter that runs ``code``, the second time (files are then in the page cache)."""
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)
        after = os.times()
    return round(after.children_user + after.children_system - before.children_user - before.children_system, 1)


def watch(words: list[str], folder: Path) -> dict[str, Any]:
    """Run a training; its processes until the first step, and the timings of its steps."""
    process = Process(words, folder, {"RAY_worker_niceness": "0"})
    pid = process.pid
    seen: dict[tuple[int, float], tuple[str, float, float]] = {}
    first: float | None = None
    try:
        while process.exit_code is None:
            if first is None:
                look(pid, seen, process.began)
                first = time.time() - process.began if list(read_metrics(process.metrics)) else None
            time.sleep(0.2)
    finally:
        process.end()
    if process.exit_code != 0 or first is None:
        sys.exit(f"{process.tail()}\n\nthe run failed; its log is {process.log}")
    cpu: dict[str, float] = {}
    starts: dict[str, float] = {}
    for title, seconds, begun in seen.values():
        name = next((name for name, (pattern, _) in PROCESSES.items() if re.search(pattern, title)), "others")
        cpu[name] = cpu.get(name, 0.0) + seconds
        starts[name] = max(0.0, min(starts.get(name, begun), begun))
    steps = [metrics for step, metrics in sorted(dict(read_metrics(process.metrics)).items()) if step > 1]
    parts = {key.removeprefix("timing_s/") for metrics in steps for key in metrics if key.startswith("timing_s/")}
    shares = [sum(m.get(key, 0.0) for key in MODEL_WORK) / m["timing_s/step"] for m in steps]
    return {
        "seconds_to_first_step": round(first, 1),
        "cpu_seconds_to_first_step": {name: round(value, 1) for name, value in cpu.items()},
        "process_starts_at": {name: round(value, 1) for name, value in starts.items()},
        "step_seconds": {
            part: round(statistics.median(m.get(f"timing_s/{part}", 0.0) for m in steps), 3) for part in sorted(parts)
        },
        "step_model_share": round(statistics.median(shares), 3),
        "steps": len(steps),
    }


def look(pid: int, seen: dict, began: float) -> None:
    """Note title, processor time and start of every process of the run."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in processes:
        try:
            with one.oneshot():
                times, title = one.cpu_times(), " ".join(one.cmdline()) or one.name()
                seen[one.pid, one.create_time()] = (title, times.user + times.system, one.create_time() - began)
        except psutil.Error:
            continue


def markdown(result: dict[str, Any]) -> str:
    cpu, imports, starts = (result[k] for k in ("cpu_seconds_to_first_step", "import_cpu_seconds", "process_starts_at"))
    rows = [
        f"| {name} | {starts[name]:.0f} | {cpu[name]:.1f} | {imports[name]:.1f} |" for name in PROCESSES if name in cpu
    ]
    total, floor = sum(cpu.values()), sum(imports[name] for name in PROCESSES if name in cpu)
    step = result["step_seconds"]
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in step.items() if name != "step" and seconds >= 0.01)
    return f"""# Start-up, and what a step's time is

`{result["command"]}` on {result["cores"]} cores, {result["date"]}: the toy run (64 questions x 2 answers a step), from the
command to the first step logged: **{result["seconds_to_first_step"]:.0f} s**, {total:.0f} s of processor time, of which
importing the libraries alone takes {floor:.0f} s.

| process | starts at, s | processor time to the first step, s | imports alone, s |
|---|---|---|---|
{chr(10).join(rows)}

A step takes {step["step"]:.2f} s (median of {result["steps"]}): {parts}.
**{result["step_model_share"]:.0%}** of it is generation or the update of the models.
"""


if __name__ == "__main__":
    main()
