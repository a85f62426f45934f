"""Whole updates: the product's engines and the plain way, on one small random Qwen3-VL and the same rows.

The model is as small as a CPU needs and keeps the proportions of Qwen3.5-4B: the head has a fifth of the weights of the text
layers (vocabulary 4,608; with 15,872 three fifths, as in Qwen3.5-0.8B), the vision tower costs an image token three quarters
of what the text layers do, by multiplications (as in Qwen3-VL-4B on an image of 1,900 tokens). Everything is a tenth as
wide, and sequences are a tenth as long: attention, whose cost grows with the square of the length, keeps its share as well.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import plain

#: Ids of data_prep.toy's tokenizer, which the model shares: <|vision_start|>, <|image|>, <|vision_end|>; words are below.
START, IMAGE, END, WORDS = 331, 334, 332, 256
PATCH_NUMBERS = 3 * 2 * 16 * 16


@dataclass(frozen=True)
class Shape:
    """Of the model, in the names of its configuration."""

    vocab_size: int = 4608
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    vision_hidden: int = 96
    vision_depth: int = 4


@dataclass(frozen=True)
class Rows:
    """A mini-batch: every row has one image, ``text`` tokens and a response.

    Args:
        rollouts: Rows of a prompt, one after another: the same image and text, and responses of their own. The papers' 8.
        image, teacher_image: (rows, columns) of image tokens of the student's and the teacher's image.
        micro_rows: Rows of a micro-batch, for both sides.
    """

    count: int = 16
    rollouts: int = 8
    image: tuple[int, int] = (12, 16)
    teacher_image: tuple[int, int] = (12, 16)
    text: int = 8
    response: int = 48
    micro_rows: int = 8

    def length(self, view: str) -> int:
        high, wide = self.image if view == "student" else self.teacher_image
        return high * wide + 2 + self.text + self.response


#: The toy's model, tokenizer and processor.
BASE = Path(__file__).parents[1] / "data_prep" / "toy" / "base"


def make_model(folder: Path, shape: Shape) -> Path:
    """Write a random model with the toy's tokenizer and processor; returns its folder."""
    random_model(shape).save_pretrained(folder)
    for file in BASE.iterdir():
        if file.name not in ("config.json", "model.safetensors", "base.json"):
            shutil.copy(file, folder)
    return folder


