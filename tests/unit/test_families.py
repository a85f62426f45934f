"""Every family of models that users train, each by a tiny random one; and which models are refused."""

from __future__ import annotations

import io
import json
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from opd_recipes import families as product
from opd_recipes import head_engine
from opd_recipes.check import check_run
from opd_recipes.dataset import TwoViewDataset
from opd_recipes.images import RowImages
from opd_recipes.registry import RecipeError
from opd_recipes.rollout import cut_at_vision_token, vision_token_ids
from tests import families, harness, reference
from tests.families import FAMILIES, QUESTION, SIZES

# Of three rows: unequal images, unequal lengths, one that is empty.
RESPONSES = [[5, 6], [7, 8, 9, 10], [], [11]]
FP32 = {"atol": 5e-6, "rtol": 0}


@dataclass
class Case:
    """One family, and what transformers' own forward says of each row by itself: no padding, no neighbour."""

    family: families.Family
    folder: Any
    worker: Any
    prompts: list
    features: list[int]
    model: Any
    unequal: list[dict]
    equal: list[dict]
    same_view: list[dict]
    alone: dict[str, list[torch.Tensor]]
    positions: list[torch.Tensor]
    loss: float
    gradients: dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request, tmp_path_factory):
    harness.start()
    folder = families.build(request.param, tmp_path_factory.mktemp(request.param))
    with families.unpatched(request.param):
        return computed(FAMILIES[request.param], folder)


def computed(family, folder) -> Case:
    worker, model = families.worker(folder), families.plain(folder)
    prompts = [families.prompt(worker, families.picture(*size, seed=i)) for i, size in enumerate(SIZES)]
    unequal = [families.row(prompts[i], prompts[i + 1], response) for i, response in enumerate(RESPONSES)]
    alike = [families.prompt(worker, families.picture(*SIZES[0], seed=10 + i)) for i in range(3)]
    equal = [families.row(view, view, [5 + i, 6, 7]) for i, view in enumerate(alike)]
    same_view = [families.row(prompts[i], prompts[i], response) for i, response in enumerate(RESPONSES)]
    alone = {"unequal": [log_probs(model, row) for row in unequal], "equal": [log_probs(model, row) for row in equal]}
    features = [image_features(model, prompt) for prompt in prompts]
    positions = [model_positions(model, longer(prompt), prompt.inputs) for prompt in prompts]
    exact = plain_loss(families.plain(folder).double(), [row for row in unequal if len(row["responses"])])
    return Case(family, folder, worker, prompts, features, model, unequal, equal, same_view, alone, positions, *exact)


@torch.no_grad()
def log_probs(model, row):
    said = families.logits(model, row["input_ids"], row["multi_modal_inputs"], len(row["responses"]))
    return said.log_softmax(-1).gather(1, row["responses"][:, None])[:, 0]


@torch.no_grad()
def image_features(model, prompt) -> int:
    made = model.model.get_image_features(prompt.inputs["pixel_values"], prompt.inputs["image_grid_thw"])
    return sum(map(len, made.pooler_output))


def counting(case, settings) -> TwoViewDataset:
    """The data set without its rows, as it counts tokens."""
    counter = object.__new__(TwoViewDataset)
    counter.config, counter.mm_processor_kwargs, counter.apply_chat_template_kwargs = (
        case.worker.config.data,
        settings,
        {},
    )
    counter.tokenizer, counter.processor = case.worker.tokenizer, case.worker.processor
    return counter


def longer(prompt) -> torch.Tensor:
    """With a response of three tokens."""
    return torch.cat([prompt.ids, torch.tensor([5, 6, 7])])


@torch.no_grad()
def model_positions(model, ids, inputs) -> torch.Tensor:
    """(3, L) that the model hands to its text layers."""
    seen = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    families.logits(model, ids, inputs, 1)
    hook.remove()
    return seen[0][-3:, 0]


