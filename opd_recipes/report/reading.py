"""A run's folder: its metrics, however many files and attempts they come from, and its configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opd_recipes.registry import RecipeError

#: Where Hydra leaves the composed configuration, seen from the run's folder.
CONFIG_PLACES = ("hydra/.hydra/config.yaml", ".hydra/config.yaml")
#: What every training step logs; a step that does go back to an earlier one begins another attempt.
TRAINED = ("timing_s/step", "actor/loss", "train/loss")
TRACES = "traces"

Metrics = dict[int, dict[str, float]]
Entry = tuple[int, dict[str, float]]


class NothingYet(RecipeError):
    """A run that has logged no step, which may still come."""


@dataclass(frozen=True)
class Run:
    """What is known of a run.

    Args:
        folder: Its folder.
        metrics: By step, ascending; a value that was logged as NaN or infinite is NaN.
        config: The composed configuration as nested mappings, interpolations unresolved; None: there is none.
        recipe: ``--config-name`` of the run; None: not known.
        resumed: Steps at which a later attempt took over.
        odd_lines: Lines of the metrics files that could not be read.
    """

    folder: Path
    metrics: Metrics
    config: dict[str, Any] | None = None
    recipe: str | None = None
    resumed: tuple[int, ...] = ()
    odd_lines: int = 0
    _flat: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._flat.update(flatten(self.config or {}))

    @property
    def last_step(self) -> int:
        return max(self.metrics, default=0)

    @property
    def total_steps(self) -> int | None:
        """Steps that the run is to have, where its configuration says it."""
        value = self.setting("trainer.total_training_steps")
        return value if isinstance(value, int) else None

    @property
    def finished(self) -> bool:
        return self.total_steps is not None and self.last_step >= self.total_steps

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the configuration by its dotted key; ``default`` where it is not there or refers to another."""
        value = self._flat.get(key, default)
        return default if isinstance(value, str) and "${" in value else value

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of every step that logged ``key``, NaN included."""
        return [(step, values[key]) for step, values in self.metrics.items() if key in values]

    def finite(self, key: str) -> list[tuple[int, float]]:
        return [(step, value) for step, value in self.series(key) if math.isfinite(value)]

    def names(self) -> list[str]:
        return sorted(set().union(*self.metrics.values()))


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested mappings; a mapping without keys is a value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_run(folder: Path, files: Sequence[Path] = ()) -> Run:
    """Read a run.

    Args:
        folder: Holds metrics (``*.jsonl``, here or one folder deeper, as verl's file logger lays them), Hydra's folder and,
            where rollouts were traced, ``traces``.
        files: Metrics files in the order in which they were written, in the place of those found.

    Raises:
        NothingYet: There are no metrics in the folder.
        RecipeError: There is no such folder, it has the metrics of several runs, or its configuration cannot be read.
    """
    if not folder.is_dir():
        raise RecipeError(f"{folder} is not a folder; name the folder of a run")
    found = list(files) or find_metrics(folder)
    if not found:
        raise NothingYet(
            f"{folder} has no metrics; train with 'trainer.logger=[console,file]' and the variable "
            f"VERL_FILE_LOGGER_PATH={folder}/metrics.jsonl, or name the file with --metrics"
        )
    entries, odd = [], 0
    for file in found:
        good, bad = read_entries(file)
        entries += good
        odd += bad
    if not entries:
        raise NothingYet(
            f"no step is logged yet in {', '.join(map(str, found))}; wait for the first step, or use --watch"
        )
    metrics, resumed = merge(entries)
    config, recipe = read_config(folder)
    return Run(folder.resolve(), metrics, config, recipe, resumed, odd)


def find_metrics(folder: Path) -> list[Path]:
    """Files whose first line is an entry of verl's file logger, in the order in which they were last written.

    Raises:
        RecipeError: They belong to several runs.
    """
    if here := [file for file in folder.glob("*.jsonl") if _is_metrics(file)]:
        return sorted(here, key=lambda file: (file.stat().st_mtime_ns, file.name))
    deeper = [file for file in sorted(folder.glob("*/*.jsonl")) if file.parent.name != TRACES and _is_metrics(file)]
    if len(deeper) > 1:
        listed = ", ".join(str(file.relative_to(folder)) for file in deeper[:4])
        raise RecipeError(
            f"{folder} has the metrics of several runs ({listed}{', ...' if len(deeper) > 4 else ''}); name the folder of one, "
            "or the files of one run with --metrics, the oldest first"
        )
    return deeper


def _is_metrics(file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as lines:
        return _entry(lines.readline()) is not None


def read_entries(file: Path) -> tuple[list[Entry], int]:
    """(step, metrics) of each line, and how many lines could not be read; one that is still being written counts as none.

    Raises:
        RecipeError: The file cannot be opened.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RecipeError(f"{file} cannot be read: {error.strerror or error}") from error
    entries = [_entry(line) for line in lines]
    odd = sum(entry is None and bool(line) for entry, line in zip(entries[:-1], lines[:-1], strict=True))
    return [entry for entry in entries if entry is not None], odd


def _entry(line: str) -> Entry | None:
    try:
        raw = json.loads(line)
        step, data = raw["step"], raw["data"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(step, int) or isinstance(step, bool) or not isinstance(data, dict):
        return None
    # verl's logger writes NaN as null.
    return step, {
        key: _number(value)
        for key, value in data.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def _number(value: float | None) -> float:
    try:
        number = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def merge(entries: Sequence[Entry]) -> tuple[Metrics, tuple[int, ...]]:
    """Entries in the order in which they were written, by step; of one metric at one step the later value wins.

    A training step that goes back means that the run was resumed from an older checkpoint: what the earlier attempt had
    logged beyond it belongs to no model that still exists, and is left out.

    Returns:
        Metrics by step, and the steps at which a later attempt took over.
    """
    metrics: Metrics = {}
    resumed, last = [], -1
    for step, data in entries:
        if any(key in data for key in TRAINED):
            if step <= last:
                resumed.append(step)
                metrics = {old: values for old, values in metrics.items() if old <= step}
            last = step
        metrics[step] = {**metrics.get(step, {}), **data}
    return dict(sorted(metrics.items())), tuple(resumed)


def read_config(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The composed configuration and the name it was composed from; None where Hydra has left none.

    Raises:
        RecipeError: There is one, but it is damaged.
    """
    import yaml

    for place in CONFIG_PLACES:
        file = folder / place
        if not file.is_file():
            continue
        try:
            config = yaml.safe_load(file.read_text(encoding="utf-8"))
            hydra_file = file.with_name("hydra.yaml")
            hydra = yaml.safe_load(hydra_file.read_text(encoding="utf-8")) if hydra_file.is_file() else {}
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RecipeError(f"{file} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise RecipeError(f"{file} is no configuration; restore the file that Hydra wrote when the run began")
        try:
            return config, str(hydra["hydra"]["job"]["config_name"])
        except (KeyError, TypeError):
            return config, None
    return None, None
