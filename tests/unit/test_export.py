"""A checkpoint becomes a Hugging Face folder: complete with every file a user loads, or not there at all."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from opd_recipes import export
from opd_recipes.registry import RecipeError
from tests.harness import BASE
from tests.unit.sharded_checkpoint import TEACHER_SCALE, WORLD

SHARD = f"model_world_size_{WORLD}_rank_{{}}.pt"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "global_step_7"
    subprocess.run(
        [sys.executable, "-m", "tests.unit.sharded_checkpoint", str(folder)],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    )
    return folder


@pytest.fixture
def checkpoint(written, tmp_path):
    """A copy that a test may break."""
    return Path(shutil.copytree(written, tmp_path / "global_step_7"))


def base_weights():
    return load_file(Path(BASE) / "model.safetensors")


def refusal(checkpoint, target, **options):
    """The message, after which nothing is left behind."""
    before = sorted(path.name for path in target.parent.iterdir())
    with pytest.raises(RecipeError) as refused:
        export.export(checkpoint, target, **options)
    assert sorted(path.name for path in target.parent.iterdir()) == before
    return str(refused.value)


def test_the_shards_are_unequal_rows_or_equal_columns(written):
    parts = [export.load_shard(written / "actor" / SHARD.format(rank)) for rank in range(WORLD)]
    assert [part["model.language_model.norm.weight"].to_local().shape[0] for part in parts] == [43, 43, 42]
    assert {part["model.visual.blocks.0.mlp.linear_fc2.weight"].to_local().shape for part in parts} == {(64, 64)}


def test_the_student_has_every_weight_as_it_was(written, tmp_path):
    export.export(written, tmp_path / "student", dtype="float32")
    weights, expected = load_file(tmp_path / "student" / "model.safetensors"), base_weights()
    assert weights.keys() == expected.keys(), "a tied head is stored once, under the name that the base model has"
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_teacher_is_the_other_model_and_bfloat16_the_default(written, tmp_path):
    export.export(written / "actor", tmp_path / "teacher", which="teacher")
    weights = load_file(tmp_path / "teacher" / "model.safetensors")
    assert json.loads((tmp_path / "teacher" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, expected in base_weights().items():
        assert torch.equal(weights[name], (expected.float() * TEACHER_SCALE).bfloat16()), name


def test_tokenizer_processor_template_and_generation_settings_come_along(written, tmp_path):
    target = tmp_path / "student"
    target.mkdir()  # an empty folder may be there
    export.export(written, target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (target / name).read_bytes() == (Path(BASE) / name).read_bytes(), name
    assert {"processor_config.json", "config.json", "model.safetensors"} <= {file.name for file in target.iterdir()}
    assert (target / "model.safetensors").stat().st_mode == (target / "config.json").stat().st_mode


def test_missing_shards_are_named(checkpoint, tmp_path):
    for rank in (0, 2):
        (checkpoint / "actor" / SHARD.format(rank)).unlink()
    message = refusal(checkpoint, tmp_path / "out")
    assert f"lacks 2 of 3 shards: {SHARD.format(0)}, {SHARD.format(2)}" in message and "all ranks' files" in message


def test_a_target_with_files_is_never_touched(written, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    assert "is not empty" in refusal(written, target)
    assert (target / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("broken", ["cut short", "one byte", "of another model"])
def test_a_damaged_shard_leaves_nothing(checkpoint, tmp_path, broken):
    shard = checkpoint / "actor" / SHARD.format(1)
    if broken == "cut short":
        shard.write_bytes(shard.read_bytes()[:1000])
    elif broken == "one byte":
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    else:
        torch.save({"weight": torch.zeros(2)}, shard)
    assert shard.name in refusal(checkpoint, tmp_path / "out")


def test_a_pickle_that_would_run_code_is_not_run(checkpoint, tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "attacked"),)

    torch.save({"weight": Attack()}, checkpoint / "actor" / SHARD.format(0))
    assert "cannot be read as a file of tensors" in refusal(checkpoint, tmp_path / "out")
    (checkpoint / "actor" / SHARD.format(0)).write_bytes(pickle.dumps(Attack()))
    assert "cannot be read as a file of tensors" in refusal(checkpoint, tmp_path / "out")


def test_weights_that_the_configuration_does_not_describe_are_refused(checkpoint, tmp_path):
    file = checkpoint / "actor" / "huggingface" / "config.json"
    described = json.loads(file.read_text())
    described["text_config"]["intermediate_size"] *= 2
    file.write_text(json.dumps(described))
    assert "its weights are not those of the Qwen3VLForConditionalGeneration" in refusal(checkpoint, tmp_path / "out")


def test_a_folder_that_is_no_checkpoint_and_a_run_without_teacher_are_told_apart(checkpoint, tmp_path):
    assert "is no checkpoint" in refusal(tmp_path, tmp_path / "out")
    shutil.rmtree(checkpoint / "actor" / "teacher")
    assert "had no teacher; use --which student" in refusal(checkpoint, tmp_path / "out", which="teacher")


def test_the_command_reports_a_refusal_without_a_traceback(tmp_path, capsys):
    import argparse

    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    assert export.run(parser.parse_args([str(tmp_path), "--to", str(tmp_path / "out")])) == 1
    assert capsys.readouterr().err.startswith(f"opd_recipes: {tmp_path} is no checkpoint")
