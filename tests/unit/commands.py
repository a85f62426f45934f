"""A data command as a person starts it, in this process."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from data_prep import seen


def run(command: ModuleType, *options: Any) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args([str(option) for option in options]))


def refusal(command: ModuleType, out: Path, *options: Any) -> str:
    """The message of a run that must fail, and leave nothing."""
    with pytest.raises(SystemExit) as stopped:
        run(command, *options, "--out", out)
    assert isinstance(stopped.value.code, str)
    assert {file.name for file in out.glob("*")} <= {seen.NAME}, "nothing but what a next run saves work by"
    return stopped.value.code
