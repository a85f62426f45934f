"""What a soak found: numbers, a page and a picture."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.soak import Fault, Life, Soak

#: Steps of a life that do not count for a slope: caches fill, and the first validations and checkpoints are made.
WARM_UP = 50
#: Growth that is worth a look.
GROWS_MB = 5.0
#: Metrics of a step that a repetition must give again.
REPEATED = ("opd/divergence", "actor/grad_norm")
MEASURES = ("rss", "pss", "files", "sockets")
MB = 2**20


def result(soak: Soak, processes: Sequence[str], command: str, date: str, warm_up: int = WARM_UP) -> dict[str, Any]:
    """All that is written."""
    faults = [life.fault for life in soak.lives if life.fault]
    paths = {path for watch in soak.watches for path in watch.left_sockets()}
    segments = {name: size for watch in soak.watches for name, size in watch.left_segments().items()}
    sessions = {folder for watch in soak.watches for folder in watch.sessions if Path(folder).is_dir()}
    found: dict[str, Any] = {
        "command": command,
        "date": date,
        "cores": os.cpu_count(),
        "steps": soak.steps,
        "starts": len(soak.lives),
        "minutes": round(max((life.samples[-1][0] for life in soak.lives if life.samples), default=0.0), 1),
        "faults": [{**asdict(fault), "repeated": fault.repeated} for fault in faults],
        "seconds_to_first_step": [life.seconds_to_first_step for life in soak.lives],
        "repetition": repetition([life.metrics for life in soak.lives]),
        "warm_up": warm_up,
        "memory": slopes(soak.lives, warm_up),
        "counts": counts(soak.lives),
        "left": {
            "processes": list(processes),
            "segments": segments,
            "sockets": sorted(paths),
            "ray_session_megabytes": {folder: round(_size(Path(folder)) / MB, 1) for folder in sorted(sessions)},
        },
        "curve": {step: m.get("opd/divergence") for life in soak.lives for step, m in sorted(life.metrics.items())},
        "series": series(soak.lives),
    }
    return {**found, "grows": growing(found["memory"]), "wrong": wrong(faults, found["left"])}


def wrong(faults: Sequence[Fault], left: Mapping[str, Any]) -> list[str]:
    """What must not be; empty where the soak went well."""
    told = []
    for fault in faults:
        if fault.kind == "by itself":
            told.append(f"ended by itself at step {fault.at}: {fault.said}")
        if fault.hung:
            told.append(f"{fault.kind}: the run did not end by itself")
        if fault.orphans:
            told.append(f"{fault.kind}: processes stayed: {', '.join(fault.orphans)}")
        if fault.resumed is None:
            told.append(f"{fault.kind}: the run did not go on")
        elif fault.resumed < fault.checkpoint:
            told.append(
                f"{fault.kind}: went on after step {fault.resumed}, with a checkpoint of step {fault.checkpoint}"
            )
    told += [
        f"left at the end: {kind} {found}" for kind, found in left.items() if found and kind != "ray_session_megabytes"
    ]
    return told


def repetition(lives: Sequence[Mapping[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """How many steps were made twice, and the largest relative difference of what they gave."""
    earlier: dict[int, Mapping[str, Any]] = {}
    differences, steps = [], 0
    for metrics in lives:
        for step, values in metrics.items():
            if step in earlier:
                steps += 1
                pairs = [
                    (values[key], earlier[step][key]) for key in REPEATED if key in values and key in earlier[step]
                ]
                differences += [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
        earlier.update(metrics)
    return {"steps": steps, "largest_difference": max(differences, default=None)}


def slopes(lives: Sequence[Life], warm_up: int) -> dict[str, Any]:
    """Of each kind of process: what one holds, and its growth for each 100 steps.

    The slope is that of least squares with an intercept for each process, over all samples after ``warm_up`` steps of its life;
    ``error`` is its standard error, None where there is too little to tell.
    """
    lines: dict[tuple[str, str], list[list[tuple[float, float]]]] = defaultdict(list)
    for life in lives:
        first = min(life.metrics, default=0) + warm_up
        of: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
        for _, step, _, samples in life.samples:
            for sample in samples if step >= first else []:
                of[sample.who].append((step, sample))
        for points in of.values():
            name = points[-1][1].kind
            for measure in MEASURES:
                unit = MB if measure in ("rss", "pss") else 1
                lines[name, measure].append([(step, getattr(sample, measure) / unit) for step, sample in points])
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for (name, measure), processes in lines.items():
        slope, error = fit(processes)
        values = [value for points in processes for _, value in points]
        found[name][measure] = {"mean": sum(values) / len(values), "per_100_steps": slope and 100 * slope}
        found[name][measure]["error"] = error and 100 * error
        found[name]["processes"], found[name]["samples"] = len(processes), len(values)
    return dict(found)


def growing(memory: Mapping[str, Any]) -> list[str]:
    """The kinds of processes whose memory grows by more than :data:`GROWS_MB` and by more than two standard errors."""
    told = []
    for name, row in memory.items():
        slope, error = row["pss"]["per_100_steps"], row["pss"]["error"]
        if slope is not None and error is not None and slope > max(GROWS_MB, 2 * error):
            told.append(f"{name}: {slope:+.1f} ± {error:.1f} MB per 100 steps")
    return told


def fit(lines: Sequence[Sequence[tuple[float, float]]]) -> tuple[float | None, float | None]:
    """The common slope of lines with an intercept each, and its standard error; None where nothing says it."""
    xx = xy = yy = 0.0
    free = -1
    for points in lines:
        mean_x, mean_y = (sum(column) / len(points) for column in zip(*points, strict=True))
        xx += sum((x - mean_x) ** 2 for x, _ in points)
        xy += sum((x - mean_x) * (y - mean_y) for x, y in points)
        yy += sum((y - mean_y) ** 2 for _, y in points)
        free += len(points) - 1
    if xx == 0:
        return None, None
    slope = xy / xx
    return slope, math.sqrt(max(yy - slope * xy, 0.0) / free / xx) if free > 0 else None


def counts(lives: Sequence[Life]) -> list[dict[str, int]]:
    """Processes and Ray actors of each life, when it had warmed up and at its last sample."""
    rows = []
    for life in lives:
        running = [(actors, len(samples)) for _, step, actors, samples in life.samples if step]
        if running:
            (actors, processes), (last_actors, last_processes) = running[0], running[-1]
            rows.append({"life": life.number, "actors": actors, "processes": processes})
            rows[-1] |= {"last_actors": last_actors, "last_processes": last_processes}
    return rows


def series(lives: Sequence[Life]) -> list[dict[str, Any]]:
    """For the picture: resident megabytes by kind over time."""
    rows = []
    for life in lives:
        for minutes, step, _, samples in life.samples:
            by_kind: dict[str, float] = defaultdict(float)
            for sample in samples:
                by_kind[sample.kind] += sample.pss / MB
            held = {name: round(value, 1) for name, value in by_kind.items()}
            rows.append({"life": life.number, "minutes": round(minutes, 2), "step": step, "pss": held})
    return rows


def write(found: Mapping[str, Any], folder: Path, name: str = "soak") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / f"{name}.md").write_text(markdown(found, name))
    picture(found, folder / f"{name}.png")


def markdown(found: Mapping[str, Any], name: str = "soak") -> str:
    head = "| killed | at step | checkpoint | steps again | command ends, s | last process ends, s | next step, s | in shm |"
    lines = ["", head, "|---|---|---|---|---|---|---|---|"] if found["faults"] else []
    for fault in found["faults"]:
        held = (
            f"{sum(fault['segments'].values()) / MB:.0f} MB in {len(fault['segments'])}"
            if fault["segments"]
            else "nothing"
        )
        lines.append(
            f"| {fault['kind']} | {fault['at']} | {fault['checkpoint']} | {fault['repeated']} | {fault['to_end']:.0f} "
            f"| {fault['to_gone']:.0f} | {_number(fault['to_next_step'], 0)} | {held} |"
        )
    lines += [""] if lines else []
    table = [
        "| process | RSS, MB | PSS, MB | RSS per 100 steps | PSS per 100 steps | open files per 100 steps |",
        "|---|---|---|---|---|---|",
    ]
    for process, row in found["memory"].items():
        growth = [_grown(row[key]) for key in ("rss", "pss", "files")]
        table.append(f"| {process} | {row['rss']['mean']:.0f} | {row['pss']['mean']:.0f} | {' | '.join(growth)} |")
    again = found["repetition"]
    same = (
        ""
        if again["largest_difference"] is None
        else f"; what they gave differs by at most {again['largest_difference']:.1e}"
    )
    left, sessions = found["left"], found["left"]["ray_session_megabytes"]
    kept = f"Ray keeps {len(sessions)} session folders with logs, {sum(sessions.values()):.0f} MB."
    verdict = "\n".join(f"- **{line}**" for line in found["wrong"]) or (
        "Left at the end: no process, no Ray actor, no shared memory, no socket. " + kept
    )
    rows = [f"{row['processes']} ({row['actors']})" for row in found["counts"]]
    grown = "\n".join(f"- **grows: {line}**" for line in found["grows"]) or (
        "None of them grows." if found["memory"] else "Too few steps to tell."
    )
    return f"""# Soak

