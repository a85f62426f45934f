"""Prompts of both views, and what happens to a response before it is stored."""

import asyncio
import io
import math
import random
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from data_prep.toy.scenes import make_scene
from opd_recipes.dataset import hinted, with_images
from opd_recipes.images import RowImages
from opd_recipes.recipe import Recipe
from opd_recipes.rollout import Prompt, Views, cut_at_vision_token, row_features, vision_token_ids
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
    prompt = Prompt(torch.arange(4), torch.arange(4), {}, [])
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


def prepared(scene, *overrides, overlay="[cpu,toy]", answer="red", **trajectory):
    """What the worker makes of one row under another recipe."""
    worker = harness.prompt_builder()
    before = worker.recipe
    worker.recipe = Recipe.load(harness.config(*overrides, overlay=overlay).opd)
    try:
        view = trajectory.pop("view", "student")
        trajectory = {"validate": False, **trajectory}
        row = RowImages([{"bytes": scene.png}], box=scene.bbox)
        return worker, *worker._prepare(QUESTION, row, view, {"ground_truth": answer}, trajectory)
    finally:
        worker.recipe = before


@pytest.fixture
def scene():
    made = make_scene(random.Random(3))
    buffer = io.BytesIO()
    made.image.save(buffer, "PNG")
    return SimpleNamespace(image=made.image, bbox=made.bbox, png=buffer.getvalue())


def test_each_view_of_the_teacher_gets_a_prompt(scene):
    options = ["opd/weights=margin", "opd.views.negative=[{kind: crop, zoom: 2.0, min_size: 48}, {kind: noise}]"]
    _, _, views = prepared(scene, *options)
    assert list(views.teacher) == ["teacher", "negative"]
    x0, y0, x1, y1 = scene.bbox
    assert views.area_ratio == pytest.approx((x1 - x0) * (y1 - y0) / (scene.image.width * scene.image.height))


def test_validation_has_no_teacher_and_shows_the_view_that_is_named(scene):
    options = ["opd.validation_views=[student, {half: [{kind: resize, scale: 0.5}]}]"]
    worker, _, views = prepared(scene, *options, view="half", validate=True)
    pad = worker.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert views.teacher == {} and (views.student.ids == pad).sum() == 9  # of the 36 of the whole scene


def test_the_hint_is_in_the_teachers_prompt_alone(scene):
    worker, messages, views = prepared(scene, overlay="[cpu,toy,toy_opsd]", answer="dark red")
    student, teacher = (worker.tokenizer.decode(p.ids) for p in (views.student, views.teacher["teacher"]))
    assert "dark red" in teacher and "dark red" not in student and "dark red" not in str(messages)


def test_a_hint_goes_behind_the_last_question():
    talk = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "second"}]},
    ]
    out = hinted(talk, " ({answer})", 7)
    assert out[:2] == talk[:2] and out[2]["content"][-1] == {"type": "text", "text": " (7)"}
    assert len(talk[2]["content"]) == 2  # the row itself is left alone
    assert hinted([{"role": "user", "content": "q"}], " {answer}{x}", "a")[0]["content"] == "q a{x}"
    assert hinted(talk, None, None) is talk
    with pytest.raises(ValueError, match="no reward_model.ground_truth, which opd.teacher_hint"):
        hinted(talk, " {answer}", None)


def test_features_of_a_row():
    def prompt(n):
        return Prompt(torch.arange(n), torch.arange(n), {}, [])

    views = Views(prompt(5), {"teacher": prompt(7), "negative": prompt(3)}, area_ratio=0.25)
    output = response([1, 2, 3])
    output.response_logprobs, output.response_mask = [-1.0, -9.0, -2.0], [1, 0, 1]
    # Mean and 90th percentile of (1, 2); entropy; counted tokens; prompt; area.
    assert row_features(output, views, 0.5).tolist() == pytest.approx([1.5, 1.9, 0.5, 2, 5, 0.25])
    output.response_mask = [0, 0, 0]
    assert row_features(output, views, 0.5).tolist() == [0] * 6


