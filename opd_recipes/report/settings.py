"""How a run's configuration differs from the recipe of its paper."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from opd_recipes.report.reading import Run, flatten

#: Keys that change what is trained, in the order in which they are shown; the others are machine, files and logging.
TRAINING = (
    "opd.views.",
    "opd.",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.model.lora",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.seed",
    "actor_rollout_ref.actor.optim.",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.top_",
    "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.rollout.dtype",
    "algorithm.",
    "reward.",
    "optim.",
    "model.path",
    "trainer.total_",
)
#: Among them, but with no part in what is learned.
NOT_TRAINING = ("opd.poll_interval", "opd.head_chunk", "opd.trace", "reward.num_workers")
_EXACT = {"actor_rollout_ref.rollout.n", "data.seed", "actor_rollout_ref.rollout.seed"}

_SECRET = re.compile(
    r"env_vars\.|(api|access|secret|private)[_-]?key$|secret|passw|credential|(^|[._-])token$|(auth|access)token$", re.I
)
#: User and password of an address.
_LOGIN = re.compile(r"(?<=://)[^/@\s]*@")
ABSENT = "not set"


@dataclass(frozen=True)
class Change:
    """A setting with the paper's value and this run's, as text."""

    key: str
    paper: str
    run: str


@dataclass(frozen=True)
class Settings:
    """Changed settings, those that change what is trained first.

    Args:
        recipe: The recipe compared with; None where there is nothing to compare, and ``reason`` says why.
    """

    recipe: str | None
    training: tuple[Change, ...] = ()
    machine: tuple[Change, ...] = ()
    reason: str = ""


def settings_of(run: Run) -> Settings:
    """Compare a run's configuration with its recipe as it is published here, before overlays and overrides."""
    if run.config is None:
        return Settings(None, reason="the folder has no configuration (hydra/.hydra/config.yaml or .hydra/config.yaml)")
    if run.recipe not in known_recipes():
        named = "its name is not known" if run.recipe is None else f"{run.recipe!r} is not one of them"
        return Settings(None, reason=f"the run's recipe is none of this package: {named}")
    changes = [_without_placeholder(change) for change in differences(_recipe(run.recipe), run.config)]
    return Settings(
        run.recipe,
        tuple(sorted((c for c in changes if _rank(c.key) is not None), key=lambda c: (_rank(c.key), c.key))),
        tuple(c for c in changes if _rank(c.key) is None),
    )


def known_recipes() -> set[str]:
    return {
        file.name.removesuffix(".yaml") for file in files("opd_recipes.config").iterdir() if file.name.endswith("yaml")
    }


@cache
def _recipe(name: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    from data_prep.configuration import compose_config

    return OmegaConf.to_container(compose_config(name, None, ()), resolve=False)  # type: ignore[return-value]


def differences(paper: Mapping[str, Any], run: Mapping[str, Any]) -> list[Change]:
    """Keys with different values, sorted. Interpolations are compared as they are written, so a value that only follows
    another is no change of its own; what may be a secret is never shown."""
    theirs, ours = dict(flatten(paper)), dict(flatten(run))
    found = []
    for key in sorted(theirs.keys() | ours.keys()):
        if _same(theirs, ours, key) or _has_parts(key, theirs) or _has_parts(key, ours):
            continue
        shown = [_shown(key, values) for values in (theirs, ours)]
        found.append(Change(key, *shown))
    return found


def _without_placeholder(change: Change) -> Change:
    """verl's own paths of examples (``~/models/...``) are no setting of a paper."""
    return replace(change, paper=ABSENT) if change.paper.startswith("~/") else change


def _same(theirs: Mapping[str, Any], ours: Mapping[str, Any], key: str) -> bool:
    return key in theirs and key in ours and theirs[key] == ours[key] and type(theirs[key]) is type(ours[key])


def _has_parts(key: str, values: Mapping[str, Any]) -> bool:
    """An empty mapping on one side whose keys stand for themselves on the other."""
    return any(other.startswith(f"{key}.") for other in values)


def _shown(key: str, values: Mapping[str, Any]) -> str:
    if key not in values:
        return ABSENT
    if _SECRET.search(key):
        return "(not shown)"
    value = values[key]
    shown = {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))
    return _LOGIN.sub("(not shown)@", shown)


def _rank(key: str) -> int | None:
    """Place among the settings that change what is trained; None for the others."""
    if key.startswith(NOT_TRAINING):
        return None
    return next(
        (i for i, part in enumerate(TRAINING) if (key == part if part in _EXACT else key.startswith(part))), None
    )
