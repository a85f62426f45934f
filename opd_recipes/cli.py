"""The ``opd_recipes`` command: ``train`` (the same as ``python -m opd_recipes``) and ``demo``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> None:
    # Hydra reads sys.argv itself, so training is dispatched before argparse sees its arguments.
    if sys.argv[1:2] == ["train"]:
        from opd_recipes.main import main as train

        del sys.argv[1]
        train()
        return
    from opd_recipes.demo import STEPS, run_demo

    parser = argparse.ArgumentParser(
        prog="opd_recipes", description="On-policy distillation of vision-language models from privileged views."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="train a recipe: opd_recipes train --config-name vision_opd [overrides]")
    demo = commands.add_parser(
        "demo", help="train the tiny model on the toy data on this machine's CPU, and draw the curve"
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for data, logs and results")
    demo.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run for each seed")
    demo.add_argument("--steps", type=int, default=STEPS, help="training steps of each run")
    demo.add_argument("--publish", type=Path, help="also write vision_opd_toy.json and .png to this folder")
    demo.add_argument("overrides", nargs="*", help="more configuration overrides, e.g. opd.teacher.rate=0.05")
    args = parser.parse_args()

    sys.exit(run_demo(args.out, args.seeds, args.steps, args.publish, args.overrides))


if __name__ == "__main__":
    main()
