"""Rows that show one image: the tower runs once for it, and nothing else changes."""

import importlib
import random
from copy import deepcopy
from typing import Any

import pytest
import torch
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

from data_prep.toy.scenes import make_scene
from opd_recipes import vision_tower
from opd_recipes.dataset import with_images
from opd_recipes.vision_tower import DistinctImages, distinct, picture_key
from tests import harness, reference
from tests.unit import lora_helpers
from tests.unit.test_engine import load, process_group, response_logits, scored, with_rollout_log_probs  # noqa: F401

#: Responses by prompt; prompts differ in image size.
RESPONSES = [[[5, 6], [7], [5, 6, 7, 8]], [[9, 10, 11], [12]]]
SIZES = [192, 128]


def rollout(row, response):
    """Another answer to the row's prompt, with copies of its images, as Ray makes them."""
    out = deepcopy(row)
    prompt = len(row["input_ids"]) - len(row["responses"])
    new = torch.tensor(response)
    out |= {"responses": new, "loss_mask": torch.ones_like(new), "rollout_log_probs": -torch.rand(len(new))}
    out["input_ids"] = torch.cat([row["input_ids"][:prompt], new])
    out["position_ids"] = row["position_ids"][:, : prompt + len(new)]
    for view in ("teacher", "negative"):
        ids = row[f"{view}_input_ids"]
        start = len(ids) - len(row["responses"])
        out[f"{view}_input_ids"] = torch.cat([ids[:start], new])
        out[f"{view}_positions"] = row[f"{view}_positions"][: start + len(new)]
    return out


def two_images(response):
    """A row that shows the picture of the first prompt, as it does, and one of its own; its teacher sees them swapped."""
    worker, generator = harness.prompt_builder(), random.Random(0)
    first, other = (make_scene(generator) for _ in range(2))
    pictures = [worker.recipe.student_view(first.image, first.bbox).resize((SIZES[0],) * 2), other.image]
    question = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which?"}]}]
    student, teacher = (worker._prompt(with_images(question, shown)) for shown in (pictures, pictures[::-1]))
    new = torch.tensor(response)
    row = {"responses": new, "loss_mask": torch.ones_like(new), "rollout_log_probs": torch.zeros(len(new))}
    for view, prompt in (("", student), ("teacher_", teacher), ("negative_", teacher)):
        ids = torch.cat([prompt.ids, new])
        positions = prompt.extended(len(ids))
        row[f"{view}input_ids"], row[f"{view}multi_modal_inputs"] = ids, prompt.inputs
        row |= {f"{view}positions": positions.T.contiguous()} if view else {"position_ids": positions}
    return row


@pytest.fixture(scope="module")
def rows():
    """Six rows with three distinct images of the student: two prompts mixed, as rollouts arrive, and a row of two images."""
    prompts = harness.rows([[1, 2, 3, 4]] * 2, sizes=SIZES)
    made = [rollout(row, response) for row, answers in zip(prompts, RESPONSES, strict=True) for response in answers]
    return with_rollout_log_probs([*(made[i] for i in (0, 3, 1, 4, 2)), two_images([13, 14])])


@pytest.fixture(scope="module")
def exact(rows):
    """Loss and gradients in float64, row by row."""
    model, teacher = load(), load()
    loss = reference.loss(scored(model, teacher, rows))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def updated(rows, *overrides, micro_tokens=4096, make=harness.engines, prepare=lambda student: None):
    """Gradients, metrics and utilities of an update, and the patches that entered the student's tower."""
    student, _ = make(harness.config(*overrides), micro_tokens)
    prepare(student)
    kept, patches = {}, []

    def keep():
        kept.update(harness.full_gradients(student.module))
        return 1.0

    student.optimizer_step = keep
    tower = next(module for name, module in student.module.named_modules() if name.endswith("visual.patch_embed"))
    tower.register_forward_pre_hook(lambda module, args: patches.append(len(args[0])))
    data = harness.batch(rows, packed=student.use_remove_padding, micro_tokens=micro_tokens)
    out = harness.update(student, data)
    return kept, out | {"utilities": student.utilities}, patches