def plain_loss(model, rows) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by the formula, of a model that is both student and teacher."""
    table = []
    for row in rows:
        n = len(row["responses"])
        student = families.logits(model, row["input_ids"], row["multi_modal_inputs"], n)
        teacher = families.logits(model, row["teacher_input_ids"], row["teacher_multi_modal_inputs"], n).detach()
        scored = {"labels": row["responses"], "mask": row["loss_mask"], "rollout": row["rollout_log_probs"]}
        table.append({"student": student, "teacher": teacher, **scored})
    loss = reference.loss(table, k=12)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# Prompts


@pytest.mark.parametrize("number", range(len(SIZES)), ids=[f"{w}x{h}" for w, h in SIZES])
def test_a_prompt_has_as_many_image_tokens_as_the_tower_makes_features(case, number):
    token = case.worker.tokenizer.convert_tokens_to_ids(case.family.image_token)
    prompt = case.prompts[number]
    assert (prompt.ids == token).sum() == case.features[number] == prompt.inputs["image_grid_thw"].prod() // 4


def test_the_sizes_have_different_numbers_of_tokens(case):
    assert len(set(case.features)) >= 2 and min(case.features) >= 4


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_both_views_of_a_row_fit_the_tower_and_are_counted_right_before_training(case, size):
    """The views that the recipe draws, the smallest evidence included; the data set counts tokens without making pixels."""
    image = families.picture(*size)
    stored = io.BytesIO()
    image.save(stored, "PNG")
    box = (size[0] // 3, size[1] // 3, size[0] // 3 + 3, size[1] // 3 + 3)
    source = RowImages([{"bytes": stored.getvalue()}], box=box)
    _, views = case.worker._prepare(QUESTION, source, None, None, {"validate": False})
    counter = counting(case, {})
    drawn = dict(source.rendered(case.worker.recipe.views))
    for name, prompt in {"student": views.student, **views.teacher}.items():
        tokens = (prompt.ids == case.model.config.image_token_id).sum()
        assert tokens == image_features(case.model, prompt)
        assert counter._prompt_length(QUESTION, drawn[name]) == len(prompt.ids)


@pytest.mark.parametrize("limits", [(64**2, 8192), (128**2, 256**2)], ids=["smaller", "larger"])
def test_pixel_limits_hold_for_prompts_and_for_what_is_counted(case, limits):
    settings = dict(zip(("min_pixels", "max_pixels"), limits, strict=True))
    product.check_pixels(settings)
    counter, limited = counting(case, settings), families.worker(case.folder, settings)
    for size in SIZES[:2]:
        picture = families.picture(*size)
        prompt = families.prompt(limited, picture)
        area = prompt.inputs["image_grid_thw"].prod() * case.family.patch**2
        assert limits[0] <= area <= limits[1] and counter._prompt_length(QUESTION, [picture]) == len(prompt.ids)


@pytest.mark.parametrize("settings", [{"min_pixels": 128**2}, {"max_pixels": 8192}], ids=str)
def test_one_limit_alone_would_be_counted_but_not_obeyed(case, settings):
    """Fails when transformers obeys it: the refusal can then go."""
    picture = families.picture(*SIZES[0])
    limited = families.worker(case.folder, settings)
    counted = counting(case, settings)._prompt_length(QUESTION, [picture])
    assert counted != len(families.prompt(limited, picture).ids) == len(case.prompts[0].ids)
    with pytest.raises(
        RecipeError, match="data.mm_processor_kwargs has m.._pixels: write min_pixels and max_pixels, both"
    ):
        check_run(families.config(case.folder, *(f"+data.mm_processor_kwargs.{k}={v}" for k, v in settings.items())))


@pytest.mark.parametrize(
    "settings",
    [{"size": {"longest_edge": 64}}, {"images_kwargs": {}}, {"min_pixels": 1, "max_pixels": 2, "size": {}}],
    ids=str,
)
def test_other_ways_to_say_a_size_are_refused(settings):
    with pytest.raises(RecipeError, match="nothing else of an image's size"):
        product.check_pixels(settings)


@pytest.mark.parametrize("settings", [None, {}, {"do_convert_rgb": True}], ids=str)
def test_other_settings_of_the_processor_are_let_pass(settings):
    product.check_pixels(settings)


# Positions


@pytest.mark.parametrize("number", range(len(SIZES)), ids=[f"{w}x{h}" for w, h in SIZES])
def test_positions_are_those_that_the_model_computes_from_the_whole_sequence(case, number):
    length = len(case.prompts[number].ids) + 3
    ours = case.prompts[number].extended(length)
    assert torch.equal(ours[1:], case.positions[number]) and ours[0].tolist() == list(range(length))


# Log-probabilities


def attention(q, k, v, cu_seqlens_q, softmax_scale=None, causal=True, **_):
    """flash-attn's packed attention by PyTorch's: (tokens, heads, size), each span of ``cu_seqlens_q`` by itself."""
    by_head = (x.transpose(0, 1).split(cu_seqlens_q.diff().tolist(), dim=1) for x in (q, k, v))
    out = [F.scaled_dot_product_attention(a, b, c, is_causal=causal) for a, b, c in zip(*by_head, strict=True)]
    return torch.cat(out, dim=1).transpose(0, 1)


def delta_rule(query, key, value, *, g, beta, cu_seqlens=None, **options):
    """flash-linear-attention's packed rule by transformers' own: each span of ``cu_seqlens`` by itself."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as plain

    lengths = [query.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    spans = zip(*(x.split(lengths, dim=1) for x in (query, key, value, g, beta)), strict=True)
    return torch.cat([plain(q, k, v, g=g, beta=b, **options)[0] for q, k, v, g, b in spans], dim=1), None


@contextmanager
def kernels_replaced(family):
    """What packed rows need and a CPU has not: flash-attn (Qwen2.5-VL by verl's forward), flash-linear-attention (Qwen3.5)."""
    from transformers.models.qwen3_5 import modeling_qwen3_5
    from verl.models.transformers import qwen2_vl

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen2_vl, "flash_attn_varlen_func", attention, raising=False)
        patch.setattr(qwen2_vl, "fa_peft_integration_check", lambda q, k, v, **_: (q, k, v))
        for name in ("_flash_supports_window_size", "_flash_supports_deterministic", "_flash_use_top_left_mask"):
            patch.setattr(qwen2_vl, name, False, raising=False)
        patch.setattr(modeling_qwen3_5, "chunk_gated_delta_rule", delta_rule)
        patch.setattr(head_engine, "is_flash_linear_attention_available", lambda: True)
        yield


