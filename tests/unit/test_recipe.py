"""Configurations, valid and senseless: what is refused is refused before Ray starts, by a message with the remedy."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from opd_recipes.check import check_run, updates_once
from opd_recipes.recipe import Recipe
from opd_recipes.registry import RecipeError

OVERLAYS = "+overlay=[cpu,toy]"


FILES = ["data.train_files=README.md", "data.val_files=README.md", "actor_rollout_ref.model.path=org/model"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


def config(*overrides, name="vision_opd"):
    with initialize_config_module("opd_recipes.config", version_base=None):
        return compose(name, overrides=[*FILES, *overrides])


def separate(overrides):
    """One string for each override; a space inside a value is not followed by a key."""
    return re.split(r" (?=[+~]?[\w./]+=)", overrides)


def test_vision_opd_has_the_papers_values():
    c = config()
    recipe = check_run(c)
    assert recipe.student_view.kinds == ["redbox"] and recipe.teacher_view.kinds == ["crop"]
    assert c.opd.teacher == {"kind": "ema", "rate": 0.05} and recipe.teacher.live_share == 0
    assert c.opd.divergence == {"kind": "jsd", "alpha": 0.5, "support": "student", "tail": "bucket", "topk": 100}
    assert (recipe.objective.aggregation, recipe.objective.rollout_is_cap) == ("seq_mean_token_mean", 2.0)
    actor, rollout = c.actor_rollout_ref.actor, c.actor_rollout_ref.rollout
    assert (actor.optim.lr, list(actor.optim.betas), actor.optim.weight_decay) == (2e-6, [0.9, 0.999], 0.01)
    assert (actor.optim.lr_warmup_steps, actor.optim.lr_scheduler_type, actor.optim.clip_grad) == (10, "constant", 1.0)
    assert (rollout.n, rollout.temperature, rollout.top_p, rollout.top_k) == (8, 1.0, 1, -1)
    assert (c.data.max_prompt_length, c.data.max_response_length, c.data.train_batch_size) == (8192, 1024, 96)
    assert (actor.ppo_mini_batch_size, actor.ppo_epochs) == (96, 1)
    assert c.distillation.enabled is False


def test_rp_opsd_has_the_papers_values():
    recipe = check_run(c := config(name="rp_opsd"))
    assert c.opd.divergence == {"kind": "bc_reverse_kl", "support": "teacher", "tail": "none", "topk": 100}
    assert c.opd.views.student == [{"kind": "resize", "scale": 0.5}] and recipe.teacher_view.kinds == ["original"]
    assert c.opd.teacher == {"kind": "ema", "rate": 0.05} and recipe.objective.aggregation == "token_mean"
    assert not any(view.needs_box for view in recipe.views.values())
    check_run(config("+overlay=[cpu,toy,toy_rp_opsd]", name="rp_opsd"))


def test_opd_v_has_the_papers_values():
    recipe = check_run(c := config(name="opd_v"))
    assert c.opd.divergence == {"kind": "jsd", "alpha": 0.5, "support": "student", "tail": "bucket", "topk": 100}
    assert c.opd.weights == {"kind": "margin", "threshold": 0.0, "normaliser": "valid_tokens"}
    assert c.opd.teacher == {"kind": "ema", "rate": 0.05} and recipe.objective.aggregation == "token_mean"
    assert recipe.negative_view.kinds == ["crop", "mask_rectangle"] and recipe.teacher_view.kinds == ["crop"]


def test_bas_opd_has_the_papers_values():
    recipe = check_run(c := config(name="bas_opd"))
    assert c.opd.divergence == {"kind": "jsd", "alpha": 0.5, "support": "student", "tail": "renormalise", "topk": 100}
    selection = recipe.selection
    assert (selection.budget, selection.exploration, selection.hidden) == (0.25, 0.1, 32)
    assert (selection.capacity, selection.minibatch, selection.updates_per_step, selection.warmup) == (512, 256, 2, 96)
    assert (selection.lr, selection.huber_delta, selection.rank_weight) == (1e-3, 1.0, 0.2)
    assert (selection.half_life, selection.momentum) == (10, 0.99) and recipe.objective.aggregation == "token_mean"


def test_opsd_has_the_papers_values():
    recipe = check_run(c := config(name="opsd"))
    assert c.opd.teacher == {"kind": "frozen"} and "{answer}" in recipe.teacher_hint
    assert c.opd.divergence.kind == "jsd" and c.opd.divergence.alpha == 0.5
    assert recipe.student_view.kinds == recipe.teacher_view.kinds == ["original"]


@pytest.mark.parametrize(
    "swap",
    [
        "opd/teacher=frozen",
        "opd/teacher=current",
        "opd/teacher=trust_region opd.teacher.rate=0.1",
        "opd/teacher=progressive opd.teacher.every=50",
        "opd/teacher=external opd.teacher.path=data_prep/toy/base",
        "opd/weights=margin +overlay=vision_opd_6k opd.views.negative=[{kind: provided}, {kind: mask_rectangle}]",
        "opd/divergence=forward_kl",
        "opd/divergence=reverse_kl",
        "opd/divergence=bc_reverse_kl",
        "opd/divergence=sampled_kl",
        "opd.divergence.support=union",
        "opd.divergence.support=full opd.divergence.tail=none",
        "opd/selection=random",
        "opd/selection=entropy opd.selection.budget=0.1",
        "opd/selection=learned opd.oracle_every=10",
        "opd/weights=binary_margin opd.views.negative=[{kind: crop},{kind: mask_box}]",
        "+overlay=advantage",
        "+overlay=advantage opd.objective.task_advantage=grpo",
        "+overlay=advantage opd/divergence=sampled_kl opd.divergence.estimator=k1 opd.objective.discount=0",
        "opd.validation_views=[student,{half:[{kind:resize,scale:0.5}]}]",
    ],
)
def test_an_ablation_is_a_word_on_the_command_line(swap):
    check_run(config(*separate(swap)))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("opd.divergence.support=student", "set support=teacher and tail=none"),
        ("opd.divergence.tail=bucket", "set support=teacher and tail=none"),
        ("+opd.divergence.alpha=0.5", "'bc_reverse_kl' has no option 'alpha'"),
        ("opd.views.student=[{kind: resize}]", "'resize' needs scale"),
    ],
)
def test_rp_opsd_refuses_what_would_be_another_method(override, words):
    with pytest.raises(RecipeError, match=words):
        check_run(config(override, name="rp_opsd"))


@pytest.mark.parametrize("overlay", ["cpu", "toy", "vision_opd_6k", "[cpu,toy]", "[cpu,toy,vision_opd_6k]"])
def test_overlays_make_valid_recipes(overlay):
    check_run(config(f"+overlay={overlay}"))


NEGATIVE = "opd/weights=margin opd.views.negative=[{kind:crop},{kind:mask_box}]"

REFUSED = [
    ("trainer.max_actor_ckpt_to_keep=1", "must be at least 2, or null"),
    ("opd.views.student=[{kind: blur}]", "opd.views.student: unknown value .blur.; known: provided, blank, crop"),
    ("opd.views.student=[{kind: provided}]", "use original or redbox"),
    ("opd.views.teacher=[{kind: crop, zoom: two}]", "opd.views.teacher.zoom: expected float"),
    ("opd.views.teacher=[]", "name at least one step"),
    ("opd.teacher.kind=emma", "known: current, ema, external, frozen, progressive, trust_region"),
    ("opd.teacher.rate=0", r"must be in \(0, 1\]"),
    ("opd.teacher.rate=1.5", r"must be in \(0, 1\]"),
    ("opd.teacher.kind=frozen", "'frozen' has no option 'rate'"),
    ("opd/teacher=trust_region opd.teacher.rate=1", r"must be in \(0, 1\): at 1 it would be the student itself"),
    ("opd/teacher=progressive opd.teacher.every=0", "opd.teacher.every: must be at least 1 step"),
    ("opd/teacher=external opd.teacher.path=/nowhere/model", "opd.teacher.path: /nowhere/model does not exist"),
    ("opd.divergence.kind=jsb", "known: bc_reverse_kl, forward_kl, jsd, reverse_kl, sampled_kl"),
    ("opd.divergence.alpha=0", "forward_kl"),
    ("opd.divergence.alpha=1", "reverse_kl"),
    ("opd.divergence.kind=forward_kl", "'forward_kl' has no option 'alpha'"),
    ("opd.divergence.support=both", "known: full, sampled, student, teacher, union"),
    ("opd.divergence.support=full", "set tail=none"),
    ("opd.divergence.tail=none", "set tail=bucket or tail=renormalise"),
    ("opd.divergence.topk=0", "at least 1"),
    ("opd.weights.kind=margins", "opd.weights: unknown value 'margins'; known: binary_margin, margin, none"),
    ("opd/weights=margin", "opd.weights.kind=margin compares two views.*opd.views.negative is not set"),
    ("opd.views.negative=[{kind: mask_blur}]", "opd.weights.kind=none does not read it"),
    ("opd/weights=margin opd.views.negative=[{kind: crop, zoom: 2.0}]", "the same as opd.views.teacher"),
    (f"{NEGATIVE} opd.weights.normaliser=tokens", "known: valid_tokens, selected, weight_sum"),
    (f"{NEGATIVE} opd.weights.normaliser=selected", "set aggregation=token_mean"),
    (f"{NEGATIVE} opd.weights.threshold=-0.5", "opd.weights.threshold: must not be negative"),
    ("opd.teacher_hint=think", r"has no \{answer\}"),
    ("opd.selection.kind=some", "opd.selection: unknown value 'some'; known: all, entropy, learned, random"),
    ("opd.selection.kind=random", "'random' needs budget"),
    ("opd/selection=learned opd.selection.budget=0", r"opd.selection.budget.*\(0, 1\]"),
    ("opd/selection=learned opd.selection.budget=25", r"opd.selection.budget.*\(0, 1\]"),
    ("opd/selection=learned +opd.selection.exploration=2", "opd.selection.exploration"),
    ("opd/selection=random actor_rollout_ref.actor.ppo_mini_batch_size=48", "selected rollouts are one update"),
    ("opd/selection=random actor_rollout_ref.actor.ppo_epochs=2", "selected rollouts are one update"),
    ("opd/selection=random actor_rollout_ref.actor.shuffle=true", "could not match rows and utilities"),
    ("opd.oracle_every=5", "opd.selection.kind=all has nothing to capture"),
    ("opd/selection=random opd.oracle_every=-1", "must not be negative"),
    ("+opd.divergence.estimator=k2", "'jsd' has no option 'estimator'"),
    ("opd/divergence=sampled_kl opd.divergence.estimator=k1", "its derivative is 0 in expectation"),
    ("opd/divergence=sampled_kl opd.divergence.support=student", "support=sampled"),
    ("opd.divergence.support=sampled opd.divergence.tail=none", "sampled_kl"),
    ("opd.divergence.support=union opd.divergence.tail=none", "set tail=bucket or tail=renormalise"),
    ("algorithm.adv_estimator=opd_topk", "belong together; use .overlay=advantage"),
    ("+overlay=advantage algorithm.adv_estimator=grpo", "belong together"),
    ("+overlay=advantage opd.objective.discount=0", "noise with mean 0. Set discount above 0"),
    ("+overlay=advantage opd.objective.discount=1.5", r"opd.objective.discount: must be in \[0, 1\]"),
    ("+overlay=advantage opd.objective.coefficient=0", "opd.objective.coefficient: must be above 0"),
    ("+overlay=advantage opd.objective.rollout_is_cap=2.0", "set it to null"),
    ("+overlay=advantage opd.objective.is_clip=2.0", "set it to null"),
    ("+overlay=advantage opd/selection=random", "verl's policy-gradient loss knows no selection"),
    (f"+overlay=advantage {NEGATIVE}", "verl's policy-gradient loss knows no weights"),
    ("+overlay=advantage actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "set loss_agg_mode=token-mean"),
    (
        "+overlay=advantage opd.objective.task_advantage=grop",
        "opd.objective.task_advantage: unknown value 'grop'; known: ",
    ),
    ("+overlay=advantage opd.objective.task_advantage=gae", "others need a critic"),
    ("+overlay=advantage opd.objective.task_advantage=remax", "columns that are not computed"),
    ("+overlay=advantage algorithm.rollout_correction.bypass_mode=true", "nothing to correct"),
    ("algorithm.rollout_correction.bypass_mode=true", "nothing to correct"),
    ("algorithm.rollout_correction.rollout_is=token", "set it to null"),
    ("algorithm.rollout_correction.rollout_rs=token_k1", "set it to null"),
    ("actor_rollout_ref.rollout.logprobs_mode=raw_logprobs", "log-probs after the temperature"),
    ("opd/selection=random opd/divergence=sampled_kl", "over one id it is always 0; set opd.divergence.topk=100"),
    ("opd/selection=random actor_rollout_ref.actor.use_dynamic_bsz=false", "set use_dynamic_bsz=true"),
    ("opd/teacher=external", "opd.teacher.path: must be set"),
    ("opd/teacher=trust_region", "opd.teacher.rate: must be set"),
    ("opd.objective.discount=0.9", "belong to kind=advantage"),
    ("opd.objective.task_advantage=grpo", "belong to kind=advantage"),
    ("opd.objective.aggregation=mean", "known: seq_mean_token_mean, token_mean"),
    ("opd.objective.kind=adv", "known: advantage, distill"),
    ("opd.objective.rollout_is_cap=0", "must be above 0"),
    ("opd.validation_views=[full]", "known: student, teacher"),
    ("opd.validation_views=[]", "at least one"),
    ("data.on_bad_row=ignore", "data.on_bad_row: unknown value .ignore.; known: error, skip"),
    ("opd.head_chunk=0", "at least 1"),
    ("opd.poll_interval=0", "above 0 seconds"),
    ("opd.stall_timeout=0", "opd.stall_timeout: must be above 0 seconds"),
    ("opd.max_skipped_updates=0", "at least 1"),
    ("opd.head_chunk=1e3", "opd.head_chunk: expected int, got 1000.0"),
    ("opd.divergence.topk=100.0", "opd.divergence.topk: expected int, got 100.0"),
    ("opd.divergence.alpha=half", "opd.divergence.alpha: expected float, got 'half'"),
    ("opd.objective.rollout_is_cap='2'", "opd.objective.rollout_is_cap: expected .*, got '2'"),
    ("opd.seeded_rollouts=1", "opd.seeded_rollouts: expected bool"),
    ("opd.views.teacher=[{kind: crop, zoom: -1}]", "opd.views.teacher: zoom must be above 0"),
    ("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16", "a teacher that averages in 16 bits never moves"),
    ("algorithm.filter_groups.enable=true", "no reward to filter by"),
    ("critic.enable=true", "no value function"),
    ("trainer.critic_warmup=5", "first updates would be skipped"),
    ("+opd.epochs=3", "unknown setting epochs"),
    ("distillation.enabled=true", "distillation.enabled=True.*set it to false"),
    ("trainer.v1.trainer_mode=sync", "opd_sync"),
    ("actor_rollout_ref.actor.strategy=fsdp", "must be fsdp2"),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "must be 1"),
    ("actor_rollout_ref.rollout.calculate_log_probs=false", "importance weights need it"),
    ("actor_rollout_ref.rollout.name=sglang", "must be vllm"),
    ("actor_rollout_ref.model.use_fused_kernels=true", "streamed head takes its place"),
    ("actor_rollout_ref.model.lora_rank=8", "set lora.merge=true"),
    ("actor_rollout_ref.actor.use_kl_loss=true", "no KL term"),
    ("actor_rollout_ref.actor.entropy_coeff=0.1", "no entropy term"),
    ("algorithm.use_kl_in_reward=true", "no reward is used"),
    ("actor_rollout_ref.rollout.multi_turn.enable=true", "single-turn"),
    ("actor_rollout_ref.rollout.temperature=0", "on-policy training samples"),
    ("actor_rollout_ref.rollout.top_p=0.9", "truncated sampler"),
    ("actor_rollout_ref.rollout.top_k=50", "truncated sampler"),
    ("data.train_files=gone.parquet", "data.train_files: gone.parquet does not exist"),
    ("data.val_files=[README.md,gone.parquet]", "data.val_files: gone.parquet does not exist"),
    ("actor_rollout_ref.model.path=/nowhere/model", "actor_rollout_ref.model.path: /nowhere/model does not exist"),
]


@pytest.mark.parametrize(("override", "words"), REFUSED, ids=[override for override, _ in REFUSED])
def test_refused(override, words):
    with pytest.raises(RecipeError, match=words):
        check_run(config(*separate(override)))


COLOCATE = "trainer.v1.trainer_mode=opd_colocate_async"
SEPARATE = (
    "trainer.v1.trainer_mode=opd_separate_async actor_rollout_ref.rollout.nnodes=1 "
    "actor_rollout_ref.rollout.n_gpus_per_node=8 actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
)


@pytest.mark.parametrize(
    "mode",
    [
        COLOCATE,
        SEPARATE,
        f"{SEPARATE} data.train_batch_size=384 actor_rollout_ref.actor.ppo_mini_batch_size=96 "
        "trainer.v1.separate_async.parameter_sync_step=4",
        f"{COLOCATE} opd/selection=random",
        "+overlay=[cpu,toy,cpu_separate]",
    ],
)
def test_trainer_modes(mode):
    check_run(config(*separate(mode)))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.v1.trainer_mode=sync", "use one of opd_colocate_async, opd_separate_async, opd_sync"),
        (f"{COLOCATE} opd.seeded_rollouts=true", "opd.seeded_rollouts=true with .* set it to false"),
        (f"{COLOCATE} opd/selection=entropy", "opd.selection.kind=entropy with .* use opd_sync"),
        (f"{SEPARATE} opd/selection=learned", "opd.selection.kind=learned with .* use opd_sync"),
        (f"{SEPARATE} actor_rollout_ref.rollout.nnodes=0", "the devices for rollouts alone; set both above 0"),
        (f"{SEPARATE} actor_rollout_ref.rollout.checkpoint_engine.backend=naive", "set nccl"),
        (f"{SEPARATE} trainer.v1.separate_async.parameter_sync_step=4", "ppo_mini_batch_size=96 times .*step=4"),
    ],
)
def test_trainer_modes_that_are_refused(override, words):
    with pytest.raises(RecipeError, match=words):
        check_run(config(*separate(override)))


@pytest.mark.parametrize(
    ("override", "once"),
    [
        ("opd.head_chunk=64", True),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=48", False),
        ("actor_rollout_ref.actor.ppo_epochs=2", False),
        (SEPARATE, True),
        (
            f"{SEPARATE} data.train_batch_size=192 actor_rollout_ref.actor.ppo_mini_batch_size=96 "
            "trainer.v1.separate_async.parameter_sync_step=2",
            True,
        ),
    ],
)
def test_whether_a_batch_is_one_update(override, once):
    assert updates_once(config(*separate(override))) is once


def test_seeded_rollouts_on_cpu_need_whole_prefills():
    with pytest.raises(RecipeError, match="enable_chunked_prefill=false"):
        check_run(config(OVERLAYS, "actor_rollout_ref.rollout.enable_chunked_prefill=true"))


def test_a_section_that_lacks_a_part():
    section = {"views": {"student": "original", "teacher": "original"}}
    with pytest.raises(RecipeError, match="opd: divergence, head_chunk, max_skipped_updates, objective.*missing"):
        Recipe.load(section)


def test_addresses_are_left_to_verl():
    check_run(config("data.train_files=hdfs://cluster/train.parquet", "data.val_files=s3://bucket/val.parquet"))


def test_a_configuration_without_the_section():
    c = config()
    c.opd = None
    with pytest.raises(RecipeError, match="--config-name vision_opd"):
        check_run(c)


def test_the_command_line_refuses_before_ray_starts(tmp_path):
    command = [sys.executable, "-m", "opd_recipes", "--config-name", "vision_opd", "opd.divergence.tail=none"]
    run = subprocess.run([*command, f"hydra.run.dir={tmp_path}"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("opd_recipes: opd.divergence: kind=jsd over support=student")
    assert "Traceback" not in run.stderr and "Ray" not in run.stdout + run.stderr