def assert_near(gradients, expected, share=1e-5):
    assert gradients.keys() == expected.keys()
    scale = max(g.abs().max().item() for g in expected.values())
    assert max((gradients[n].double() - g.double()).abs().max().item() for n, g in expected.items()) < share * scale


#: Patches of the distinct images: 12 x 12 and 8 x 8 of the prompts, and 12 x 12 of the picture that one row shows besides.
DISTINCT = 144 + 64 + 144
WITHOUT = 3 * 144 + 2 * 64 + 2 * 144
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
PACKED = "actor_rollout_ref.model.use_remove_padding=true"
SELECTING = ["opd/selection=random", "opd.divergence.topk=12"]


def ordinary(monkeypatch):
    """The tower on every image, and verl's micro-batches."""
    monkeypatch.setattr(vision_tower, "TOWERS", ())


@pytest.mark.parametrize("overrides", [[CHECKPOINTING], [PACKED]], ids=["padded-checkpointing", "packed"])
def test_loss_and_gradient_equal_a_float64_reference(rows, exact, overrides):
    gradients, out, patches = updated(rows, *overrides)
    assert patches == [DISTINCT]
    assert out["loss"] == pytest.approx(exact[0], rel=1e-5)
    assert_near(gradients, exact[1], share=5e-5)


def test_a_frozen_tower_has_no_gradient_and_changes_no_other(rows, exact):
    def freeze(student):
        for name, parameter in student.module.named_parameters():
            parameter.requires_grad_("visual" not in name)

    gradients, out, patches = updated(rows, prepare=freeze)
    assert patches == [DISTINCT] and out["loss"] == pytest.approx(exact[0], rel=1e-5)
    assert_near(gradients, {name: grad for name, grad in exact[1].items() if "visual" not in name}, share=5e-5)


