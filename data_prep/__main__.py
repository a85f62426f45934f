"""``python -m data_prep <command> --out PATH``: write a dataset in verl's parquet columns.

A command is a module with ``add_arguments(parser)`` and ``run(args)``; only the chosen one is imported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

#: Subcommand -> (module, one line for ``--help``).
COMMANDS = {
    "toy": ("data_prep.toy.dataset", "coloured shapes with a red box, drawn on the fly; no download"),
    "vision-opd-6k": (
        "data_prep.vision_opd_6k",
        "the published Vision-OPD-6K: boxed images and evidence crops from a local folder",
    ),
    "pairs": ("data_prep.pairs", "image-question pairs in common layouts, for RP-OPSD and OPSD"),
    "boxes": ("data_prep.boxes", "evidence boxes of any convention as bbox in pixels"),
    "check": ("data_prep.check", "rows against a recipe and a model's processor, before any GPU is touched"),
    "inspect": ("data_prep.inspect", "a page of rows as the recipe shows them, to look at"),
    "synthesize": (
        "data_prep.synthesize",
        "questions about details of unlabelled images, from any OpenAI-compatible server",
    ),
    "render": ("data_prep.render", "one view of a recipe, drawn into plain verl rows for GRPO, SFT and validation"),
}


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m data_prep", description="Prepare a dataset for training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in argv[:1]:
            module = import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
