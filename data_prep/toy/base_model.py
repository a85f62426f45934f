"""``python -m data_prep.toy.base_model``: a Qwen3-VL of one million parameters that reads crops well and images badly.

Supervised training on both views learns the crops first. It stops on the way, where the accuracy on full images is
about one half: the gap that on-policy distillation from the crop view then closes. Two minutes on one CPU thread.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

from data_prep.toy.processor import CONTEXT, END, MERGE, PAD, PATCH, build_processor
from data_prep.toy.scenes import QUESTION, SIDE, STUDENT_VIEW, TEACHER_VIEW, Scene, make_scene, scene_rng
from opd_recipes.views import View

BATCH = 32
WARMUP_STEPS = 20
MAX_STEPS = 600
CHECK_EVERY = 10
#: Stop at the first check with both accuracies in range.
FULL_RANGE = (0.45, 0.58)
CROP_LEAST = 0.92
HELD_OUT_SCENES = 512
EVAL_BATCH = 64

#: Side of the training cut-outs in source pixels, all resized to the teacher view's 96 px. Half are the teacher view's
#: own 48 px; the others keep the crop skill from depending on one exact scale.
CROP_SIDES = (40, 48, 48, 48, 56, 64)
CROP_PIXELS = 96

student_view = View(STUDENT_VIEW)
teacher_view = View(TEACHER_VIEW)
training_crops = [
    View([STUDENT_VIEW, {"kind": "crop", "zoom": CROP_PIXELS / side, "padding": 0.25, "min_size": side}])
    for side in CROP_SIDES
]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data_prep.toy.base_model", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, its processor and base.json")
    parser.add_argument("--seed", type=int, default=0, help="initial weights and training scenes (default: 0)")
    args = parser.parse_args(argv)

    # One thread: the matrices are too small to share, and the result does not depend on the machine's cores.
    torch.set_num_threads(1)
    processor = build_processor()
    model = build_model(processor, args.seed)
    record = train(model, processor, args.seed)
    save(model, processor, args.out)
    record |= measure_saved(args.out, args.seed)
    record |= {"seed": args.seed, "command": f"python -m data_prep.toy.base_model --out DIR --seed {args.seed}"}
    (args.out / "base.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote the base model to {args.out}: {json.dumps(record)}")


# --- model ---


def build_config(processor: Qwen3VLProcessor) -> Qwen3VLConfig:
    token_id = processor.tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(processor.tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_interleaved": True,
            # Rotary pairs for time, height and width: half of head_dim in all.
            "mrope_section": [6, 5, 5],
        },
        "bos_token_id": None,
        "eos_token_id": token_id(END),
        "pad_token_id": token_id(PAD),
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [1],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype="float32",
    )


def build_model(processor: Qwen3VLProcessor, seed: int) -> Qwen3VLForConditionalGeneration:
    torch.manual_seed(seed)
    config = build_config(processor)
    model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    initialize(model)
    text = config.text_config
    model.generation_config = GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    return model


@torch.no_grad()
def initialize(model: torch.nn.Module) -> None:
    """Scale matrices by fan-in: the default of 0.02 all but silences layers that are 64 to 128 wide."""
    for name, weight in model.named_parameters():
        if "pos_embed" in name:
            weight.normal_(0, 0.2)
        elif "embed_tokens" in name:
            weight.normal_(0, 0.05)
        elif weight.ndim >= 2:
            weight.normal_(0, weight[0].numel() ** -0.5)


# --- batches ---


def prompt_text(processor: Qwen3VLProcessor) -> str:
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def encode(
    processor: Qwen3VLProcessor, images: list[Image.Image], answers: Sequence[str] | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Model inputs of ``(batch, length)`` and the mask of the answer tokens, of the same shape.

    With ``answers``, each prompt is followed by its answer and ``<|im_end|>``; without, the mask is all false.
    """
    prompt = prompt_text(processor)
    endings = [answer + END for answer in answers] if answers else [""] * len(images)
    texts = [prompt + ending for ending in endings]
    inputs = processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
    lengths = torch.tensor([len(processor.tokenizer(ending)["input_ids"]) for ending in endings])
    width = inputs["input_ids"].shape[1]
    # Left padding puts every answer at the end of its row.
    is_answer = torch.arange(width) >= width - lengths[:, None]
    return dict(inputs), is_answer


