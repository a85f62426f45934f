"""Which checkpoint a run continues from, what is not whole, and which ones go. Worlds of another size: test_resharding."""

import json
import zipfile

import pytest
import torch
from omegaconf import OmegaConf

from opd_recipes.checkpoints import begin, check_contents, check_resume, how_to_continue, prune, read_state, steps
from opd_recipes.registry import RecipeError

WORLD = 2


def write(home, step, world=WORLD):
    """A ``global_step_N`` with the files that verl and this package write, and the tracker that says so."""
    actor = home / f"global_step_{step}" / "actor"
    (actor / "teacher").mkdir(parents=True)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world}))
    for rank in range(world):
        for name in ("model", "optim", "extra_state", "teacher/model"):
            torch.save({"weight": torch.arange(100.0)}, actor / f"{name}_world_size_{world}_rank_{rank}.pt")
        (actor / f"opd_state_world_size_{world}_rank_{rank}.json").write_text('{"finite_steps": 1}')
    torch.save({"position": step}, actor.parent / "data.pt")
    (home / "latest_checkpointed_iteration.txt").write_text(str(step))
    return actor


@pytest.fixture
def home(tmp_path):
    for step in (20, 40):
        write(tmp_path, step)
    return tmp_path


def config(home, *overrides):
    """What is read of the configuration; composing all of it takes its time."""
    made = OmegaConf.create(
        {
            "trainer": {"nnodes": 1, "resume_mode": "auto", "resume_from_path": None, "default_local_dir": str(home)},
            "actor_rollout_ref": {"actor": {"checkpoint": {"load_contents": ["model", "optimizer", "extra"]}}},
        }
    )
    made.merge_with_dotlist(list(overrides))
    return made


def refusal(home, *overrides):
    with pytest.raises(RecipeError) as error:
        check_resume(config(home, *overrides))
    return str(error.value)


def test_whole_checkpoints_and_none_at_all_are_fine(home, tmp_path):
    check_resume(config(home))
    check_resume(config(home, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={home}/global_step_20"))
    check_resume(config(tmp_path / "new"))


def test_an_interrupted_first_checkpoint_is_none(tmp_path):
    """What a run that dies in its first checkpoint leaves: no tracker, and data.pt is written last."""
    write(tmp_path, 20)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "global_step_20" / "data.pt").unlink()
    check_resume(config(tmp_path))


RANK_1 = "world_size_2_rank_1"


@pytest.mark.parametrize(
    "name",
    [
        f"actor/model_{RANK_1}.pt",
        f"actor/optim_{RANK_1}.pt",
        f"actor/extra_state_{RANK_1}.pt",
        f"actor/teacher/model_{RANK_1}.pt",
        f"actor/opd_state_{RANK_1}.json",
        "data.pt",
        "actor/fsdp_config.json",
    ],
)
@pytest.mark.parametrize("damage", ["gone", "short", "empty"])
def test_a_file_that_is_missing_or_short_is_named_with_the_last_whole_checkpoint(home, name, damage):
    file = home / "global_step_40" / name
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        file.write_bytes(content[: len(content) // 2] if damage == "short" else b"")
    message = refusal(home)
    assert f"{home}/global_step_40 is not whole: {name} is" in message
    assert message.endswith(f"trainer.resume_mode=resume_path trainer.resume_from_path={home}/global_step_20")
    check_resume(config(home, "trainer.resume_mode=disable"))


def test_without_another_whole_checkpoint_the_remedy_is_a_new_start(tmp_path):
    (write(tmp_path, 20) / f"optim_{RANK_1}.pt").unlink()
    assert refusal(tmp_path).endswith("There is no other; to start anew: trainer.resume_mode=disable")


def test_on_several_nodes_files_may_be_on_other_disks_but_not_short(home):
    file = home / "global_step_40" / "actor" / f"optim_{RANK_1}.pt"
    file.unlink()
    check_resume(config(home, "trainer.nnodes=2"))
    file.write_bytes(b"PK")
    assert "is cut short" in refusal(home, "trainer.nnodes=2")


def test_what_is_not_loaded_need_not_be_there(home):
    (home / "global_step_40" / "actor" / f"optim_{RANK_1}.pt").unlink()
    check_resume(config(home, "actor_rollout_ref.actor.checkpoint.load_contents=[model,extra]"))


@pytest.mark.parametrize("text", ["", "x", "60", "-1"])
def test_a_tracker_that_names_no_checkpoint_does_not_start_from_the_beginning(home, text):
    (home / "latest_checkpointed_iteration.txt").write_text(text)
    message = refusal(home)
    assert f"says {text!r}" in message and "there are: 20, 40" in message and "trainer.resume_mode=disable" in message


def test_checkpoints_without_a_tracker_are_not_written_over(home):
    (home / "latest_checkpointed_iteration.txt").unlink()
    assert "has checkpoints (of the steps 20, 40)" in refusal(home)


def test_a_checkpoint_of_another_trainer_has_no_teacher(home):
    for file in (home / "global_step_40" / "actor" / "teacher").iterdir():
        file.unlink()
    (home / "global_step_40" / "actor" / "teacher").rmdir()
    assert "was not written by this trainer" in refusal(home)


@pytest.mark.parametrize("path", ["{}/global_step_40/", "{}/best", "{}/global_step_60", "{}/global_step_x"])
def test_a_path_to_resume_from_is_a_checkpoints(home, path):
    path = path.format(home)
    assert path in refusal(home, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")


def test_one_flipped_bit_is_found(home):
    file = home / "global_step_40" / "actor" / f"model_{RANK_1}.pt"
    check_contents([file])
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        numbers = next(item for item in archive.infolist() if item.filename.endswith("data/0"))
    content[numbers.header_offset + 200] ^= 1
    file.write_bytes(content)
    assert not torch.equal(torch.load(file)["weight"], torch.arange(100.0)), "torch loads it without a word"
    check_resume(config(home))  # by names and ends it is whole
    with pytest.raises(RecipeError, match=f"{file.name} is damaged"):
        check_contents([file])


@pytest.mark.parametrize("content", [None, b"", b"PK"])
def test_files_that_cannot_be_read_are_named(tmp_path, content):
    file = tmp_path / "optim.pt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RecipeError, match="optim.pt cannot be read"):
        check_contents([file])
    with pytest.raises(RecipeError, match="missing or cut short"):
        read_state(tmp_path / "state.json")


def test_the_last_ones_are_kept_whoever_wrote_them_and_later_ones_are_not_touched(home):
    (home / "global_step_5").mkdir()  # what verl leaves of one that it removes
    (home / "global_step_best").mkdir()
    for step in (60, 80):
        write(home, step)
    prune(home, 2, step=60)
    assert steps(home) == [40, 60, 80] and (home / "global_step_best").is_dir()
    prune(home, None, step=80)
    assert steps(home) == [40, 60, 80]


def test_a_new_checkpoint_begins_in_an_empty_place(home):
    """Files of another number of ranks, or half of another run's, would be read with the new ones."""
    begin(home, 40)
    begin(home, 60)
    assert steps(home) == [20]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "The same command goes on from the checkpoint of step 40"),
        (["trainer.save_freq=-1"], "has to start anew"),
        (["trainer.resume_mode=disable"], "The last checkpoint is {}/global_step_40; with trainer.resume_mode=auto"),
        (["trainer.default_local_dir={}/other"], "No checkpoint was seen in {}/other"),
    ],
)
def test_what_is_left_of_a_run_that_has_died(home, overrides, said):
    settings = [override.format(home) for override in overrides]
    assert said.format(home) in how_to_continue(config(home, "trainer.save_freq=20", *settings))
