"""Four questions on colours for ``opd_recipes eval``, and the command as a person starts it, in this process."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from PIL import Image

from opd_recipes.eval import commands
from tests.unit.synthesize_server import FakeServer, Say

COLOURS = ("red", "green", "blue", "red")


def write_rows(path: Path, colours=COLOURS) -> Path:
    """Questions with four options each; red is A, green B, blue C."""
    lines = []
    for number, colour in enumerate(colours):
        image = path.parent / f"{number}.png"
        Image.new("RGB", (8, 8), colour).save(image)
        options = {"A": "red", "B": "green", "C": "blue", "D": "pink"}
        lines.append({"id": f"q{number}", "question": f"Which colour has {number}?", "images": [image.name]})
        lines[-1] |= {"options": options, "answer": colour, "category": {"half": "first" if number < 2 else "second"}}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def right(stage: str, prompt: str, number: int) -> Say:
    """Every answer is right."""
    return Say("Answer: " + {"red": "A", "green": "B", "blue": "C"}[COLOURS[int(prompt.split("?")[0][-1])]])


def call(*options) -> int:
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser)
    return commands.run(parser.parse_args([str(option) for option in options]))


def evaluate(out: Path, *options) -> int:
    return call("--out", out, *options)


def of_server(rows: Path, server: FakeServer, model: str = "m"):
    """Options that ask a server that the test has started."""
    quick = ("--attempts", 2, "--max-wait", 0.01, "--timeout", 20)
    return ("--benchmarks", "custom", "--data", f"custom={rows}", "--server", server.url, "--model", model, *quick)


def results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())["custom"]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
