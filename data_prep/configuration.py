"""The training configuration of a recipe, for commands that draw or check rows as training would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.rows import DataError


@dataclass(frozen=True)
class ColumnNames:
    """What the configuration calls the columns."""

    prompt: str = "prompt"
    images: str = "images"
    box: str = "bbox"
    evidence: str = "bbox_images"


def compose_config(config_name: str, overlays: str | None, overrides: Sequence[str]) -> Any:
    """The configuration, as training composes it.

    Args:
        overlays: Names with commas between, or None.

    Raises:
        DataError: It does not compose.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    chosen = [f"+overlay=[{overlays}]"] if overlays else []
    try:
        with initialize_config_module("opd_recipes.config", version_base=None):
            return compose(config_name, overrides=[*chosen, *overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise DataError(f"--config-name {config_name}: {error}") from error