@contextmanager
def engine(case, packed, *overrides):
    """A student with its teacher; verl's replacements of transformers' methods end with it."""
    layout = f"actor_rollout_ref.model.use_remove_padding={str(packed).lower()}"
    with families.unpatched(case.family.model_type), kernels_replaced(case.family):
        student, _ = harness.engines(families.config(case.folder, layout, *overrides))
        student.optimizer_step = lambda: 1.0  # gradients stay, weights too
        yield student


@pytest.fixture(scope="module", params=[False, True], ids=["padded", "packed"])
def layout(request, case):
    with engine(case, request.param) as student:
        yield student, request.param


def engine_log_probs(student, rows, packed):
    with student.eval_mode():
        found = student.infer_batch(harness.batch(rows, packed=packed))["model_output"]["log_probs"].unbind()
    counts = [len(row["responses"]) for row in rows]
    return [each[len(each) - count - 1 : -1] for each, count in zip(found, counts, strict=True)]


@pytest.mark.parametrize("rows", ["unequal", "equal"])
def test_log_probs_in_a_micro_batch_are_those_of_each_row_alone(case, layout, rows):
    """Also where all rows have one length, and where a linear attention could carry its state from row to row."""
    student, packed = layout
    found = engine_log_probs(student, getattr(case, rows), packed)
    for got, expected in zip(found, case.alone[rows], strict=True):
        torch.testing.assert_close(got, expected, **FP32)


def test_a_neighbour_changes_nothing(case, layout):
    """The last row's log-probabilities behind other rows than before."""
    student, packed = layout
    *_, last = case.unequal
    for others in (case.unequal[:1], [case.equal[0], case.unequal[1]]):
        *_, got = engine_log_probs(student, [*others, last], packed)
        torch.testing.assert_close(got, case.alone["unequal"][-1], **FP32)


def test_an_image_that_is_swapped_changes_them(case, layout):
    """The comparisons above would see a picture in the wrong row."""
    student, packed = layout
    one, two = case.equal[:2]
    swapped = [
        {**one, "multi_modal_inputs": two["multi_modal_inputs"]},
        {**two, "multi_modal_inputs": one["multi_modal_inputs"]},
    ]
    found = engine_log_probs(student, swapped, packed)
    for got, expected in zip(found, case.alone["equal"], strict=False):
        assert (got - expected).abs().max() > 1e-2


# Loss


def test_the_same_view_has_no_divergence_at_all(case, layout):
    student, packed = layout
    out = harness.update(student, harness.batch(case.same_view, packed=packed))
    assert out["opd/divergence"] == 0 and out["loss"] == 0


def test_rows_without_an_image_alone_in_a_micro_batch(case, layout):
    """verl fills a batch up with one-token text rows, and cuts it without looking."""
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

    student, packed = layout
    padding, _ = construct_minimal_padding_template(dict(case.unequal[0]), {}, eos_token_id=1)
    text = {key: padding[key] for key in case.unequal[0]}
    out = harness.update(student, harness.batch([text, text], packed=packed))
    assert out["loss"] == 0


