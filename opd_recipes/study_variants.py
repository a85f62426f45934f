"""What the study compares: recipes, comparators and controls, each as the command that trains it on the toy data."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from opd_recipes.runs import BASE

#: Where a study keeps its runs unless told otherwise.
DEFAULT_OUT = Path("runs/study")

#: Views of the toy data (overlay/toy.yaml), for variants whose teacher looks at something else.
MARKED = "{kind: redbox, width: 2, expand: 0.0}"
CUT_OUT = "{kind: crop, zoom: 2.0, padding: 0.25, min_size: 48}"


@dataclass(frozen=True)
class Variant:
    """One row of the study.

    Args:
        name: As ``--only`` and the results call it.
        group: Heading under which it is drawn.
        recipe: ``--config-name``; ``grpo`` and ``sft`` are trained by verl's own trainers.
        overlays: Beside those that every recipe has.
        overrides: What is different from the recipe.
    """

    name: str
    group: str
    recipe: str = "vision_opd"
    overlays: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def _selections() -> list[Variant]:
    return [
        Variant(
            f"{kind}_{percent}",
            "selection",
            overrides=(f"opd/selection={kind}", f"opd.selection.budget={percent / 100:g}"),
        )
        for kind in ("random", "entropy", "learned")
        for percent in (10, 25, 50)
    ]


VARIANTS = [
    Variant("vision_opd", "methods"),
    Variant("rp_opsd", "methods", "rp_opsd", overlays=("toy_rp_opsd",)),
    Variant("opd_v", "methods", "opd_v", overlays=("toy_opd_v",)),
    Variant("bas_opd", "methods", "bas_opd"),
    Variant("opsd", "methods", "opsd", overlays=("toy_opsd",)),
    Variant("grpo", "comparators", "grpo"),
    Variant("sft", "comparators", "sft"),
    Variant("teacher_current", "teacher", overrides=("opd/teacher=current",)),
    Variant("teacher_frozen", "teacher", overrides=("opd/teacher=frozen",)),
    Variant("teacher_trust_region", "teacher", overrides=("opd/teacher=trust_region", "opd.teacher.rate=0.05")),
    Variant("view_same", "teacher's view", overrides=(f"opd.views.teacher=[{MARKED}]",)),
    Variant("view_noise", "teacher's view", overrides=(f"opd.views.teacher=[{MARKED}, {CUT_OUT}, {{kind: noise}}]",)),
    Variant("forward_kl", "divergence", overrides=("opd/divergence=forward_kl",)),
    Variant("reverse_kl", "divergence", overrides=("opd/divergence=reverse_kl",)),
    Variant(
        "jsd_full",
        "divergence",
        overrides=("opd.divergence.support=full", "opd.divergence.tail=none"),
    ),
    Variant("sampled_token", "divergence", overrides=("opd/divergence=sampled_kl",)),
    Variant(
        "advantage",
        "divergence",
        overlays=("advantage",),
        overrides=("opd/divergence=sampled_kl", "opd.divergence.estimator=k1", "opd.objective.discount=0.0"),
    ),
    *_selections(),
]

#: Not trained: the accuracy before training, which is the same for all runs.
BASE_MODEL = Variant("base", "base")


def named(names: Sequence[str]) -> list[Variant]:
    """The variants of these names, in the order of the table; all of them for no name.

    Raises:
        ValueError: A name that no variant has.
    """
    known = [variant.name for variant in VARIANTS]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown variant {', '.join(unknown)}; known: {', '.join(known)}")
    return [variant for variant in VARIANTS if not names or variant.name in names]


@dataclass(frozen=True)
class Files:
    """The toy data as the study has it, all in ``folder``."""

    folder: Path

    train = property(lambda self: self.folder / "train.parquet")
    val = property(lambda self: self.folder / "val.parquet")
    #: For verl's own trainers: the full image with the box, and validation rows of both views.
    train_full = property(lambda self: self.folder / "train_full.parquet")
    val_full = property(lambda self: self.folder / "val_full.parquet")
    val_crop = property(lambda self: self.folder / "val_crop.parquet")


def commands(
    variant: Variant, seed: int, steps: int, folder: Path, files: Files, extra: Sequence[str] = ()
) -> list[list[str]]:
    """The commands that train a variant and measure it, in order; the last one's metrics have the accuracy.

    Args:
        folder: Of the run.
        extra: Overrides of every training command.
    """
    output = [f"hydra.run.dir={folder}/hydra", "trainer.logger=[console,file]", "trainer.resume_mode=disable"]
    output.append(f"trainer.default_local_dir={folder}/checkpoints")
    training = [f"trainer.total_training_steps={steps}", *output, *extra]
    if variant is BASE_MODEL:
        return [_recipe(variant, seed, files, [*_MEASURE, *output])]
    if variant.recipe == "grpo":
        return [_grpo(BASE, seed, files, training)]
    if variant.recipe == "sft":
        # Its own trainer measures losses, not answers: the model that it leaves is measured as GRPO's is.
        trained = folder / "checkpoints" / f"global_step_{steps}" / "huggingface"
        return [_sft(seed, files, training), _grpo(trained, seed, files, [*_MEASURE, *output])]
    return [_recipe(variant, seed, files, training)]


_MEASURE = ["trainer.val_only=true", "trainer.val_before_train=true"]


def _recipe(variant: Variant, seed: int, files: Files, more: Sequence[str]) -> list[str]:
    overlays = ",".join(["cpu", "toy", *variant.overlays, "slim", "study"])
    return [
        *(sys.executable, "-m", "opd_recipes", "--config-name", variant.recipe, f"+overlay=[{overlays}]"),
        f"actor_rollout_ref.model.path={BASE}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"data.seed={seed}",
        f"data.train_files={files.train}",
        f"data.val_files={files.val}",
        *variant.overrides,
        *more,
    ]


def _grpo(model: Path, seed: int, files: Files, more: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "opd_recipes.cli", "grpo", "+overlay=[cpu,toy_grpo,slim,study_grpo]"),
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"data.seed={seed}",
        f"data.train_files={files.train_full}",
        f"data.val_files=[{files.val_full},{files.val_crop}]",
        *more,
    ]


def _sft(seed: int, files: Files, more: Sequence[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "opd_recipes.cli", "sft", "+overlay=[cpu_sft,toy_sft,study_sft]"),
        f"model.path={BASE}",
        f"+data.seed={seed}",
        f"data.train_files={files.train_full}",
        *more,
    ]


def shown(command: Sequence[str], out: Path) -> str:
    """A command as a person would type it here, the same on every machine: the study's folder is shown as its default."""
    names = {str(out): str(DEFAULT_OUT), f"{BASE.parents[2]}/": ""}
    words = list(command[1:])
    for name, short in names.items():
        words = [word.replace(name, short) for word in words]
    words = ["opd_recipes", *words[2:]] if words[:2] == ["-m", "opd_recipes.cli"] else ["python", *words]
    left_out = ("hydra.run.dir=", "trainer.logger=", "trainer.resume_mode=", "trainer.default_local_dir=")
    return shlex.join(word for word in words if not word.startswith(left_out))
