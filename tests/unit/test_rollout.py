"""Prompts of both views, and what happens to a response before it is stored."""

import random
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from data_prep.toy.scenes import make_scene
from opd_recipes.dataset import with_images
from opd_recipes.rollout import cut_at_vision_token, vision_token_ids
from tests import harness

QUESTION = [{"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "What colour?"}]}]


def prompts():
    worker = harness.prompt_builder()
    scene = make_scene(random.Random(0))
    views = [worker.recipe.student_view(scene.image, scene.bbox), worker.recipe.teacher_view(scene.image, scene.bbox)]
    return worker, [worker._prompt(with_images(QUESTION, [view])) for view in views]


def test_the_two_prompts_differ_in_image_tokens_alone():
    worker, (student, teacher) = prompts()
    pad = worker.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    counts = [(prompt.ids == pad).sum().item() for prompt in (student, teacher)]
    assert counts == [36, 9]
    texts = [[t for t in prompt.ids.tolist() if t != pad] for prompt in (student, teacher)]
    assert texts[0] == texts[1]
    for prompt, count in zip((student, teacher), counts, strict=True):
        assert prompt.inputs["image_grid_thw"].prod().item() == 4 * count == len(prompt.inputs["pixel_values"])


def test_the_students_prompt_is_what_verls_agent_loop_builds():
    """The same messages through verl's agent loop, in which images are placed by the processor."""
    worker, (student, _) = prompts()
    scene = make_scene(random.Random(0))
    messages = with_images(QUESTION, [worker.recipe.student_view(scene.image, scene.bbox)])
    text = worker.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    image = messages[0]["content"][0]["image"]
    expected = worker.processor(text=[text], images=[image], return_tensors="pt")
    assert torch.equal(student.ids, expected["input_ids"][0])
    torch.testing.assert_close(student.inputs["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize("more", [0, 1, 5])
def test_positions_behind_the_prompt_are_what_the_model_computes(more):
    worker, both = prompts()
    for prompt in both:
        ids = torch.cat([prompt.ids, torch.full((more,), 5)])
        inputs = dict(prompt.inputs)
        inputs["mm_token_type_ids"] = torch.zeros(1, len(ids))
        base = type(worker).__mro__[1]
        expected = base._compute_position_ids(worker, ids[None], torch.ones_like(ids)[None], inputs)[0]
        assert torch.equal(prompt.extended(len(ids)), expected)


def test_positions_without_mrope():
    from opd_recipes.rollout import Prompt

    prompt = Prompt(torch.arange(4), torch.arange(4), {})
    assert prompt.extended(6).tolist() == [0, 1, 2, 3, 4, 5]


def response(ids, log_probs=True):
    return SimpleNamespace(
        response_ids=list(ids),
        response_mask=[1] * len(ids),
        response_logprobs=[-0.5] * len(ids) if log_probs else None,
    )


def test_a_sampled_vision_token_ends_the_response():
    output = response([7, 8, 99, 9])
    cut_at_vision_token(output, [98, 99], eos=2)
    assert (output.response_ids, output.response_mask, output.response_logprobs) == ([7, 8], [1, 1], [-0.5, -0.5])


def test_a_vision_token_at_the_start_leaves_one_masked_token():
    output = response([99, 9])
    cut_at_vision_token(output, [98, 99], eos=2)
    assert (output.response_ids, output.response_mask, output.response_logprobs) == ([2], [0], [0.0])


@pytest.mark.parametrize("ids", [[7, 8], [7], []])
def test_other_responses_are_left_alone(ids):
    output = response(ids, log_probs=False)
    cut_at_vision_token(output, [98, 99], eos=2)
    assert output.response_ids == ids and output.response_logprobs is None


def test_vision_tokens_of_the_tokenizer():
    worker = harness.prompt_builder()
    banned = vision_token_ids(worker.tokenizer)
    names = worker.tokenizer.convert_ids_to_tokens(banned)
    assert set(names) == {"<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"}


def test_an_image_that_is_too_extreme_is_refused():
    worker = harness.prompt_builder()
    with pytest.raises(ValueError, match="aspect ratio"):
        worker._prompt(with_images(QUESTION, [Image.new("RGB", (4000, 8))]))
