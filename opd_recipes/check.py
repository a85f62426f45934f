"""The whole configuration checked, before Ray starts: settings of verl that cannot go with a recipe, files, versions."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opd_recipes.checkpoints import check_resume
from opd_recipes.families import check_model_files, check_pixels
from opd_recipes.lora import check_lora
from opd_recipes.recipe import Recipe
from opd_recipes.registry import RecipeError

#: Values of ``trainer.v1.trainer_mode`` that this package adds, and verl's own mode behind each.
TRAINER_MODES = {
    "opd_sync": "sync",
    "opd_colocate_async": "colocate_async",
    "opd_separate_async": "separate_async",
}

#: verl's estimators that need rewards and prompts alone.
TASK_ADVANTAGES = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo")

#: verl's name of each aggregation, which its policy-gradient loss reads.
LOSS_AGG_MODES = {"token_mean": "token-mean", "seq_mean_token_mean": "seq-mean-token-mean"}


@dataclass(frozen=True)
class _Clash:
    """A setting of verl that cannot go with this package: where it is, when it clashes, and what to do."""

    key: str
    bad: Callable[[Any], bool]
    why: str


_CLASHES = [
    _Clash("distillation.enabled", bool, "is verl's own distillation; set it to false: the opd section replaces it"),
    _Clash(
        "actor_rollout_ref.actor.strategy",
        lambda v: v != "fsdp2",
        "must be fsdp2: the teacher's update works on FSDP2's sharded parameters",
    ),
    _Clash(
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        lambda v: (v or 1) > 1,
        "must be 1: response positions are picked on one rank; lower data.max_prompt_length or micro-batch sizes instead",
    ),
    _Clash(
        "actor_rollout_ref.rollout.calculate_log_probs", lambda v: not v, "must be true: importance weights need it"
    ),
    _Clash("actor_rollout_ref.rollout.name", lambda v: v != "vllm", "must be vllm"),
    _Clash("actor_rollout_ref.model.use_fused_kernels", bool, "must be false: the streamed head takes its place"),
    _Clash("actor_rollout_ref.actor.use_kl_loss", bool, "must be false: the distillation loss has no KL term"),
    _Clash(
        "actor_rollout_ref.actor.fsdp_config.model_dtype",
        lambda v: v not in (None, "fp32", "float32"),
        "must be fp32: a teacher that averages in 16 bits never moves (compute is in bf16 all the same, see mixed_precision)",
    ),
    _Clash("algorithm.filter_groups.enable", bool, "must be false: training rollouts have no reward to filter by"),
    _Clash(
        "algorithm.rollout_correction.bypass_mode",
        bool,
        "must be false: old log-probs that are the rollout's own leave nothing to correct (and skip the pass that compares)",
    ),
    _Clash(
        "actor_rollout_ref.rollout.logprobs_mode",
        lambda v: v not in (None, "processed_logprobs"),
        "must be processed_logprobs: importance weights compare log-probs after the temperature",
    ),
    _Clash(
        "trainer.max_actor_ckpt_to_keep",
        lambda v: v == 1,
        "must be at least 2, or null for all: verl removes the last checkpoint before the new one is complete, and a run that "
        "dies in between would have none",
    ),
    _Clash("critic.enable", bool, "must be false: the loss has no value function"),
    _Clash("trainer.critic_warmup", lambda v: (v or 0) > 0, "must be 0: the first updates would be skipped"),
    _Clash("algorithm.use_kl_in_reward", bool, "must be false: no reward is used"),
    _Clash(
        "actor_rollout_ref.actor.entropy_coeff",
        lambda v: bool(v),
        "must be 0: the distillation loss has no entropy term",
    ),
    _Clash(
        "actor_rollout_ref.rollout.multi_turn.enable", bool, "must be false: only single-turn rollouts have two views"
    ),
]


def check_run(config: Any, files: bool = True) -> Recipe:
    """Check the whole configuration, and return its recipe.

    Args:
        files: Whether data and model must be on this machine already.

    Raises:
        RecipeError: The first setting that is wrong or that clashes, named with the remedy.
    """
    from omegaconf import OmegaConf

    if OmegaConf.select(config, "opd") is None:
        raise RecipeError("the configuration has no 'opd' section; start from a recipe, e.g. --config-name vision_opd")
    recipe = Recipe.load(config.opd)
    mode = config.trainer.v1.trainer_mode
    if mode not in TRAINER_MODES:
        raise RecipeError(f"trainer.v1.trainer_mode={mode}: use one of {', '.join(sorted(TRAINER_MODES))}")
    for clash in _CLASHES:
        value = OmegaConf.select(config, clash.key)
        if clash.bad(value):
            raise RecipeError(f"{clash.key}={value}: {clash.why}")
    rollout = config.actor_rollout_ref.rollout
    if rollout.temperature <= 0:
        raise RecipeError(
            f"actor_rollout_ref.rollout.temperature={rollout.temperature}: on-policy training samples; use 1.0"
        )
    if (rollout.top_p, rollout.top_k) != (1, -1):
        raise RecipeError(
            f"actor_rollout_ref.rollout.top_p={rollout.top_p}, top_k={rollout.top_k}: a truncated sampler makes the "
            "importance weights wrong; use top_p=1, top_k=-1"
        )
    if recipe.seeded_rollouts and config.trainer.device == "cpu" and rollout.enable_chunked_prefill:
        raise RecipeError(
            "opd.seeded_rollouts=true with actor_rollout_ref.rollout.enable_chunked_prefill=true: vLLM's CPU backend stops on "
            "a seeded prompt that is prefilled in parts; set enable_chunked_prefill=false, as +overlay=cpu does"
        )
    check_lora(config)
    check_pixels(config.data.get("mm_processor_kwargs"))
    _check_mode(config, recipe)
    _check_objective(config, recipe)
    _check_selection(config, recipe)
    if files:
        for key in ("data.train_files", "data.val_files", "actor_rollout_ref.model.path", "opd.teacher.path"):
            _check_paths(key, OmegaConf.select(config, key))
        model = config.actor_rollout_ref.model
        check_model_files(model.path, bool(model.use_remove_padding))
        check_resume(config)
    return recipe


def updates_once(config: Any) -> bool:
    """Whether every batch that is sampled is one update of the weights."""
    actor, v1 = config.actor_rollout_ref.actor, config.trainer.v1
    # A step of separate_async is several batches, each as large as a mini-batch.
    batches = v1.get(TRAINER_MODES[v1.trainer_mode], {}).get("parameter_sync_step", 1)
    return actor.ppo_mini_batch_size * batches == config.data.train_batch_size and actor.ppo_epochs == 1


def _check_mode(config: Any, recipe: Recipe) -> None:
    v1, rollout, data = config.trainer.v1, config.actor_rollout_ref.rollout, config.data
    mode = v1.trainer_mode
    if mode == "opd_sync":
        return
    if recipe.seeded_rollouts:
        raise RecipeError(
            f"opd.seeded_rollouts=true with trainer.v1.trainer_mode={mode}: a response that goes on with newer weights would "
            "draw its first random numbers again, and the order of updates is not repeated anyway; set it to false"
        )
    if recipe.trace["rows"]:
        raise RecipeError(
            f"opd.trace.rows={recipe.trace['rows']} with trainer.v1.trainer_mode={mode}: a trace stops the rollout server, "
            "which has unfinished responses in this mode; set it to 0"
        )
    if "mean_entropy" in recipe.selection.needs:
        raise RecipeError(
            f"opd.selection.kind={config.opd.selection.kind} with trainer.v1.trainer_mode={mode}: it needs each response's "
            "entropy, which verl drops where responses go on with newer weights; use opd_sync, or kind=all or random"
        )
    if mode != "opd_separate_async":
        return
    mini, steps = config.actor_rollout_ref.actor.ppo_mini_batch_size, v1.separate_async.parameter_sync_step
    if data.train_batch_size != mini * steps:
        raise RecipeError(
            f"data.train_batch_size={data.train_batch_size} with trainer.v1.trainer_mode={mode}: must be actor_rollout_ref."
            f"actor.ppo_mini_batch_size={mini} times trainer.v1.separate_async.parameter_sync_step={steps}"
        )
    if not (rollout.nnodes and rollout.n_gpus_per_node):
        raise RecipeError(
            f"actor_rollout_ref.rollout.nnodes={rollout.nnodes}, n_gpus_per_node={rollout.n_gpus_per_node} with trainer.v1."
            f"trainer_mode={mode}: the devices for rollouts alone; set both above 0"
        )
    if rollout.checkpoint_engine.backend == "naive":
        raise RecipeError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend=naive with trainer.v1.trainer_mode={mode}: it cannot send "
            "weights to other devices; set nccl (on CPU: +overlay=[cpu,...,cpu_separate])"
        )


def _check_objective(config: Any, recipe: Recipe) -> None:
    estimator, kind = config.algorithm.adv_estimator, recipe.objective.kind
    if (estimator == "opd_topk") != (kind == "advantage"):
        raise RecipeError(
            f"algorithm.adv_estimator={estimator} with opd.objective.kind={kind}: the estimator opd_topk and the objective "
            "advantage belong together; use +overlay=advantage for both, or adv_estimator=grpo and kind=distill for neither"
        )
    if kind == "distill":
        for name in ("rollout_is", "rollout_rs"):
            if (value := config.algorithm.rollout_correction.get(name)) is not None:
                raise RecipeError(
                    f"algorithm.rollout_correction.{name}={value} with opd.objective.kind=distill: it corrects verl's policy "
                    "gradient, which is not used; set it to null (the loss has opd.objective.rollout_is_cap)"
                )
        return
    mode, expected = config.actor_rollout_ref.actor.loss_agg_mode, LOSS_AGG_MODES[recipe.objective.aggregation]
    if mode != expected:
        raise RecipeError(
            f"actor_rollout_ref.actor.loss_agg_mode={mode} with opd.objective.aggregation={recipe.objective.aggregation}: "
            f"verl's policy-gradient loss averages by the former; set loss_agg_mode={expected}"
        )
    task = recipe.objective.task_advantage
    if task is not None and task not in TASK_ADVANTAGES:
        raise RecipeError(
            f"opd.objective.task_advantage: unknown value {task!r}; known: {', '.join(TASK_ADVANTAGES)} (others need a critic "
            "or columns that are not computed)"
        )


def _check_selection(config: Any, recipe: Recipe) -> None:
    actor = config.actor_rollout_ref.actor
    if not recipe.selects:
        return
    if recipe.divergence.topk < 2:
        raise RecipeError(
            f"opd.selection with opd.divergence.topk={recipe.divergence.topk}: a rollout's utility is measured on "
            "the student's top-K ids, and over one id it is always 0; set opd.divergence.topk=100"
        )
    if not actor.use_dynamic_bsz:
        raise RecipeError(
            "actor_rollout_ref.actor.use_dynamic_bsz=false with opd.selection: the number of selected rollouts is not always a "
            "multiple of the micro-batch; set use_dynamic_bsz=true (ppo_max_token_len_per_gpu then limits memory)"
        )
    if not updates_once(config):
        raise RecipeError(
            f"opd.selection with actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}, ppo_epochs="
            f"{actor.ppo_epochs} and data.train_batch_size={config.data.train_batch_size}: selected rollouts are one update; "
            "set ppo_mini_batch_size to the batch and ppo_epochs=1, or opd.selection.kind=all"
        )
    if actor.shuffle:
        raise RecipeError(
            "actor_rollout_ref.actor.shuffle=true: the selection could not match rows and utilities; set it to false"
        )


def _check_paths(key: str, value: Any) -> None:
    """Refuse local files that are not there; addresses (hdfs://, s3://) and hub names are left to verl."""
    for path in [value] if isinstance(value, str) else list(value or []):
        # A name like org/model is either a folder here or a hub name, so only what looks like a path is checked.
        local = "://" not in path and (key.startswith("data.") or path.startswith(("/", "./", "../", "~")))
        if local and not os.path.exists(os.path.expanduser(path)):
            raise RecipeError(f"{key}: {path} does not exist on this machine")
