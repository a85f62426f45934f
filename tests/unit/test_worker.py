"""What the worker refuses to resume from; what it does resume from is shown end to end."""

import json

import pytest

from opd_recipes.registry import RecipeError
from opd_recipes.worker import TEACHER_FOLDER, OpdActorRolloutRefWorker
from tests import harness


@pytest.fixture
def worker(tmp_path):
    harness.start()

    def make(*overrides):
        made = object.__new__(OpdActorRolloutRefWorker)
        made.config = harness.config(*overrides).actor_rollout_ref
        return made

    return make


def checkpoint(folder, teacher):
    (folder / TEACHER_FOLDER).mkdir(parents=True)
    state = {"teacher": teacher, "finite_steps": 3, "skipped_steps": 0}
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


def test_a_checkpoint_without_a_teacher_is_of_another_trainer(worker, tmp_path):
    (tmp_path / "actor").mkdir()
    with pytest.raises(FileNotFoundError, match="not written by this trainer"):
        worker().load_checkpoint(str(tmp_path / "actor"))