def test_the_server_hands_the_entropy_on_and_keeps_nothing():
    """verl's keywords for vLLM's engine; log-probs are asked for only where verl asks for them."""
    from opd_recipes.entropy_server import TOP, _EntropyTap

    class Engine:
        other = 7

        async def generate(self, *, prompt, sampling_params, request_id, lora_request=None, priority=0):
            for tokens in (1, 2):
                listed = [
                    {0: SimpleNamespace(logprob=math.log(0.5)), 1: SimpleNamespace(logprob=math.log(0.5))}
                ] * tokens
                yield SimpleNamespace(outputs=[SimpleNamespace(logprobs=listed if sampling_params.logprobs else None)])

    tap = _EntropyTap(Engine())

    async def run(logprobs, name):
        params = SimpleNamespace(logprobs=logprobs)
        outputs = [out async for out in tap.generate(prompt="p", sampling_params=params, request_id=name)]
        return params.logprobs, len(outputs)

    assert asyncio.run(run(0, "a")) == (TOP, 2) and asyncio.run(run(None, "b")) == (None, 2)
    assert tap.entropies == {"a": pytest.approx(math.log(2))} and tap.other == 7


def test_entropy_of_what_vllm_lists():
    """Two tokens: all mass listed; half of it listed, the rest one bin."""
    from opd_recipes.entropy_server import mean_entropy

    def listed(*probabilities):
        return {i: SimpleNamespace(logprob=math.log(p)) for i, p in enumerate(probabilities)}

    expected = (math.log(2) + (0.25 * math.log(4) * 2 + 0.5 * math.log(2))) / 2
    assert mean_entropy([listed(0.5, 0.5), listed(0.25, 0.25)]) == pytest.approx(expected)
    assert mean_entropy([listed(1.0)]) == 0 and mean_entropy([]) == 0


def test_the_loop_asks_vllm_what_verls_own_asks():
    """Same tokens and images, without the processor running again for every rollout."""
    from hydra.utils import instantiate
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, _agent_loop_registry

    from opd_recipes.rollout import _views

    worker = harness.prompt_builder()
    row = make_scene(random.Random(0))
    messages = with_images(QUESTION, [worker.recipe.student_view(row.image, row.bbox)])
    asked = []

    class Server:
        async def generate(self, **request):
            asked.append(request)
            return SimpleNamespace(
                token_ids=[5, 6], log_probs=[-0.1, -0.2], routed_experts=None, num_preempted=0, extra_fields={}
            )

    async def run(name, **limits):
        config = harness.config(*limits.values())
        parts = {"tokenizer": worker.tokenizer, "processor": worker.processor, "dataset_cls": worker.dataset_cls}
        loop = instantiate(
            _agent_loop_registry[name],
            trainer_config=DictConfigWrap(config),
            server_manager=Server(),
            hf_model_type="qwen3_vl",
            data_config=DictConfigWrap(config.data),
            **parts,
        )
        _views.set(Views(worker._prompt(messages), {}))
        return await loop.run({"temperature": 1.0}, raw_prompt=messages)

    outputs = [asyncio.run(run(name)) for name in ("single_turn_agent", "opd_single_turn")]
    stock, ours = asked
    assert ours["prompt_ids"] == stock["prompt_ids"]
    assert [image.tobytes() for image in ours["image_data"]] == [image.tobytes() for image in stock["image_data"]]
    assert {k: ours[k] for k in ("audio_data", "video_data", "mm_processor_kwargs")} == {
        k: stock[k] for k in ("audio_data", "video_data", "mm_processor_kwargs")
    }
    assert outputs[0].prompt_ids == outputs[1].prompt_ids and outputs[0].response_ids == outputs[1].response_ids
    with pytest.raises(ValueError, match="data.max_prompt_length=20"):
        asyncio.run(run("opd_single_turn", limit="data.max_prompt_length=20"))
