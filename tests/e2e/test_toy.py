"""Vision-OPD on the toy data: the loop, its checkpoints, and what must not matter."""

import json
import math

import datasets
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForImageTextToText, AutoProcessor

from opd_recipes.export import export
from opd_recipes.report.page import build as report
from opd_recipes.report.page import render
from tests.e2e.runs import EQUAL_LENGTHS, Run
from tests.harness import BASE

pytestmark = pytest.mark.e2e


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


def test_every_tracker_gets_the_same_names_and_values(first):
    events = EventAccumulator(str(first.folder / "tensorboard"))
    events.Reload()
    for key in ("opd/divergence", "opd/student_mass", "actor/loss", "val-core/toy@student/acc/mean@1"):
        told = {event.step: event.value for event in events.Scalars(key)}
        assert told == pytest.approx({step: m[key] for step, m in first.steps.items() if key in m}, rel=1e-6)
    (offline,) = first.folder.glob("wandb/offline-run-*/*.wandb")
    assert b"opd/divergence" in offline.read_bytes()


def test_traces_follow_the_same_rows_and_agree_with_the_run(first):
    looks = []
    for step in (2, 3):
        lines = (first.folder / "traces" / f"step_{step:06d}.jsonl").read_text().splitlines()
        looks.append({row["id"]: row for row in map(json.loads, lines)})
    assert looks[0].keys() == looks[1].keys() == {f"row{i}" for i in range(5)}
    for row in looks[1].values():
        assert row["step"] == 3 and row["score"] in (0, 1) and row["reference"] and "<image>" not in row["question"]
        assert row["response"] == "".join(token["text"] for token in row["tokens"]) and len(row["tokens"]) == 1
        assert row["original_size"] == [192, 192] and row["bbox"]
        for token in row["tokens"]:
            # Validation samples the most likely token.
            assert token["student_top"][0] == [token["text"], pytest.approx(math.exp(token["student_logp"]), rel=1e-4)]
            assert 0 <= token["divergence"] < 0.7
        for view in ("student", "teacher"):
            with Image.open(first.folder / "traces" / row[f"{view}_image"]) as image:
                assert image.format == "PNG"
    assert any(looks[0][name]["tokens"] != looks[1][name]["tokens"] for name in looks[0])


def test_the_report_shows_the_run(first):
    made = report(first.folder)
    assert made.traces.total == 5 and made.alerts == []
    page = render(made)
    for words in ("Divergence", "row0", "step 3"):
        assert words in page


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


@pytest.mark.parametrize(("which", "shards"), [("student", "."), ("teacher", "teacher")])
def test_an_exported_model_answers_as_its_shards_would(first, tmp_path, which, shards):
    """What transformers makes of the folder, against the base model with the shard's own weights put in."""
    checkpoint = first.folder / "checkpoints" / "global_step_3"
    export(checkpoint, tmp_path / which, which=which, dtype="float32")
    processor = AutoProcessor.from_pretrained(tmp_path / which)
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / which, dtype="auto").eval()
    reference = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32).eval()
    untrained = {name: weight.clone() for name, weight in reference.state_dict().items()}
    shard = torch.load(checkpoint / "actor" / shards / "model_world_size_1_rank_0.pt", weights_only=True)
    reference.load_state_dict({name: weight.to_local() for name, weight in shard.items()})
    assert any(not torch.equal(weight, untrained[name]) for name, weight in exported.state_dict().items())
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour?"}]}]
    prompt = processor.apply_chat_template(question, add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[Image.new("RGB", (96, 96), "red")], return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(exported(**inputs).logits, reference(**inputs).logits)
        answers = [model.generate(**inputs, do_sample=False, max_new_tokens=4) for model in (exported, reference)]
    assert torch.equal(*answers) and answers[0].shape[1] > inputs["input_ids"].shape[1]


def test_neither_answers_nor_ranks_change_anything(first, folder, data):
    """From the second step's checkpoint, with rows without an answer, on two ranks and servers: the third step is the same."""
    rows = datasets.load_dataset("parquet", data_files=str(data / "train.parquet"), cache_dir=str(folder))["train"]
    bare = folder / "bare"
    bare.mkdir()
    extra = [{"index": info["index"]} for info in rows["extra_info"]]
    rows.remove_columns(["reward_model", "extra_info"]).add_column("extra_info", extra).to_parquet(
        bare / "train.parquet"
    )
    (bare / "val.parquet").write_bytes((data / "val.parquet").read_bytes())
    run = Run(
        folder,
        "unlabelled",
        bare,
        EQUAL_LENGTHS,
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={first.folder}/checkpoints/global_step_2",
    ).ok()
    assert list(run.steps) == [3] and run.steps[3]["actor/lr"] == first.steps[3]["actor/lr"]
    for key in ("opd/divergence", "opd/entropy", "actor/loss", "actor/grad_norm"):
        assert run.steps[3][key] == pytest.approx(first.steps[3][key], rel=1e-3), key
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
