"""Vision-OPD on the toy data: the loop, its checkpoints, and what must not matter."""

import datasets
import pytest
import torch

from tests.e2e.runs import Run

pytestmark = pytest.mark.e2e

#: All responses have the same length (the limit), so all sequences of a batch do.
EQUAL_LENGTHS = "data.max_response_length=1"


@pytest.fixture(scope="module")
def first(folder, data):
    """Three steps with equal lengths, validation at the end, a checkpoint after the second step and the third."""
    return Run(
        folder,
        "first",
        data,
        EQUAL_LENGTHS,
        "trainer.total_training_steps=3",
        "trainer.save_freq=2",
        "trainer.test_freq=3",
    ).ok()


def test_rollout_and_actor_agree_before_and_after_weight_syncs_with_equal_lengths(first):
    assert first.series("response_length/min") == first.series("response_length/max") == [1, 1, 1]
    assert min(first.series("opd/rollout_pearson")) >= 0.9999 and len(first.steps) == 3
    assert max(first.series("opd/rollout_gap")) < 2e-3


def test_the_metrics_tell_what_happened(first):
    for step in (1, 2, 3):
        metrics = first.steps[step]
        assert 0.01 < metrics["opd/divergence"] < 0.7
        assert metrics["opd/importance_weight"] == pytest.approx(1, abs=0.01) and metrics["opd/importance_weight"] != 1
        assert 0.9 < metrics["opd/student_mass"] <= 1 and metrics["opd/skipped_updates"] == 0
        assert metrics["opd/failed_rollouts"] == 0 and metrics["actor/grad_norm"] > 0
        assert not [key for key in metrics if key.startswith(("critic/", "opd/moments"))]
    for view in ("student", "teacher"):
        assert 0 <= first.steps[3][f"val-core/toy@{view}/acc/mean@1"] <= 1


def test_the_checkpoint_has_student_optimizer_and_teacher(first):
    folder = first.folder / "checkpoints" / "global_step_2" / "actor"
    names = {path.name for path in folder.iterdir()}
    assert {
        "model_world_size_1_rank_0.pt",
        "optim_world_size_1_rank_0.pt",
        "teacher",
        "opd_state_world_size_1_rank_0.json",
    } <= names
    student = torch.load(folder / "model_world_size_1_rank_0.pt", weights_only=False)
    teacher = torch.load(folder / "teacher" / "model_world_size_1_rank_0.pt", weights_only=False)
    assert student.keys() == teacher.keys()
    moved = sum(
        not torch.equal(a.to_local(), b.to_local()) for a, b in zip(student.values(), teacher.values(), strict=True)
    )
    assert moved > 0.9 * len(student)


def test_resuming_continues_the_run(first, folder, data):
    """From the second step's checkpoint, the third step sees the same data, rate and (nearly) the same models."""
    resumed = Run(
        folder,
        "resumed",
        data,
        EQUAL_LENGTHS,
        "trainer.total_training_steps=3",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={first.folder}/checkpoints/global_step_2",
    ).ok()
    assert list(resumed.steps) == [3]
    for key, tolerance in (
        ("actor/lr", 1e-12),
        ("opd/divergence", 1e-4),
        ("opd/entropy", 1e-4),
        ("actor/grad_norm", 1e-3),
    ):
        assert resumed.steps[3][key] == pytest.approx(first.steps[3][key], rel=tolerance), key


def test_neither_answers_nor_ranks_change_anything(first, folder, data):
    """Rows without an answer, and with another number of ranks and vLLM servers: the same losses."""
    rows = datasets.load_dataset("parquet", data_files=str(data / "train.parquet"), cache_dir=str(folder))["train"]
    bare = folder / "bare"
    bare.mkdir()
    extra = [{"index": info["index"]} for info in rows["extra_info"]]
    rows.remove_columns(["reward_model", "extra_info"]).add_column("extra_info", extra).to_parquet(
        bare / "train.parquet"
    )
    (bare / "val.parquet").write_bytes((data / "val.parquet").read_bytes())
    run = Run(folder, "unlabelled", bare, EQUAL_LENGTHS, "trainer.n_gpus_per_node=2").ok()
    for key in ("opd/divergence", "opd/entropy", "actor/loss", "actor/grad_norm"):
        assert run.series(key) == pytest.approx(first.series(key)[:2], rel=1e-3), key
    assert min(run.series("opd/rollout_pearson")) >= 0.9999


def test_a_teacher_with_the_students_image_and_weights_is_no_teacher(folder, data):
    """Unequal response lengths; two mini-batches, so verl's old log-probs are used as well."""
    run = Run(
        folder,
        "same",
        data,
        "opd.views.teacher=[{kind: redbox, width: 2, expand: 0.0}]",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=1",
    ).ok()
    assert run.steps[1]["opd/divergence"] == 0 and run.steps[1]["actor/loss"] == 0
    assert run.steps[1]["actor/grad_norm"] == 0
    assert run.steps[1]["training/rollout_actor_probs_pearson_corr"] >= 0.9999


def test_a_bad_row_stops_the_run_with_its_place(folder, data):
    rows = datasets.load_dataset("parquet", data_files=str(data / "train.parquet"), cache_dir=str(folder))["train"]
    broken = folder / "broken"
    broken.mkdir()
    rows.map(lambda row, i: {"bbox": [9.0, 9.0, 9.0, 9.0] if i == 5 else row["bbox"]}, with_indices=True).to_parquet(
        broken / "train.parquet"
    )
    (broken / "val.parquet").write_bytes((data / "val.parquet").read_bytes())
    run = Run(folder, "broken_run", broken)
    assert run.returncode == 1
    assert "opd_recipes: 1 of 96 rows cannot be used:" in run.log
    assert f"{broken}/train.parquet, row 5: bbox [9.0, 9.0, 9.0, 9.0] is empty" in run.log
    assert "Mend or remove them, or set data.on_bad_row=skip to leave them out" in run.log
