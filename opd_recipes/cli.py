"""The ``opd_recipes`` command: ``train`` (the same as ``python -m opd_recipes``), ``grpo``, ``sft``, ``data``, ``study``,
``demo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

#: Commands whose arguments are Hydra's, which reads sys.argv itself: name -> (module, function, help).
HYDRA = {
    "train": ("opd_recipes.main", "main", "train a recipe: opd_recipes train --config-name vision_opd [overrides]"),
    "grpo": (
        "opd_recipes.comparators",
        "grpo",
        "train by reward with verl's own trainer: opd_recipes grpo [overrides]",
    ),
    "sft": ("opd_recipes.comparators", "sft", "train on answers with verl's own trainer: opd_recipes sft [overrides]"),
}


def main() -> None:
    if sys.argv[1:2] == ["data"]:
        from data_prep.__main__ import main as prepare

        prepare(sys.argv[2:])
        return
    if sys.argv[1:2] and sys.argv[1] in HYDRA:
        module, function, _ = HYDRA[sys.argv[1]]
        del sys.argv[1]
        getattr(import_module(module), function)()
        return
    parser = argparse.ArgumentParser(
        prog="opd_recipes", description="On-policy distillation of vision-language models from privileged views."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, _, summary) in HYDRA.items():
        commands.add_parser(name, help=summary)
    commands.add_parser("data", help="prepare data, the same as python -m data_prep: opd_recipes data --help")
    add_demo(commands)
    add_study(commands)
    args = parser.parse_args()
    run: Callable[[argparse.Namespace], int] = args.run
    sys.exit(run(args))


def add_demo(commands) -> None:
    from opd_recipes.demo import STEPS, run_demo

    demo = commands.add_parser(
        "demo", help="train the tiny model on the toy data on this machine's CPU, and draw the curve"
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for data, logs and results")
    demo.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each seed")
    demo.add_argument("--steps", type=int, default=STEPS, help="training steps of each run")
    demo.add_argument("--publish", type=Path, help="also write vision_opd_toy.json and .png to this folder")
    demo.add_argument("overrides", nargs="*", help="more configuration overrides, e.g. opd.teacher.rate=0.05")
    demo.set_defaults(run=lambda a: run_demo(a.out, a.seeds, a.steps, a.publish, a.overrides))


def add_study(commands) -> None:
    from opd_recipes.study import SEEDS, STEPS, run_study
    from opd_recipes.study_variants import DEFAULT_OUT

    study = commands.add_parser(
        "study",
        help="train and measure every recipe, comparator and control on the toy data; can be stopped and continued",
    )
    study.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for data, logs and results")
    study.add_argument(
        "--seeds", type=int, nargs="+", default=list(SEEDS), help="one run of each variant for each seed"
    )
    study.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these variants only")
    study.add_argument("--publish", type=Path, help="also write study.json, study.md and study.png to this folder")
    study.add_argument("--steps", type=int, default=STEPS, help="training steps of each run")
    study.add_argument("--jobs", type=int, default=1, help="runs at the same time; each needs about 9 GB")
    study.set_defaults(run=lambda a: run_study(a.out, a.seeds, a.only, a.publish, a.steps, a.jobs))


if __name__ == "__main__":
    main()
