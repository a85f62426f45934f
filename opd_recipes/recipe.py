"""A recipe: one value for each of five parts (views, teacher, divergence, weights, selection) and an objective.

``Recipe.load(config.opd)`` turns the ``opd`` section of the configuration into checked objects; ``check_run(config)``
checks it against the rest of the configuration. Both run before Ray starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from opd_recipes.divergence import Divergence
from opd_recipes.loss import Objective
from opd_recipes.registry import RecipeError, check_types
from opd_recipes.selection import SELECTIONS
from opd_recipes.teacher import TEACHERS
from opd_recipes.views import View
from opd_recipes.weights import WEIGHTS

#: Trainer modes of verl that this package replaces by its own.
TRAINER_MODES = {"opd_sync"}

#: Fields of :class:`Recipe` that stand under their own names in the ``opd`` section.
SETTINGS = ("on_bad_row", "head_chunk", "poll_interval", "seeded_rollouts", "max_skipped_updates")


@dataclass(frozen=True)
class Recipe:
    """The checked ``opd`` section.

    Args:
        student_view, teacher_view: What each model sees of the image.
        teacher: Rule by which the teacher's weights follow the student's.
        divergence: Compares the two at each response token.
        weights: Weight of each token.
        selection: Which rollouts are used.
        objective: From token divergences to a loss.
        validation_views: Views on which validation measures accuracy; ``student`` and ``teacher`` give the gap.
        on_bad_row: ``error`` or ``skip``: what a row does whose image or box cannot give the views.
        head_chunk: Response positions per chunk of the streamed head.
        poll_interval: Seconds between two looks at the rollout queue.
        seeded_rollouts: Whether each response is sampled with a seed of its own, made from ``rollout.seed``, the step, the
            row and the rollout's number, so that a run can be repeated. Costs vLLM some speed in large batches.
        max_skipped_updates: Updates in a row with a gradient that is not finite after which the run stops.
    """

    student_view: View
    teacher_view: View
    teacher: Callable
    divergence: Divergence
    weights: Callable
    selection: Callable
    objective: Objective
    validation_views: tuple[str, ...]
    on_bad_row: str
    head_chunk: int
    poll_interval: float
    seeded_rollouts: bool
    max_skipped_updates: int

    @classmethod
    def load(cls, section: Mapping[str, Any]) -> Recipe:
        """Build a recipe from the ``opd`` section (an OmegaConf node or a plain mapping).

        Raises:
            RecipeError: A part that is missing, unknown, wrongly typed, or that clashes with another.
        """
        section = _plain(section)
        parts = {"views", "teacher", "divergence", "weights", "selection", "objective"}
        hints = get_type_hints(cls)
        _expect("opd", section, parts | set(SETTINGS) | {"validation_views"})
        views = section["views"]
        _expect("opd.views", views, {"student", "teacher"})
        _expect("opd.divergence", section["divergence"], {"kind", "support", "tail", "topk"}, extra={"alpha"})
        _expect("opd.objective", section["objective"], {f.name for f in fields(Objective)})
        check_types("opd.divergence", section["divergence"], {"topk": int, "alpha": float})
        check_types("opd.objective", section["objective"], get_type_hints(Objective))
        check_types("opd", section, {key: hints[key] for key in SETTINGS})
        recipe = cls(
            student_view=View(views["student"], "opd.views.student"),
            teacher_view=View(views["teacher"], "opd.views.teacher"),
            teacher=_checked_teacher(section["teacher"]),
            divergence=Divergence(**section["divergence"]),
            weights=WEIGHTS.build(section["weights"]),
            selection=SELECTIONS.build(section["selection"]),
            objective=Objective(**section["objective"]),
            validation_views=tuple(section["validation_views"]),
            **{key: section[key] for key in SETTINGS},
        )
        recipe._check()
        return recipe

    def _check(self) -> None:
        if self.student_view.provided:
            raise RecipeError(
                "opd.views.student=provided: the 'bbox_images' column holds the teacher's images; use original or redbox"
            )
        for view in self.validation_views:
            if view not in ("student", "teacher"):
                raise RecipeError(f"opd.validation_views: unknown value {view!r}; known: student, teacher")
        if not self.validation_views:
            raise RecipeError("opd.validation_views: name at least one of student, teacher")
        if self.on_bad_row not in ("error", "skip"):
            raise RecipeError(f"opd.on_bad_row: unknown value {self.on_bad_row!r}; known: error, skip")
        if self.head_chunk < 1:
            raise RecipeError(f"opd.head_chunk: must be at least 1, got {self.head_chunk}")
        if self.max_skipped_updates < 1:
            raise RecipeError(f"opd.max_skipped_updates: must be at least 1, got {self.max_skipped_updates}")
        if self.poll_interval <= 0:
            raise RecipeError(f"opd.poll_interval: must be above 0 seconds, got {self.poll_interval}")

    def view(self, name: str) -> View:
        """The view called ``student`` or ``teacher``."""
        return {"student": self.student_view, "teacher": self.teacher_view}[name]

    @property
    def needs_box(self) -> bool:
        return self.student_view.needs_box or self.teacher_view.needs_box


def _plain(section: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else dict(section)


def _expect(where: str, section: Any, required: AbstractSet[str], extra: AbstractSet[str] = frozenset()) -> None:
    if not isinstance(section, Mapping):
        raise RecipeError(f"{where}: expected a mapping, got {section!r}")
    unknown = sorted(set(section) - required - extra)
    if unknown:
        raise RecipeError(
            f"{where}: unknown setting {', '.join(unknown)}; known: {', '.join(sorted(required | extra))}"
        )
    missing = sorted(required - set(section))
    if missing:
        raise RecipeError(f"{where}: {', '.join(missing)} missing")


def _checked_teacher(spec: Any) -> Callable:
    rule = TEACHERS.build(spec)
    rate, every = rule.keywords.get("rate"), rule.keywords.get("every")
    if rate is not None and not 0 < rate <= 1:
        raise RecipeError(f"opd.teacher.rate: the student's share per step must be in (0, 1], got {rate}")
    if every is not None and every < 1:
        raise RecipeError(f"opd.teacher.every: must be at least 1 step, got {every}")
    return rule


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
    _Clash("actor_rollout_ref.model.lora_rank", lambda v: (v or 0) > 0, "must be 0: LoRA is not supported yet"),
    _Clash("actor_rollout_ref.actor.use_kl_loss", bool, "must be false: the distillation loss has no KL term"),
    _Clash(
        "actor_rollout_ref.actor.fsdp_config.model_dtype",
        lambda v: v not in (None, "fp32", "float32"),
        "must be fp32: a teacher that averages in 16 bits never moves (compute is in bf16 all the same, see mixed_precision)",
    ),
    _Clash("algorithm.filter_groups.enable", bool, "must be false: training rollouts have no reward to filter by"),
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
    if files:
        for key in ("data.train_files", "data.val_files", "actor_rollout_ref.model.path"):
            _check_paths(key, OmegaConf.select(config, key))
    return recipe


def _check_paths(key: str, value: Any) -> None:
    """Refuse local files that are not there; addresses (hdfs://, s3://) and hub names are left to verl."""
    for path in [value] if isinstance(value, str) else list(value or []):
        # A name like org/model is either a folder here or a hub name, so only what looks like a path is checked.
        local = "://" not in path and (key.startswith("data.") or path.startswith(("/", "./", "../", "~")))
        if local and not os.path.exists(os.path.expanduser(path)):
            raise RecipeError(f"{key}: {path} does not exist on this machine")