def answer_logits(
    model: Qwen3VLForConditionalGeneration, inputs: dict[str, torch.Tensor], is_answer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``(tokens, vocab)`` that predict the answer tokens, and those tokens ``(tokens,)``, row after row."""
    logits = model(**inputs).logits[:, :-1]
    return logits[is_answer[:, 1:]], inputs["input_ids"][is_answer]


# --- training ---


def train(model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, seed: int) -> dict[str, Any]:
    """Train until both accuracies are in range; return the step and what was measured there."""
    optimizers = build_optimizers(model)
    held_out = [make_scene(scene_rng("base-held-out", seed, i)) for i in range(HELD_OUT_SCENES)]
    started = time.monotonic()
    for step in range(1, MAX_STEPS + 1):
        loss = train_step(model, processor, optimizers, step, seed)
        if step % CHECK_EVERY:
            continue
        full, crop = (forced_accuracy(model, processor, held_out, view) for view in (student_view, teacher_view))
        seconds = time.monotonic() - started
        print(f"step {step:4d}  {seconds:4.0f} s  loss {loss:.3f}  full {full:.3f}  crop {crop:.3f}", flush=True)
        if FULL_RANGE[0] <= full <= FULL_RANGE[1] and crop >= CROP_LEAST:
            return {"steps": step, "held_out_scenes": HELD_OUT_SCENES, "full_accuracy": full, "crop_accuracy": crop}
    raise SystemExit(f"never had full accuracy in {FULL_RANGE} with crop accuracy >= {CROP_LEAST}; try another --seed")


def train_step(
    model: Qwen3VLForConditionalGeneration,
    processor: Qwen3VLProcessor,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    seed: int,
) -> float:
    """One update on ``BATCH`` new scenes, half of them as full images and half as crops; return the mean loss."""
    first = step * BATCH
    scenes = [make_scene(scene_rng("base-train", seed, first + i)) for i in range(BATCH)]
    full, crops = scenes[: BATCH // 2], scenes[BATCH // 2 :]
    images = (
        [student_view(s.image, s.bbox) for s in full],
        [training_crops[(first + i) % len(training_crops)](s.image, s.bbox) for i, s in enumerate(crops)],
    )
    total = 0.0
    # Two passes because the two views have different numbers of image tokens.
    for part, part_images in zip((full, crops), images, strict=True):
        inputs, is_answer = encode(processor, part_images, [s.answer for s in part])
        loss = F.cross_entropy(*answer_logits(model, inputs, is_answer)) / 2
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * min(1.0, step / WARMUP_STEPS)
        optimizer.step()
        optimizer.zero_grad()
    return total


def build_optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon on the matrices, AdamW on embeddings, biases and norms: ten times fewer steps than AdamW alone."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.004, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.002, betas=(0.9, 0.98)),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


# --- measuring ---


@torch.no_grad()
def forced_accuracy(
    model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, scenes: Sequence[Scene], view: View
) -> float:
    """Share of scenes whose whole answer is the model's greedy choice.

    Greedy decoding gives the answer exactly if each of its tokens is the most likely one after the tokens before it,
    so that one forward pass with the answer in place is enough.
    """
    right = 0
    for start in range(0, len(scenes), EVAL_BATCH):
        batch = scenes[start : start + EVAL_BATCH]
        images = [view(s.image, s.bbox) for s in batch]
        inputs, is_answer = encode(processor, images, [s.answer for s in batch])
        logits, tokens = answer_logits(model, inputs, is_answer)
        wrong = is_answer.new_zeros(is_answer.shape)
        wrong[is_answer] = logits.argmax(-1) != tokens
        right += int((~wrong.any(-1)).sum())
    return right / len(scenes)


@torch.no_grad()
def generated_accuracy(
    model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, scenes: Sequence[Scene], view: View
) -> float:
    """Share of scenes for which ``model.generate`` writes exactly the answer, greedily, within eight tokens."""
    right = 0
    for start in range(0, len(scenes), EVAL_BATCH):
        batch = scenes[start : start + EVAL_BATCH]
        inputs, _ = encode(processor, [view(s.image, s.bbox) for s in batch])
        output = model.generate(**inputs, do_sample=False, max_new_tokens=8)
        texts = processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(text == s.answer for text, s in zip(texts, batch, strict=True))
    return right / len(scenes)


def measure_saved(folder: Path, seed: int) -> dict[str, Any]:
    """Load the folder as a user would and measure on the dataset's validation scenes, which no step has seen."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    scenes = [make_scene(scene_rng("val", seed, i)) for i in range(256)]
    return {
        "val_scenes": len(scenes),
        "val_full_accuracy": generated_accuracy(model, processor, scenes, student_view),
        "val_crop_accuracy": generated_accuracy(model, processor, scenes, teacher_view),
    }


def save(model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, folder: Path) -> None:
    """Write the folder anew, so that no file of an earlier format stays behind."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "base.json").exists():
        raise SystemExit(f"{folder} is not empty and holds no base model; choose another --out")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    # safetensors files are private by default, the others are not.
    (folder / "model.safetensors").chmod(0o644)
    processor.save_pretrained(folder)
    # The same settings once more, under the name that older readers look for.
    processor.image_processor.save_pretrained(folder)
    processor.video_processor.save_pretrained(folder)


if __name__ == "__main__":
    main()
