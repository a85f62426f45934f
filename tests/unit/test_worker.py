"""What the worker refuses to resume from; what it does resume from is shown end to end."""

import json
from types import SimpleNamespace

import pytest
import torch

from opd_recipes.checkpoints import TEACHER_FOLDER
from opd_recipes.registry import RecipeError
from opd_recipes.worker import OpdActorRolloutRefWorker
from tests import harness


@pytest.fixture
def worker(tmp_path):
    harness.start()

    def make(*overrides):
        made = object.__new__(OpdActorRolloutRefWorker)
        made.config = harness.config(*overrides).actor_rollout_ref
        return made

    return make


def checkpoint(folder, teacher, adapter=None):
    (folder / TEACHER_FOLDER).mkdir(parents=True)
    state = {"teacher": teacher, "adapter": adapter, "finite_steps": 3, "skipped_steps": 0}
    (folder / "fsdp_config.json").write_text(json.dumps({"world_size": 1}))
    (folder / "opd_state_world_size_1_rank_0.json").write_text(json.dumps(state))
    return str(folder)


@pytest.mark.parametrize(
    ("written", "resumed"),
    [
        ({"kind": "ema", "path": None}, ["opd/teacher=frozen"]),
        ({"kind": "frozen", "path": None}, []),
        ({"kind": "external", "path": "a"}, ["opd/teacher=external", "opd.teacher.path=b"]),
    ],
)
def test_another_teacher_does_not_resume(worker, tmp_path, written, resumed):
    with pytest.raises(RecipeError, match="Resume with the teacher of that run"):
        worker(*resumed).load_checkpoint(checkpoint(tmp_path / "actor", written))


LORA = [f"actor_rollout_ref.model.{setting}" for setting in ("lora_rank=8", "lora_alpha=16", "target_modules=[q_proj]")]


@pytest.mark.parametrize("resumed", [[], [*LORA, "actor_rollout_ref.model.lora_alpha=32"]], ids=["none", "alpha"])
def test_another_adapter_does_not_resume(worker, tmp_path, resumed):
    folder = checkpoint(tmp_path / "actor", {"kind": "ema", "path": None}, worker(*LORA)._adapter_spec())
    with pytest.raises(RecipeError, match="'lora_alpha': 16.*its weights would mean something else"):
        worker(*resumed).load_checkpoint(folder)


def test_a_checkpoint_without_a_teacher_is_of_another_trainer(worker, tmp_path):
    (tmp_path / "actor").mkdir()
    with pytest.raises(RecipeError, match="not written by this trainer"):
        worker().load_checkpoint(str(tmp_path / "actor"))


@pytest.mark.parametrize("name", ["model", "optim", "extra_state", "teacher/model"])
def test_a_damaged_shard_is_not_loaded(worker, tmp_path, name):
    folder = checkpoint(tmp_path / "actor", {"kind": "ema", "path": None})
    for part in ("model", "optim", "extra_state", "teacher/model"):
        torch.save({"weight": torch.arange(100.0)}, tmp_path / "actor" / f"{part}_world_size_1_rank_0.pt")
    file = tmp_path / "actor" / f"{name}_world_size_1_rank_0.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(RecipeError, match=f"{name}_world_size_1_rank_0.pt is damaged"):
        worker().load_checkpoint(folder)


@pytest.mark.parametrize("alone", [False, True])
def test_the_bytes_of_a_lora_checkpoint_are_those_of_its_files(tmp_path, worker, alone):
    """The frozen weights once, the adapter four times: student, teacher, and Adam's two moments."""
    made = worker("+actor_rollout_ref.actor.checkpoint.save_lora_only=" + str(alone).lower(), *LORA)
    frozen, adapter = torch.nn.Linear(1000, 100, bias=False).requires_grad_(False), torch.nn.Linear(10, 7, bias=False)
    engine = SimpleNamespace(
        module=torch.nn.ModuleList([frozen, adapter]), checkpoint_config=made.config.actor.checkpoint
    )
    made.actor = SimpleNamespace(engine=engine)
    made.teacher = SimpleNamespace(shards=lambda: [torch.zeros(70)])
    assert made.checkpoint_bytes() == 4 * (4 * 70 + (0 if alone else 100_000))
