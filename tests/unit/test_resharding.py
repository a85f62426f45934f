"""Weights and Adam's moments on another number of ranks; with the product's own models: test_engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from opd_recipes.registry import RecipeError
from opd_recipes.resharding import load_weights, whole
from tests.unit.resharded import CASES


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resharded")
    subprocess.run([sys.executable, Path(__file__).parent / "resharded.py", folder], check=True, timeout=240)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", [f"{written} to {mesh}" for written, mesh in CASES])
def test_every_rank_gets_its_part(results, case):
    assert results[case] == []


def test_weights_of_another_model_are_refused_but_an_adapter_alone_may_be_a_part():
    model = nn.ParameterDict({"weight": torch.zeros(2), "more": torch.zeros(1)})
    with pytest.raises(RecipeError, match="of another model: 1 names differ, e.g. more"):
        load_weights(model, [{"weight": torch.ones(2)}])
    load_weights(model, [{"weight": torch.ones(2)}], partial=True)
    assert model["weight"].tolist() == [1, 1] and model["more"].tolist() == [0]
    with pytest.raises(RecipeError, match="e.g. other"):
        load_weights(model, [{"other": torch.ones(2)}], partial=True)


def test_what_is_not_sharded_is_taken_from_the_first_rank():
    assert whole("steps", [torch.tensor(3.0), torch.tensor(3.0)]) == 3
