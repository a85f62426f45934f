"""Tokenizer, chat template and image processor of the tiny base model, in Qwen3-VL's formats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from data_prep.toy.scenes import COLOURS, QUESTION

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer, Qwen3VLProcessor

PAD = "<|endoftext|>"
END = "<|im_end|>"
SPECIAL_TOKENS = (
    PAD,
    "<|im_start|>",
    END,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

PATCH = 16
MERGE = 2
#: One image token covers this many pixels along each axis.
TOKEN_SIDE = PATCH * MERGE
MIN_PIXELS = 64 * 64
MAX_PIXELS = 256 * 256
CONTEXT = 4096

CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] in ('image', 'image_url') or 'image' in part -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part['type'] == 'video' or 'video' in part -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part -%}
                {{- part['text'] -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_processor() -> Qwen3VLProcessor:
    """The processor; ``save_pretrained`` writes everything that AutoProcessor, AutoTokenizer and vLLM read."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    pixels = {
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**pixels),
        tokenizer=build_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(**pixels),
        chat_template=CHAT_TEMPLATE,
    )


def build_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE, trained on the task's own text until each colour name is one token."""
    from tokenizers import pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    # The empty tokenizer lends its normalizer and pre-tokenizer, which loading a saved one brings back.
    blank = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    blank.train_from_iterator([QUESTION, "system\nuser\nassistant\n", *COLOURS, *(f" {c}" for c in COLOURS)], trainer)
    bpe = json.loads(blank.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(pair) for pair in bpe["merges"]],
        unk_token=PAD,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=CONTEXT,
        extra_special_tokens=list(SPECIAL_TOKENS),
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