`{found["command"]}` on {found["cores"]} cores, {found["date"]}: {found["steps"]} steps of the toy run;
starts: {found["starts"]}, minutes: {found["minutes"]:.0f}. {again["steps"]} steps were made twice{same}.
{chr(10).join(lines)}
{verdict}

Memory of one process of each kind, after the first {found["warm_up"]} steps of each life; growth with its standard error.

{chr(10).join(table)}

{grown}

Processes (Ray actors among them) of each life: {", ".join(rows)}. Sockets that stayed in {os.sep}tmp: {len(left["sockets"])}.

![Memory and divergence over the lives]({name}.png)
"""


def picture(found: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), layout="constrained")
    names = sorted({name for row in found["series"] for name in row["pss"]})
    lives = sorted({row["life"] for row in found["series"]})
    colors = plt.colormaps["tab20"]
    for color, name in enumerate(names):
        for life in lives:
            points = [(r["minutes"], r["pss"].get(name, 0.0)) for r in found["series"] if r["life"] == life]
            above.plot(
                *zip(*points, strict=True), color=colors(color), label=name if life == lives[0] else None, linewidth=1.2
            )
    above.set(xlabel="minutes", ylabel="memory of the kind (PSS, MB)")
    if len(lives) > 1:
        above.set_title("each gap is a death and a start")
    figure.legend(*above.get_legend_handles_labels(), loc="outside upper center", fontsize=7, ncol=6)
    curve = {int(step): value for step, value in found["curve"].items() if value is not None}
    below.plot(curve.keys(), curve.values(), linewidth=1)
    for fault in found["faults"]:
        below.axvline(fault["at"], color="0.6", linewidth=0.8)
        below.annotate(
            fault["kind"], (fault["at"], 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=7
        )
    below.set(xlabel="training step", ylabel="divergence (repeated steps: the later)", ylim=(0, None))
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _grown(row: Mapping[str, float | None]) -> str:
    slope, error = row["per_100_steps"], row["error"]
    if slope is None:
        return "-"
    return f"{slope:+.1f}" + ("" if error is None else f" ± {error:.1f}")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())