def test_text_among_the_rows_and_micro_batches_leave_every_number_as_it_is(rows, monkeypatch):
    """Small micro-batches, so that rows come back from an order of their own; verl's padding rows have no image."""
    padding, _ = construct_minimal_padding_template(dict(rows[0]), {}, eos_token_id=1)
    batch = [rows[0], {key: padding[key] for key in rows[0]}, *rows[1:]]
    ours = updated(batch, *SELECTING, micro_tokens=200)
    ordinary(monkeypatch)
    plain = updated(batch, *SELECTING, micro_tokens=200)
    assert len(ours[2]) == len(plain[2]) > 1 and sum(plain[2]) == WITHOUT and sum(ours[2]) < WITHOUT
    assert_near(ours[0], plain[0])
    for key, value in plain[1].items():
        assert ours[1][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


def test_an_adapter_in_the_tower_has_the_gradient_of_all_rows(rows, monkeypatch):
    def make(config, micro_tokens):
        return lora_helpers.engines(micro_tokens=micro_tokens)

    ours = updated(rows, make=make, prepare=lora_helpers.scatter)
    ordinary(monkeypatch)
    plain = updated(rows, make=make, prepare=lora_helpers.scatter)
    assert ours[2][-1] == DISTINCT and plain[2][-1] == WITHOUT  # before it, the same model was the teacher
    assert any("visual" in name and grad.abs().max() > 0 for name, grad in plain[0].items())
    assert_near(ours[0], plain[0])
    assert ours[1]["loss"] == pytest.approx(plain[1]["loss"], rel=1e-5)


def test_the_log_prob_pass_gives_every_row_its_own(rows):
    student, _ = harness.engines(harness.config(), 120)
    with student.eval_mode():
        out = student.infer_batch(harness.batch(rows, micro_tokens=120))["model_output"]["log_probs"].unbind()
    model = load()
    for row, found in zip(rows, out, strict=True):
        n = len(row["responses"])
        logits = response_logits(model, row["input_ids"], row["position_ids"], row["multi_modal_inputs"], n).detach()
        own = logits.log_softmax(-1).gather(1, row["responses"][:, None])[:, 0]
        torch.testing.assert_close(found[len(found) - n - 1 : -1].double(), own, atol=2e-5, rtol=1e-5)


VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "out_hidden_size": 24,
    "in_channels": 3,
    "patch_size": 4,
}
VISION |= {"intermediate_size": 40, "temporal_patch_size": 2, "spatial_merge_size": 2}
QWEN3: dict[str, Any] = {"num_position_embeddings": 16}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel", {"window_size": 16}),
    "qwen3_vl": ("Qwen3VLVisionConfig", "Qwen3VLVisionModel", {**QWEN3, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_5": ("Qwen3_5VisionConfig", "Qwen3_5VisionModel", QWEN3),
}


def tower_of(family):
    config, tower, more = FAMILIES[family]
    package = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    made = getattr(modeling, tower)._from_config(getattr(package, config)(**VISION, **more), dtype=torch.float64)
    return made.double().train()


def features(output):
    """What the families' models read of a tower's output."""
    return [output.last_hidden_state, output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_features_and_gradients_of_its_own_tower(family):
    generator = torch.Generator().manual_seed(1)
    a, b, c = (torch.randn(n, 96, generator=generator, dtype=torch.float64) for n in (32, 24, 32))
    # c has a's size and other pixels; d has a's pixels in another shape.
    pixels, grid = torch.cat([a, b, a, c, a, b]), [[1, 4, 8], [1, 4, 6], [1, 4, 8], [1, 4, 8], [1, 8, 4], [1, 4, 6]]
    found = []
    for share in (False, True):
        tower, patches = tower_of(family), list[int]()
        if share:
            assert DistinctImages.install(torch.nn.ModuleDict({"visual": tower})) is not None
        tower.patch_embed.register_forward_pre_hook(lambda module, args, seen=patches: seen.append(len(args[0])))
        out = features(tower(pixels, grid_thw=torch.tensor(grid)))
        weights = torch.Generator().manual_seed(2)
        sum((x * torch.randn(x.shape, generator=weights, dtype=x.dtype)).sum() for x in out).backward()
        found.append((patches, dict(enumerate(out)), {n: p.grad for n, p in tower.named_parameters()}))
    (before, plain, expected), (after, ours, gradients) = found
    assert before == [4 * 32 + 2 * 24] and after == [3 * 32 + 24]
    assert_near(ours, plain, share=1e-6)  # the towers' norms and rotations are fp32 whatever they are given
    assert_near(gradients, expected, share=1e-6)


def test_a_tower_that_draws_runs_for_every_image_in_training():
    tower = tower_of("qwen3_vl")
    tower.blocks[0].mlp.act_fn = torch.nn.Sequential(tower.blocks[0].mlp.act_fn, torch.nn.Dropout(0.5))
    DistinctImages.install(torch.nn.ModuleDict({"visual": tower}))
    pixels, grid = torch.ones(32, 96, dtype=torch.float64), torch.tensor([[1, 4, 4]] * 2)
    first, second = tower(pixels, grid_thw=grid).pooler_output.chunk(2)
    assert not torch.equal(first, second)
    first, second = tower.eval()(pixels, grid_thw=grid).pooler_output.chunk(2)
    assert torch.equal(first, second)


def test_images_are_the_same_only_where_every_number_is():
    image = torch.randn(50, 7)
    near, shape = image.clone(), [1, 5, 10]
    near[31, 3] += 1e-6
    assert distinct([image, near, image.clone()], [shape] * 3) == ([0, 1], [0, 1, 0])
    assert distinct([image, image], [shape, [1, 10, 5]]) == ([0, 1], [0, 1])
    assert distinct([image * torch.nan] * 2, [shape] * 2) == ([0, 1], [0, 1])


def test_a_rows_key_is_that_of_its_pixels():
    pixels = {"pixel_values": torch.randn(8, 3), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    assert picture_key(pixels) == picture_key(deepcopy(pixels)) != picture_key({"pixel_values": torch.randn(8, 3)})
    assert picture_key(None) is None and picture_key({}) is None


def test_other_models_run_as_they_are():
    assert DistinctImages.install(torch.nn.Sequential(torch.nn.Linear(2, 2))) is None
