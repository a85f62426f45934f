"""The ``opd_recipes`` command: one table of commands, each a module that is imported when it is asked for."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

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

#: The others: name -> (module with ``add_arguments(parser)`` and ``run(args) -> exit code``, help).
COMMANDS = {
    "demo": ("opd_recipes.demo", "train the tiny model on the toy data on this machine's CPU, and draw the curve"),
    "report": ("opd_recipes.report", "one HTML file that shows a run: curves, warnings, settings, rollouts"),
    "eval": ("opd_recipes.eval.commands", "score a model on fine-grained benchmarks; compare two models"),
    "gap": ("opd_recipes.eval.gap_command", "accuracy on the full image and on the crop, over checkpoints"),
    "export": ("opd_recipes.export", "write a checkpoint's student or teacher as a Hugging Face folder"),
    "estimate": ("opd_recipes.estimate", "the memory that a run needs on each GPU, before one is touched"),
    "study": (
        "opd_recipes.study",
        "train and measure every recipe, comparator and control on the toy data; can be stopped and continued",
    ),
}


def main() -> None:
    asked = sys.argv[1] if len(sys.argv) > 1 else None
    if asked == "data":
        from data_prep.__main__ import main as prepare

        prepare(sys.argv[2:])
        return
    if asked in HYDRA:
        module, function, _ = HYDRA[asked]
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
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name == asked:
            import_module(module).add_arguments(command)
    args = parser.parse_args()
    sys.exit(import_module(COMMANDS[args.command][0]).run(args))


if __name__ == "__main__":
    main()