def test_without_our_hook_such_rows_stop_qwen2_5_vl(tmp_path, monkeypatch):
    """Fails when verl's forward no longer needs it."""
    harness.start()
    folder = families.build("qwen2_5_vl", tmp_path)
    row = {"input_ids": torch.tensor([3, 4]), "position_ids": torch.arange(2).expand(4, 2), "multi_modal_inputs": {}}
    row |= {"responses": torch.tensor([4]), "loss_mask": torch.tensor([0])}
    monkeypatch.setattr(head_engine, "tower_of_tensors", lambda model: None)
    with families.unpatched("qwen2_5_vl"):
        student, _ = harness.engines(families.config(folder))
        with pytest.raises(AttributeError, match="mean"):
            engine_log_probs(student, [row, row], packed=False)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_another_view_gives_the_gradient_of_the_plain_formula(case, packed):
    rows = [row for row in case.unequal if len(row["responses"])]
    found = {}
    with engine(case, packed, "opd.divergence.topk=12") as student:
        student.optimizer_step = lambda: found.update(harness.full_gradients(student.module)) or 1.0
        out = harness.update(student, harness.batch(rows, packed=packed))
    assert out["loss"] == pytest.approx(case.loss, rel=1e-4) and out["loss"] > 0
    scale = max(gradient.abs().max() for gradient in case.gradients.values())
    assert found.keys() == case.gradients.keys()
    for name, gradient in found.items():
        worst = (gradient.double() - case.gradients[name]).abs().max()
        assert worst < 1e-4 * scale, name


# Bans


def test_every_vision_token_is_banned_and_ends_a_response(case):
    banned = vision_token_ids(case.worker.tokenizer)
    assert set(case.worker.tokenizer.convert_ids_to_tokens(banned)) == set(case.family.vision_tokens)
    config = case.model.config
    assert {config.image_token_id, config.video_token_id, config.vision_start_token_id} <= set(banned)
    for token in banned:
        output = SimpleNamespace(response_ids=[token, 5], response_mask=[1, 1], response_logprobs=[-1.0, -1.0])
        cut_at_vision_token(output, banned, eos=2)
        assert (output.response_ids, output.response_mask, output.response_logprobs) == ([2], [0], [0.0])


# Refusals


def test_packed_rows_leak_without_the_kernels_and_are_refused(tmp_path, monkeypatch):
    """The first half fails when transformers' rule minds the rows' boundaries: the refusal can then go."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    harness.start()
    monkeypatch.setattr(modeling_qwen3_5, "chunk_gated_delta_rule", None)
    monkeypatch.setattr(head_engine, "is_flash_linear_attention_available", lambda: True)
    folder = families.build("qwen3_5", tmp_path)
    packing = families.config(folder, "actor_rollout_ref.model.use_remove_padding=true")
    worker = families.worker(folder)
    prompts = [families.prompt(worker, families.picture(*size)) for size in SIZES[:2]]
    rows = [families.row(prompt, prompt, [5, 6, 7]) for prompt in prompts]
    with families.unpatched("qwen3_5"):
        expected = log_probs(families.plain(folder), rows[1])
        student, _ = harness.engines(packing)
        _, got = engine_log_probs(student, rows, packed=True)
        assert (got - expected).abs().max() > 1e-3
        monkeypatch.setattr(head_engine, "is_flash_linear_attention_available", lambda: False)
        with pytest.raises(RecipeError, match="use_remove_padding=true.*flash-linear-attention"):
            harness.engines(packing)


def launched(folder, *overrides):
    """The configuration as a run checks it before Ray starts."""
    files = [f"data.{split}_files={folder / 'config.json'}" for split in ("train", "val")]
    return check_run(families.config(folder, *files, *overrides))


def model_folder(folder, model_type):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize("model_type", product.FAMILIES)
def test_a_padded_model_of_a_family_is_let_pass(tmp_path, model_type):
    launched(model_folder(tmp_path, model_type))


@pytest.mark.parametrize("model_type", ["glm4v", "gemma4", "internvl", "llama"])
def test_another_family_is_refused_before_ray_starts(tmp_path, model_type):
    with pytest.raises(
        RecipeError, match=f"family '{model_type}'; this package runs qwen2_vl, qwen2_5_vl, .*families.md"
    ):
        launched(model_folder(tmp_path, model_type))


def test_packing_without_kernels_is_refused_before_ray_starts(tmp_path):
    with pytest.raises(RecipeError, match="family qwen3_5.*set use_remove_padding=false"):
        launched(model_folder(tmp_path, "qwen3_5"), "actor_rollout_ref.model.use_remove_padding=true")


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (None, "no image processor that verl 0.9.1 knows"),
        (SimpleNamespace(config=SimpleNamespace(model_type="gemma4")), "gemma4"),
    ],
)
def test_a_model_from_a_hub_is_refused_when_its_data_is_read(processor, message):
    data = object.__new__(TwoViewDataset)
    data.processor = processor
    with pytest.raises(RecipeError, match=message):
        data.maybe_filter_out_long_prompts([])
