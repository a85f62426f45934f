"""The other recipes on the toy data, each through the same real loop; and verl's own entry point."""

import datasets
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from opd_recipes.export import export
from tests.e2e.runs import Run
from tests.harness import BASE

pytestmark = pytest.mark.e2e


def test_bas_opd_asks_about_a_quarter(bas_opd):
    run = bas_opd
    for step in (1, 2, 3):
        metrics = run.steps[step]
        assert metrics["selection/share"] == 0.25  # 8 of 16 x 2 rollouts
        assert 0.15 < metrics["selection/teacher_token_share"] < 0.35
        assert metrics["selection/utility"] > 0 and metrics["opd/divergence"] > 0
        assert metrics["opd/rollout_pearson"] >= 0.9999 and metrics["actor/grad_norm"] > 0
    # Eight rows of about 60 tokens each: the teacher has not seen the other 24.
    assert run.series("opd/teacher_tokens")[0] < 0.35 * 32 * 128
    assert run.series("selection/stored") == [8, 16, 24] and run.series("selection/updates") == [2, 4, 6]
    assert 0 < run.steps[2]["selection/captured_utility"] <= 1
    assert "selection/captured_utility" not in run.steps[1]
    state = torch.load(run.folder / "checkpoints" / "global_step_3" / "selector.pt", weights_only=True)
    assert {"replay", "normaliser"} <= set(state)


def test_two_ranks_share_an_odd_number_of_selected_rollouts(folder, data):
    """9 of 32 rollouts on two ranks: verl fills up with a padding row, which must count nowhere."""
    options = ("opd/selection=learned", "opd.selection.budget=0.3", "trainer.n_gpus_per_node=2")
    run = Run(folder, "two_ranks", data, *options).ok()
    assert run.series("selection/share") == [9 / 32] * 2 and run.series("selection/stored") == [9, 18]
    assert min(run.series("selection/utility")) > 0 and min(run.series("opd/rollout_pearson")) >= 0.9999


def test_a_budget_of_everything_is_the_full_run(folder, data):
    """Bit for bit, but for vLLM's log-probs, whose last bits depend on what else it had to do: so without these weights."""
    options = ("opd.divergence.tail=renormalise", "opd.objective.rollout_is_cap=null")
    full = Run(folder, "full", data, *options).ok()
    run = Run(folder, "rho_1", data, *options, "opd/selection=learned", "opd.selection.budget=1").ok()
    for key in ("opd/divergence", "opd/entropy", "actor/loss", "actor/grad_norm"):
        assert run.series(key) == full.series(key), key


def test_opd_v_weighs_tokens_by_the_margin(folder, data):
    run = Run(folder, "opd_v", data, overlay="[cpu,toy,toy_opd_v]", recipe="opd_v").ok()
    for step in (1, 2):
        metrics = run.steps[step]
        assert 0 < metrics["opd/margin_selected"] < 1 and metrics["opd/weight_mean"] > 0
        quantiles = [metrics[f"opd/margin_p{q}"] for q in (5, 25, 50, 75, 95)]
        assert quantiles == sorted(quantiles) and quantiles[0] < 0 < quantiles[-1]
        assert metrics["actor/loss"] > 0 and metrics["opd/rollout_pearson"] >= 0.9999


def test_lora_trains_an_adapter_that_rollouts_and_exports_have(folder, data):
    """At a rate so high that rollouts without the adapter, or with a part of it, would not agree with the actor."""
    lora = ("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.actor.optim.lr=1e-2")
    steps = ("trainer.total_training_steps=3", "trainer.save_freq=3", "actor_rollout_ref.actor.optim.lr_warmup_steps=0")
    run = Run(folder, "lora", data, *lora, *steps, overlay="[cpu,toy,lora]").ok()
    assert min(run.series("opd/rollout_pearson")) >= 0.9999 and len(run.steps) == 3
    assert min(run.series("opd/divergence")) > 0 and min(run.series("actor/grad_norm")) > 0
    checkpoint, models = run.folder / "checkpoints" / "global_step_3", {}
    for which in ("student", "teacher"):
        export(checkpoint, folder / f"lora_{which}", which=which, dtype="float32")
        export(checkpoint, folder / f"lora_{which}_adapter", which=which, adapter=True)
        models[which] = AutoModelForImageTextToText.from_pretrained(folder / f"lora_{which}")
        base = AutoModelForImageTextToText.from_pretrained(BASE)
        models[f"{which}_adapter"] = PeftModel.from_pretrained(base, folder / f"lora_{which}_adapter")
    models["base"] = AutoModelForImageTextToText.from_pretrained(BASE)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        logits = {name: model.eval()(input_ids=ids).logits for name, model in models.items()}
    for which in ("student", "teacher"):
        torch.testing.assert_close(logits[which], logits[f"{which}_adapter"], atol=1e-4, rtol=1e-4)
    moved = [(logits[which] - logits["base"]).abs().mean().item() for which in ("teacher", "student")]
    assert 0.01 < moved[0] < moved[1], "the teacher has gone a small part of the way"


def test_opsd_tells_the_teacher_the_answer(folder, data):
    run = Run(folder, "opsd", data, overlay="[cpu,toy,toy_opsd]", recipe="opsd").ok()
    assert min(run.series("opd/divergence")) > 0  # the images are the same: the hint is the only difference
    assert min(run.series("opd/rollout_pearson")) >= 0.9999


def test_the_advantage_objective_with_a_task_reward(folder, data):
    run = Run(
        folder,
        "advantage",
        data,
        "opd.objective.task_advantage=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        overlay="[cpu,toy,advantage]",
    ).ok()
    for step in (1, 2):
        metrics = run.steps[step]
        assert metrics["opd/divergence"] > 0 and metrics["actor/grad_norm"] > 0
        assert metrics["training/rollout_actor_probs_pearson_corr"] >= 0.9999
        assert 0 < metrics["critic/rewards/mean"] < 1  # the task reward, of which the advantage is a part
        assert metrics["critic/advantages/mean"] < 0  # the divergence's part: minus what follows


def test_verls_own_entry_point_trains_rp_opsd_on_pairs_without_boxes(folder, data):
    """``python -m verl.trainer.main_ppo`` with our configuration, on rows that have nothing of ours."""
    rows = datasets.load_dataset("parquet", data_files=str(data / "train.parquet"), cache_dir=str(folder))["train"]
    pairs = folder / "pairs"
    pairs.mkdir()
    rows.remove_columns(["bbox", "reward_model"]).to_parquet(pairs / "train.parquet")
    (pairs / "val.parquet").write_bytes((data / "val.parquet").read_bytes())
    views = ["opd.views.student=[{kind: resize, scale: 0.5}]", "opd.views.teacher=[{kind: original}]"]
    run = Run(folder, "rp_opsd", pairs, *views, recipe="rp_opsd", module="verl.trainer.main_ppo").ok()
    for step in (1, 2):
        metrics = run.steps[step]
        assert metrics["opd/divergence"] > 0 and metrics["opd/rollout_pearson"] >= 0.9999
        assert metrics["prompt_length/max"] == 29  # 9 image tokens of the 36 that the whole scene has
