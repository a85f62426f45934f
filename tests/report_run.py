"""A run's folder made by code: metrics as verl's file logger writes them, Hydra's configuration, traced rollouts."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import orjson
import yaml
from PIL import Image, ImageDraw

STEPS = 30
#: What the paper's recipe says, and what this run changes.
OVERRIDES = ["opd.teacher.rate=0.1", "trainer.total_training_steps=30", "trainer.default_local_dir=/runs/a"]


def metrics(step: int, **changes: float) -> dict[str, float]:
    """A healthy step of 30; ``changes`` have ``__`` for ``/`` in their names."""
    share = step / STEPS
    values = {
        "actor/loss": 0.15 - 0.1 * share,
        "actor/grad_norm": 0.4,
        "actor/lr": 2e-6,
        "opd/divergence": 0.15 - 0.1 * share,
        "opd/entropy": 0.6 - 0.1 * share,
        "opd/teacher_entropy": 0.2,
        "opd/student_mass": 0.98,
        "opd/teacher_mass": 0.985,
        "opd/importance_weight": 1.0,
        "opd/importance_capped": 0.001,
        "opd/rollout_gap": 0.01,
        "opd/teacher_tokens": 1984.0,
        "opd/skipped_updates": 0.0,
        "opd/failed_rollouts": 0.0,
        "response_length/mean": 100 - 5 * share,
        "response_length/max": 200.0,
        "response_length/clip_ratio": 0.02,
        "timing_s/gen": 3.0,
        "timing_s/update_actor": 2.0,
        "timing_s/update_weights": 0.25,
        "timing_s/adv": 0.01,
        "timing_s/step": 5.5,
    }
    if step % 10 == 0:
        values |= {
            "timing_s/testing": 2.0,
            "val-core/toy@student/acc/mean@1": 0.55 + 0.25 * share,
            "val-core/toy@teacher/acc/mean@1": 0.95 - 0.03 * share,
        }
    return values | {key.replace("__", "/"): value for key, value in changes.items()}


def write_metrics(file: Path, entries: dict[int, dict[str, float]]) -> Path:
    """As verl's logger does, by orjson: NaN becomes null."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"".join(orjson.dumps({"step": step, "data": data}) + b"\n" for step, data in entries.items()))
    return file


@cache
def composed(recipe: str, *overrides: str) -> str:
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    with initialize_config_module("opd_recipes.config", version_base=None):
        return OmegaConf.to_yaml(compose(recipe, overrides=list(overrides)))


def write_config(folder: Path, recipe: str = "vision_opd", *overrides: str) -> None:
    place = folder / "hydra" / ".hydra"
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.yaml").write_text(composed(recipe, *overrides))
    (place / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"job": {"config_name": recipe}}}))


def token(text: str, divergence: float | None = 0.02, **changes) -> dict:
    student = 0.8 if divergence is None or divergence < 0.1 else 0.3
    return {
        "text": text,
        "id": 17,
        "divergence": divergence,
        "weight": 1.0,
        "student_logp": math.log(student),
        "teacher_logp": math.log(0.9),
        "entropy": 0.5,
        "student_top": [[text, student], ["blue", 0.1], [" the", 0.05]],
        "teacher_top": [[text, 0.9], ["green", 0.04]],
        **changes,
    }


def trace(name: str, step: int, tokens: list[dict], score: float | None = 1.0, **changes) -> dict:
    return {
        "step": step,
        "id": name,
        "question": "What colour is the square in the red box?",
        "reference": "red",
        "score": score,
        "student_image": f"images/{name}_student.png",
        "teacher_image": f"images/{name}_teacher.png",
        "negative_image": None,
        "bbox": [160, 120, 240, 200],
        "original_size": [800, 600],
        "response": "".join(str(one["text"]) for one in tokens if isinstance(one, dict) and "text" in one),
        "tokens": tokens,
        **changes,
    }


def write_traces(folder: Path, rows: list[dict], images: bool = True) -> None:
    """Rows into one file for each step; a scene and its crop for each id."""
    place = folder / "traces"
    (place / "images").mkdir(parents=True, exist_ok=True)
    for row in rows:
        with (place / f"step_{row['step']:06d}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if images:
            scene = Image.new("RGB", (800, 600), (215, 225, 235))
            draw = ImageDraw.Draw(scene)
            draw.ellipse((420, 250, 700, 520), fill=(70, 120, 90))
            draw.rectangle((170, 130, 230, 190), fill=(200, 30, 40))
            scene.save(place / "images" / f"{row['id']}_student.png")
            scene.crop((160, 120, 240, 200)).resize((160, 160)).save(place / "images" / f"{row['id']}_teacher.png")


def long_answer(divergence: float, last: str) -> list[dict]:
    words = [
        "The",
        " square",
        " is",
        " near",
        " the",
        "\n",
        "left",
        " edge",
        ",",
        "\t",
        "and",
        " its",
        " colour",
        " is",
        " ",
        last,
    ]
    scale = [0.2, 1, 0.1, 2, 0.3, 0, 1.2, 0.5, 0.1, 0, 0.2, 0.4, 1, 0.2, 0, 4]
    return [token(word, round(divergence * factor, 4)) for word, factor in zip(words, scale, strict=True)]


def write_run(folder: Path, **changes: float) -> Path:
    """A healthy run of 30 steps with traces of three rows, one of them with another verdict in the end."""
    write_metrics(folder / "metrics.jsonl", {step: metrics(step, **changes) for step in range(1, STEPS + 1)})
    write_config(folder, "vision_opd", *OVERRIDES)
    rows = []
    for step, divergence, last in ((1, 0.12, "blue"), (15, 0.08, "red"), (30, 0.02, "red")):
        rows.append(trace("row-7", step, long_answer(divergence, last), score=float(last == "red")))
        rows.append(trace("row-8", step, [token("red", divergence)], score=1.0))
        rows.append(trace("row-9", step, [token("green", 3 * divergence)], score=0.0, bbox=None))
    write_traces(folder, rows)
    return folder
