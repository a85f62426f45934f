"""Configurations, valid and senseless: what is refused is refused before Ray starts, by a message with the remedy."""

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from opd_recipes.recipe import Recipe, check_run
from opd_recipes.registry import RecipeError

OVERLAYS = "+overlay=[cpu,toy]"


FILES = ["data.train_files=README.md", "data.val_files=README.md", "actor_rollout_ref.model.path=org/model"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


def config(*overrides, name="vision_opd"):
    with initialize_config_module("opd_recipes.config", version_base=None):
        return compose(name, overrides=[*FILES, *overrides])


def test_vision_opd_has_the_papers_values():
    c = config()
    recipe = check_run(c)
    assert recipe.student_view.kinds == ["redbox"] and recipe.teacher_view.kinds == ["crop"]
    assert recipe.teacher.func.__name__ == "ema" and recipe.teacher.keywords == {"rate": 0.05}
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
    assert recipe.teacher.keywords == {"rate": 0.05} and recipe.objective.aggregation == "token_mean"
    assert not recipe.needs_box
    check_run(config("+overlay=[cpu,toy,toy_rp_opsd]", name="rp_opsd"))


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


REFUSED = [
    ("opd.views.student=[{kind: blur}]", "opd.views.student: unknown value 'blur'; known: provided, crop"),
    ("opd.views.student=[{kind: provided}]", "use original or redbox"),
    ("opd.views.teacher=[{kind: crop, zoom: two}]", "opd.views.teacher.zoom: expected float"),
    ("opd.views.teacher=[]", "name at least one step"),
    ("opd.teacher.kind=emma", "known: ema, frozen, progressive"),
    ("opd.teacher.rate=0", r"must be in \(0, 1\]"),
    ("opd.teacher.rate=1.5", r"must be in \(0, 1\]"),
    ("opd.teacher={kind: frozen, rate: 0.1}", "'frozen' has no option 'rate'"),
    ("opd.divergence.kind=jsb", "known: bc_reverse_kl, forward_kl, jsd, reverse_kl"),
    ("opd.divergence.alpha=0", "forward_kl"),
    ("opd.divergence.alpha=1", "reverse_kl"),
    ("opd.divergence.kind=forward_kl", "'forward_kl' has no option 'alpha'"),
    ("opd.divergence.support=both", "known: full, student, teacher"),
    ("opd.divergence.support=full", "set tail=none"),
    ("opd.divergence.tail=none", "set tail=bucket or tail=renormalise"),
    ("opd.divergence.topk=0", "at least 1"),
    ("opd.weights.kind=margins", "opd.weights: unknown value 'margins'; known: none"),
    ("opd.selection.kind=some", "opd.selection: unknown value 'some'; known: all"),
    ("opd.objective.aggregation=mean", "known: seq_mean_token_mean, token_mean"),
    ("opd.objective.kind=advantage", "known: distill"),
    ("opd.objective.rollout_is_cap=0", "must be above 0"),
    ("opd.validation_views=[full]", "known: student, teacher"),
    ("opd.validation_views=[]", "at least one"),
    ("opd.on_bad_row=ignore", "known: error, skip"),
    ("opd.head_chunk=0", "at least 1"),
    ("opd.poll_interval=0", "above 0 seconds"),
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
    ("actor_rollout_ref.model.lora_rank=8", "LoRA is not supported yet"),
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
        check_run(config(override))


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
    assert run.stderr.strip().splitlines()[-1].startswith("opd_recipes: opd.divergence: kind=jsd over student's top-K")
    assert "Traceback" not in run.stderr and "Ray" not in run.stdout + run.stderr
