"""A recipe: one value for each of five parts (views, teacher, divergence, weights, selection) and an objective.

``Recipe.load(config.opd)`` turns the ``opd`` section of the configuration into checked objects;
:func:`opd_recipes.check.check_run` checks it against the rest of the configuration. Both run before Ray starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from opd_recipes.divergence import Divergence
from opd_recipes.loss import Objective
from opd_recipes.registry import RecipeError, check_types
from opd_recipes.selection import SELECTIONS, All, Selection
from opd_recipes.teacher import Teacher
from opd_recipes.views import View
from opd_recipes.weights import Weights

#: Fields of :class:`~opd_recipes.loss.Objective` that may be left out.
ADVANTAGE_SETTINGS = {"coefficient", "discount", "task_advantage"}

#: Fields of :class:`Recipe` that stand under their own names in the ``opd`` section.
SETTINGS = (
    "on_bad_row",
    "head_chunk",
    "poll_interval",
    "stall_timeout",
    "seeded_rollouts",
    "max_skipped_updates",
    "oracle_every",
)


@dataclass(frozen=True)
class Recipe:
    """The checked ``opd`` section.

    Args:
        student_view, teacher_view: What each model sees of the image.
        negative_view: What the teacher sees the second time, for weights that contrast two views; else None.
        teacher_hint: Text behind the question in the teacher's prompt, with ``{answer}`` for the reference answer; or None.
        teacher: How the teacher's weights follow the student's.
        divergence: Compares the two at each response token.
        weights: Weight of each token.
        selection: Which rollouts are used.
        objective: From token divergences to a loss.
        validation_views: Views on which validation measures accuracy, by name; ``student`` and ``teacher`` give the gap.
        on_bad_row: ``error`` or ``skip``: what a row does whose image or box cannot give the views.
        head_chunk: Response positions per chunk of the streamed head.
        poll_interval: Seconds between two looks at the rollout queue.
        stall_timeout: Seconds without a finished prompt or step after which the run stops instead of waiting on.
        seeded_rollouts: Whether each response is sampled with a seed of its own, made from ``rollout.seed``, the step, the
            row and the rollout's number, so that a run can be repeated. Costs vLLM some speed in large batches.
        max_skipped_updates: Updates in a row with a gradient that is not finite after which the run stops.
        oracle_every: Steps between two looks at which share of the best utility a selection has captured; such a look scores
            all rollouts. 0: never.
        trace: ``rows`` of the validation set of which every validation writes each token's divergence and alternatives
            (:mod:`opd_recipes.trace`) to ``folder``; 0: none.
    """

    student_view: View
    teacher_view: View
    negative_view: View | None
    teacher_hint: str | None
    teacher: Teacher
    divergence: Divergence
    weights: Weights
    selection: Selection
    objective: Objective
    validation_views: dict[str, View]
    on_bad_row: str
    head_chunk: int
    poll_interval: float
    stall_timeout: float
    seeded_rollouts: bool
    max_skipped_updates: int
    oracle_every: int
    trace: dict[str, Any]

    @classmethod
    def load(cls, section: Mapping[str, Any]) -> Recipe:
        """Build a recipe from the ``opd`` section (an OmegaConf node or a plain mapping).

        Raises:
            RecipeError: A part that is missing, unknown, wrongly typed, or that clashes with another.
        """
        section = _plain(section)
        parts = {"views", "teacher", "divergence", "weights", "selection", "objective"}
        hints = get_type_hints(cls)
        _expect("opd", section, parts | set(SETTINGS) | {"teacher_hint", "validation_views", "trace"})
        _expect("opd.trace", section["trace"], {"rows", "folder"})
        check_types("opd.trace", section["trace"], {"rows": int, "folder": str})
        _expect("opd.views", section["views"], {"student", "teacher"}, extra={"negative"})
        _expect("opd.divergence", section["divergence"], {"kind", "support", "tail", "topk"}, {"alpha", "estimator"})
        objective = {f.name for f in fields(Objective)}
        _expect("opd.objective", section["objective"], objective - ADVANTAGE_SETTINGS, extra=ADVANTAGE_SETTINGS)
        check_types("opd.divergence", section["divergence"], {"topk": int, "alpha": float, "estimator": str})
        check_types("opd.objective", section["objective"], get_type_hints(Objective))
        check_types("opd", section, {key: hints[key] for key in (*SETTINGS, "teacher_hint")})
        views = {
            name: View(steps, f"opd.views.{name}") for name, steps in section["views"].items() if steps is not None
        }
        if missing := {"student", "teacher"} - views.keys():
            raise RecipeError(f"opd.views.{min(missing)}: name at least one step")
        recipe = cls(
            student_view=views["student"],
            teacher_view=views["teacher"],
            negative_view=views.get("negative"),
            teacher_hint=section["teacher_hint"],
            teacher=Teacher.load(section["teacher"]),
            divergence=Divergence(**section["divergence"]),
            weights=Weights.load(section["weights"]),
            selection=SELECTIONS.build(section["selection"])(),
            objective=Objective(**section["objective"]),
            validation_views=_validation_views(section["validation_views"], views),
            trace=dict(section["trace"]),
            **{key: section[key] for key in SETTINGS},
        )
        recipe._check()
        recipe._check_objective()
        return recipe

    def _check(self) -> None:
        if self.student_view.provided:
            raise RecipeError(
                "opd.views.student=provided: the 'bbox_images' column holds the teacher's images; use original or redbox"
            )
        if self.weights.contrast and self.negative_view is None:
            raise RecipeError(
                f"opd.weights.kind={self.weights.name} compares two views of the teacher, but opd.views.negative is not set; "
                "name one, e.g. the teacher's steps and a mask_rectangle behind them"
            )
        if self.negative_view is not None and not self.weights.contrast:
            raise RecipeError(
                "opd.views.negative is set, but opd.weights.kind=none does not read it, and it would cost a teacher pass; "
                "set opd.weights.kind=margin or opd.views.negative=null"
            )
        if self.negative_view is not None and self.negative_view.spec == self.teacher_view.spec:
            raise RecipeError(
                "opd.views.negative is the same as opd.views.teacher: every margin, so every weight, would be 0"
            )
        if self.teacher_hint is not None and "{answer}" not in self.teacher_hint:
            raise RecipeError(
                f"opd.teacher_hint: {self.teacher_hint!r} has no {{answer}}; write it where the answer goes"
            )
        if self.on_bad_row not in ("error", "skip"):
            raise RecipeError(f"data.on_bad_row: unknown value {self.on_bad_row!r}; known: error, skip")
        if self.head_chunk < 1:
            raise RecipeError(f"opd.head_chunk: must be at least 1, got {self.head_chunk}")
        if self.max_skipped_updates < 1:
            raise RecipeError(f"opd.max_skipped_updates: must be at least 1, got {self.max_skipped_updates}")
        if self.oracle_every < 0 or (self.oracle_every and not self.selects):
            raise RecipeError(
                f"opd.oracle_every={self.oracle_every}: "
                + (
                    "must not be negative"
                    if self.oracle_every < 0
                    else "opd.selection.kind=all has nothing to capture; set 0"
                )
            )
        if self.trace["rows"] < 0:
            raise RecipeError(f"opd.trace.rows: must not be negative, got {self.trace['rows']}")
        if self.poll_interval <= 0:
            raise RecipeError(f"opd.poll_interval: must be above 0 seconds, got {self.poll_interval}")
        if self.stall_timeout <= 0:
            raise RecipeError(f"opd.stall_timeout: must be above 0 seconds, got {self.stall_timeout}")

    def _check_objective(self) -> None:
        objective, divergence = self.objective, self.divergence
        if self.weights.normaliser != "valid_tokens" and objective.aggregation != "token_mean":
            raise RecipeError(
                f"opd.weights.normaliser={self.weights.normaliser} is a denominator over all tokens, but "
                f"opd.objective.aggregation={objective.aggregation} divides by each response; set aggregation=token_mean"
            )
        if objective.kind == "distill":
            if divergence.estimator == "k1":
                raise RecipeError(
                    "opd.divergence.estimator=k1 with opd.objective.kind=distill: its derivative is 0 in expectation, so it "
                    "teaches nothing; use estimator=k2, or kind=advantage (+overlay=advantage)"
                )
            return
        if not divergence.sampled and objective.discount == 0:
            raise RecipeError(
                "opd.objective.kind=advantage with discount=0: a divergence of whole distributions does not depend on which "
                "token was sampled, so as that token's advantage it is noise with mean 0. Set discount above 0 (a token "
                "then answers for the divergence after it), or compare the sampled token: divergence.kind=sampled_kl"
            )
        for part, plain in (("weights", not self.weights.contrast), ("selection", not self.selects)):
            if not plain:
                raise RecipeError(
                    f"opd.{part} with opd.objective.kind=advantage: verl's policy-gradient loss knows no {part}; "
                    f"use kind=distill, or set opd.{part}.kind={'none' if part == 'weights' else 'all'}"
                )
        for name in ("rollout_is_cap", "is_clip"):
            if getattr(objective, name) is not None:
                raise RecipeError(
                    f"opd.objective.{name} with kind=advantage: importance weights and clipping are then verl's own "
                    "(algorithm.rollout_correction, actor.clip_ratio); set it to null, as +overlay=advantage does"
                )

    @property
    def selects(self) -> bool:
        """Whether some rollouts may be left out, so that the utility of those that are used is measured."""
        return not isinstance(self.selection, All)

    @property
    def needs_answer(self) -> str | None:
        """The setting for which training rows need ``reward_model.ground_truth``; None: they need no answer."""
        if self.teacher_hint is not None:
            return "opd.teacher_hint"
        return None if self.objective.task_advantage is None else "opd.objective.task_advantage"

    @property
    def compares_in_update(self) -> bool:
        """Whether teacher and student are compared inside the update (else in a pass of its own before it)."""
        return self.objective.kind == "distill"

    @property
    def views(self) -> dict[str, View]:
        """What training shows of a row: ``student``, ``teacher`` and, where there is one, ``negative``."""
        views = {"student": self.student_view, "teacher": self.teacher_view}
        return views if self.negative_view is None else {**views, "negative": self.negative_view}


def _validation_views(section: Any, training: Mapping[str, View]) -> dict[str, View]:
    """Items are ``student``, ``teacher`` (the recipe's own views) or ``{name: steps}``, a view for validation alone."""
    views: dict[str, View] = {}
    for item in section:
        if isinstance(item, Mapping):
            views |= {name: View(steps, f"opd.validation_views.{name}") for name, steps in item.items()}
        elif item in ("student", "teacher"):
            views[item] = training[item]
        else:
            raise RecipeError(
                f"opd.validation_views: unknown value {item!r}; known: student, teacher, or {{name: steps}}"
            )
    if not views:
        raise RecipeError("opd.validation_views: name at least one of student, teacher, or give {name: steps}")
    return views


def _plain(section: Any) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue

    if not OmegaConf.is_config(section):
        return dict(section)
    try:
        return OmegaConf.to_container(section, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        key = str(error.full_key).removeprefix("opd.")
        raise RecipeError(f"opd.{key}: must be set") from None


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