def random_model(shape: Shape, seed: int = 0) -> Any:
    """A random Qwen3-VL, fp32."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(BASE)
    text, vision = config.text_config, config.vision_config
    values = asdict(shape)
    for name in ("vision_hidden", "vision_depth"):
        values.pop(name)
    for name, value in values.items():
        setattr(text, name, value)
    if hasattr(text, "layer_types"):
        text.layer_types = ["full_attention"] * shape.num_hidden_layers
    vision.hidden_size, vision.depth, vision.out_hidden_size = (
        shape.vision_hidden,
        shape.vision_depth,
        shape.hidden_size,
    )
    vision.intermediate_size, vision.num_heads = 4 * shape.vision_hidden, shape.vision_hidden // 32
    torch.manual_seed(seed)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").float()


def picture(generator: torch.Generator, image: tuple[int, int]) -> torch.Tensor:
    """Random pixels of an image of so many tokens."""
    return torch.randn(4 * image[0] * image[1], PATCH_NUMBERS, generator=generator)


def prompt(pixels: torch.Tensor, image: tuple[int, int], words: torch.Tensor) -> dict[str, Any]:
    """An image and ``words``, as the rollout worker makes a prompt: ids (L,), positions (4, L), model inputs."""
    high, wide = image
    ids = torch.cat([torch.tensor([START]), torch.full((high * wide,), IMAGE), torch.tensor([END]), words])
    rows, columns = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
    of_image = torch.stack([torch.zeros(high * wide, dtype=torch.long), rows.flatten(), columns.flatten()]) + 1
    rest = torch.arange(len(words) + 1) + 1 + max(high, wide)
    planes = torch.cat([torch.zeros(3, 1, dtype=torch.long), of_image, rest.expand(3, -1)], dim=1)
    return {
        "ids": ids,
        "positions": torch.cat([torch.arange(len(ids))[None], planes]),
        "inputs": {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2 * high, 2 * wide]])},
    }


def make_rows(rows: Rows) -> list[dict[str, Any]]:
    """Random rows with the columns that the update reads."""
    generator, out = torch.Generator().manual_seed(0), []
    sizes = (rows.image, rows.teacher_image)
    for number in range(rows.count):
        if number % rows.rollouts == 0:
            text = torch.randint(WORDS, (rows.text,), generator=generator)
            pictures = [picture(generator, size) for size in sizes]
        response = torch.randint(WORDS, (rows.response,), generator=generator)
        words = torch.cat([text, response])
        # Every row has pixels of its own, as Ray brings them.
        student, teacher = (prompt(p.clone(), size, words) for p, size in zip(pictures, sizes, strict=True))
        out.append(
            {
                "input_ids": student["ids"],
                "position_ids": student["positions"],
                "multi_modal_inputs": student["inputs"],
                "responses": response,
                "loss_mask": torch.ones_like(response),
                "rollout_log_probs": torch.full((len(response),), -8.0),
                "teacher_input_ids": teacher["ids"],
                "teacher_positions": teacher["positions"].T.contiguous(),
                "teacher_multi_modal_inputs": teacher["inputs"],
            }
        )
    return out


def ours(folder: Path, rows: Rows, *overrides: str) -> Callable[[list[dict]], Any]:
    """An update of the product: student, teacher, optimizer and rule of a recipe, in this process."""
    from tests import harness

    config = harness.config(
        f"actor_rollout_ref.model.path={folder}", "opd.teacher.rate=0.05", "opd.divergence.topk=100", *overrides
    )
    micro_tokens = rows.micro_rows * max(rows.length("student"), rows.length("teacher"))
    student, _ = harness.engines(config, micro_tokens=micro_tokens)

    def update(batch: list[dict]) -> dict:
        return harness.update(student, harness.batch(batch, micro_tokens=micro_tokens))

    return update


def plain_update(folder: Path, rows: Rows) -> Callable[[list[dict]], float]:
    """The same update by :func:`benchmarks.plain.update`."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    teacher = deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)

    def update(batch: list[dict]) -> float:
        micro = [collate(batch[i : i + rows.micro_rows]) for i in range(0, len(batch), rows.micro_rows)]
        return plain.update(model, teacher, optimizer, micro)

    return update


def collate(rows: list[dict]) -> dict[str, Any]:
    """Rows of equal lengths, as a processor gives them to a model."""
    count, response = len(rows), len(rows[0]["responses"])
    views = {
        "student": [(row["input_ids"], row["position_ids"], row["multi_modal_inputs"]) for row in rows],
        "teacher": [
            (row["teacher_input_ids"], row["teacher_positions"].T, row["teacher_multi_modal_inputs"]) for row in rows
        ],
    }
    out: dict[str, Any] = {name: torch.cat([row[name] for row in rows]) for name in ("rollout_log_probs",)}
    out["labels"] = torch.cat([row["responses"] for row in rows])
    for view, prompts in views.items():
        ids, positions, inputs = zip(*prompts, strict=True)
        length = len(ids[0])
        out[view] = {
            "input_ids": torch.stack(ids),
            "attention_mask": torch.ones(count, length, dtype=torch.long),
            "position_ids": torch.stack(positions, dim=1),
            **{key: torch.cat([each[key] for each in inputs]) for key in ("pixel_values", "image_grid_thw")},
        }
        ends = torch.arange(count)[:, None] * length + length - 1
        out[f"{view}_index"] = (ends + torch.arange(-response, 0)).flatten()
    return out
