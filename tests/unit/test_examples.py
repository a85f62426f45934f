"""The launch scripts: they parse, and the configuration that they compose is a valid recipe."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from opd_recipes.check import check_run

SCRIPTS = sorted((Path(__file__).parents[2] / "examples").glob("*.sh"))
VARIABLES = {"MODEL": "org/model", "TRAIN": "train.parquet", "VAL": "val.parquet", "OUT": "/shared/run"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_composes_a_valid_configuration(script):
    # `python` and `ray` replaced by a function that prints the arguments it would have got.
    shell = f"python() {{ printf '%q ' \"$@\"; }}; ray() {{ printf '%q ' \"$@\"; }}; source {shlex.quote(str(script))}"
    run = subprocess.run(
        ["bash", "-c", shell], env={**os.environ, **VARIABLES}, capture_output=True, text=True, check=True
    )
    arguments = shlex.split(run.stdout)
    arguments = arguments[arguments.index("opd_recipes") + 1 :]
    assert arguments[:2] == ["--config-name", "vision_opd"]
    with initialize_config_module("opd_recipes.config", version_base=None):
        config = compose(arguments[1], overrides=arguments[2:])
    config.data.train_files = config.data.val_files = str(script)
    check_run(config)
    assert config.actor_rollout_ref.model.path == "org/model"
    assert config.trainer.n_gpus_per_node == 8


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_says_which_variable_is_missing(script):
    run = subprocess.run(
        ["bash", str(script)], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0 and re.search(r"MODEL", run.stderr)
