"""LoRA through the real engines: against peft in float64, against a full copy of the teacher, over ranks and checkpoints."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from opd_recipes.check import check_run
from opd_recipes.divergence import Divergence
from opd_recipes.export import export
from opd_recipes.head_engine import TeacherEngine, rows_of_view
from opd_recipes.lora import check_adapter, is_adapter
from opd_recipes.registry import RecipeError
from opd_recipes.teacher import local
from opd_recipes.topk_head import ScoreRequest, TeacherStates
from tests import harness, reference
from tests.unit.lora_helpers import LORA, adapters, config, engines, scatter
from tests.unit.test_engine import (  # noqa: F401  process_group: the engines run in one
    RESPONSES,
    SIZES,
    load,
    process_group,
    scored,
    view_logits,
    with_rollout_log_probs,
    without_step,
)


@pytest.fixture(scope="module")
def rows():
    return with_rollout_log_probs(harness.rows(RESPONSES, sizes=SIZES))


def with_adapter(weights):
    """peft's own model in float64; ``weights`` are those of an engine's module, or of its adapter alone."""
    settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(load(), settings).double()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and not any(map(is_adapter, missing))
    return model


def update(rows, *overrides, micro_tokens=4096):
    """An update of a student whose adapter has moved away from its teacher's; its gradients are kept, nothing steps."""
    student, teacher = engines(*overrides, micro_tokens=micro_tokens)
    scatter(student)
    kept = {}

    def keep():
        kept.update(harness.full_gradients(student.module))
        return 1.0

    student.optimizer_step = keep
    out = harness.update(student, harness.batch(rows, micro_tokens=micro_tokens))
    return kept, out, student


@pytest.fixture(scope="module")
def exact(rows):
    """Loss and gradient of the same adapter by peft and the plain formula, in float64."""
    student, _ = engines()
    scatter(student)
    model = with_adapter(harness.full_weights(student.module))
    loss = reference.loss(scored(model, load(), rows))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("overrides", "micro_tokens"),
    [
        (("opd.head_chunk=1", "actor_rollout_ref.model.enable_gradient_checkpointing=true"), 64),
        (("opd.head_chunk=3", "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false"), 120),
    ],
    ids=["checkpointed", "gathered"],
)
def test_loss_and_gradient_equal_a_float64_reference(rows, exact, overrides, micro_tokens):
    gradients, out, _ = update(rows, *overrides, micro_tokens=micro_tokens)
    loss, expected = exact
    assert out["loss"] == pytest.approx(loss, rel=1e-5)
    assert gradients.keys() == expected.keys() and all(map(is_adapter, expected)), "what is frozen has no gradient"
    scale = max(g.abs().max().item() for g in expected.values())
    for name, grad in gradients.items():
        torch.testing.assert_close(grad.double(), expected[name], atol=2e-5 * scale, rtol=2e-3)


@pytest.mark.parametrize("support", ["student", "full"])
def test_the_head_asks_for_no_gradient_of_a_frozen_weight(support):
    """And gives the hidden states the one that they have with a trained head."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, theirs = (torch.randn(n, 8, generator=generator).double() for n in (5, 20, 5))
    labels = torch.tensor([3, 0, 19, 7, 7])
    gradients = []
    for frozen in (True, False):
        states = hidden.clone().requires_grad_()
        tail = "none" if support == "full" else "bucket"
        divergence = Divergence("jsd", support, tail, 4, alpha=0.5)
        head = weight.clone().requires_grad_(not frozen)
        teacher = TeacherStates(theirs, weight)
        request = ScoreRequest(torch.arange(5), labels, chunk=2, teacher=teacher, divergence=divergence)
        request(states[None], head)["divergence"].sum().backward()
        assert (head.grad is None) == frozen
        gradients.append(states.grad)
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0


def test_two_ranks_have_the_gradient_teacher_and_rollout_weights_of_one(rows, tmp_path):
    gradients, out, student = update(rows)
    torch.save(rows, tmp_path / "rows.pt")
    port = str(harness.free_port())
    command = [sys.executable, str(Path(__file__).parent / "two_ranks_lora.py")]
    ranks = [subprocess.Popen([*command, str(rank), port, str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    result = torch.load(tmp_path / "result.pt")
    assert result["loss"] == pytest.approx(out["loss"], rel=1e-5)
    scale = max(g.abs().max().item() for g in gradients.values())
    assert result["gradients"].keys() == gradients.keys()
    assert max((result["gradients"][name] - g).abs().max().item() for name, g in gradients.items()) < 1e-5 * scale
    for name, weight in dict(student.get_per_tensor_param()[0]).items():
        torch.testing.assert_close(result["rollout"][name], weight, atol=1e-6, rtol=1e-5)
    for name, before in result["teacher_before"].items():  # after a step, by hand
        expected = before + 0.05 * (result["student_after"][name] - before)
        torch.testing.assert_close(result["teacher_after"][name], expected, atol=1e-7, rtol=1e-5)
    # One rank goes on from their checkpoint.
    student, teacher = engines()
    student.load_checkpoint(str(tmp_path / "student"))
    teacher.load_checkpoint(str(tmp_path / "teacher"))
    for found, name in ((adapters(student), "student_after"), (teachers_adapter(teacher), "teacher_after")):
        assert found.keys() == result[name].keys()
        assert all(torch.equal(weight, result[name][key]) for key, weight in found.items())


# The teacher


def teachers_adapter(teacher):
    """The adapter that the module has while the teacher runs."""
    with teacher.eval_mode():
        return adapters(teacher.student)


def test_the_teacher_starts_as_the_student_is_and_follows_by_the_rate(rows):
    student, teacher = engines("opd.teacher.rate=0.25")
    start, frozen = adapters(student), harness.full_weights(student.module)
    assert all(torch.equal(start[name], weight) for name, weight in teachers_adapter(teacher).items())
    for _ in range(2):  # A has a gradient from the second step on, when B is not 0 any more
        before = teachers_adapter(teacher)
        harness.update(student, harness.batch(rows))
        after = adapters(student)
        for name, weight in teachers_adapter(teacher).items():
            expected = before[name] + 0.25 * (after[name] - before[name])
            torch.testing.assert_close(weight, expected, atol=1e-7, rtol=1e-6)
    assert all((after[name] != start[name]).any() for name in start)
    now = harness.full_weights(student.module)
    assert all(torch.equal(now[name], frozen[name]) for name in now if not is_adapter(name))


def test_the_teacher_is_what_a_full_copy_of_the_model_with_its_adapter_is(rows):
    """And the student is afterwards what it was, bit for bit."""
    student, teacher = engines("opd.teacher.rate=0.5")
    scatter(student)
    harness.update(student, harness.batch(rows))
    copy, average = TeacherEngine.beside(student), teachers_adapter(teacher)
    for name, parameter in copy.module.named_parameters():
        if is_adapter(name):
            local(parameter.detach()).copy_(average[name])
    assert any((average[name] != weight).any() for name, weight in adapters(student).items())
    before = harness.full_weights(student.module)
    data = harness.batch(rows)
    with student.eval_mode(), teacher.eval_mode():
        seen = teacher.hidden_states(rows_of_view(data, "teacher"))["hidden"].values()
        head = teacher.head_weight()
    with copy.eval_mode():
        expected = copy.hidden_states(rows_of_view(data, "teacher"))["hidden"].values()
        assert torch.equal(head, copy.head_weight())
    assert torch.equal(seen, expected) and seen.abs().sum() > 0
    with student.eval_mode():
        own = student.hidden_states(rows_of_view(data, "teacher"))["hidden"].values()
    assert (own - seen).abs().max() > 1e-3, "the student's is another"
    assert all(torch.equal(before[name], weight) for name, weight in harness.full_weights(student.module).items())


@pytest.mark.parametrize("kind", ["ema", "trust_region"])
def test_each_teacher_in_the_second_step(rows, kind):
    """The loss after one step, against float64 models with the adapters that this teacher has by definition."""
    student, _ = engines(f"opd/teacher={kind}", *(["opd.teacher.rate=0.3"] if kind == "trust_region" else []))
    start = adapters(student)
    harness.update(student, harness.batch(rows))
    out = harness.update(without_step(student), harness.batch(rows))
    moved = adapters(student)
    average = {name: start[name].double().lerp(moved[name].double(), 0.05) for name in start}
    theirs = average if kind == "ema" else start
    ours = with_adapter(moved)
    table = scored(ours, with_adapter(theirs), rows)
    if kind == "trust_region":
        for row, score in zip(rows, table, strict=True):
            score["teacher"] = torch.lerp(score["teacher"], view_logits(ours, row, "teacher"), 0.3)
    assert out["loss"] == pytest.approx(reference.loss(table).item(), rel=1e-4)


def test_an_external_teacher_has_no_adapter_and_stays(rows):
    student, teacher = engines("opd/teacher=external", f"opd.teacher.path={harness.BASE}")
    assert isinstance(teacher, TeacherEngine) and not any(map(is_adapter, harness.full_weights(teacher.module)))
    harness.update(student, harness.batch(rows))
    out = harness.update(without_step(student), harness.batch(rows))
    expected = reference.loss(scored(with_adapter(adapters(student)), load(), rows))
    assert out["loss"] == pytest.approx(expected.item(), rel=1e-4)


# Weights for the rollouts, checkpoints, export


def test_rollouts_get_every_adapter_merged_and_nothing_is_moved():
    student, _ = engines()
    scatter(student)
    before = harness.full_weights(student.module)
    sent, settings = student.get_per_tensor_param(base_sync_done=True)
    sent = dict(sent)
    expected = with_adapter(before).merge_and_unload().state_dict()
    assert settings is None and sent.keys() == expected.keys()
    for name, weight in sent.items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight.double(), expected[name], atol=1e-6, rtol=1e-6)
    assert all(torch.equal(before[name], weight) for name, weight in harness.full_weights(student.module).items())
    base = load().state_dict()
    assert (sent["model.visual.merger.linear_fc1.weight"] - base["model.visual.merger.linear_fc1.weight"]).any()


def test_verls_own_merge_still_leaves_out_the_outermost_group():
    """Why the engine has one of its own: when this fails, verl's may do."""
    student, _ = engines()
    scatter(student)
    theirs = dict(student._merged_lora_per_tensor_param())
    base = load().state_dict()
    name = "model.visual.merger.linear_fc1.weight"
    assert torch.equal(theirs[name], base[name].bfloat16())
    inner = "model.language_model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(theirs[inner], base[inner].bfloat16())


@pytest.mark.parametrize(("offload", "alone"), [("false", "false"), ("true", "true")])
def test_a_resumed_run_goes_on_bit_for_bit(rows, tmp_path, offload, alone):
    """Of whole checkpoints, and offloaded of those with the adapter alone."""
    overrides = [f"actor_rollout_ref.actor.fsdp_config.{kind}_offload={offload}" for kind in ("param", "optimizer")]
    overrides.append(f"+actor_rollout_ref.actor.checkpoint.save_lora_only={alone}")
    student, teacher = engines(*overrides)
    harness.update(student, harness.batch(rows))
    student.save_checkpoint(str(tmp_path / "actor"))
    teacher.save_checkpoint(str(tmp_path / "actor" / "teacher"))
    saved = adapters(student), teachers_adapter(teacher)
    harness.update(student, harness.batch(rows))
    expected = adapters(student), teachers_adapter(teacher)
    again, follower = engines(*overrides)
    scatter(again)
    again.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    follower.load_checkpoint(str(tmp_path / "actor" / "teacher"))
    for old, new in zip(saved, (adapters(again), teachers_adapter(follower)), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    harness.update(again, harness.batch(rows))
    for old, new in zip(expected, (adapters(again), teachers_adapter(follower)), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    shard = torch.load(tmp_path / "actor" / "teacher" / "model_world_size_1_rank_0.pt", weights_only=False)
    assert shard.keys() == saved[1].keys(), "the frozen weights are in the checkpoint once"


@pytest.fixture(scope="module")
def written(rows, tmp_path_factory):
    """A checkpoint, and both models' adapters in it."""
    folder = tmp_path_factory.mktemp("written")
    student, teacher = engines("opd.teacher.rate=0.5")
    scatter(student)
    harness.update(student, harness.batch(rows))
    student.save_checkpoint(str(folder / "actor"))
    teacher.save_checkpoint(str(folder / "actor" / "teacher"))
    return folder, {"student": adapters(student), "teacher": teachers_adapter(teacher)}


def logits(model, row):
    return view_logits(model.double(), row, "teacher")


@pytest.mark.parametrize("which", ["student", "teacher"])
def test_an_exported_model_says_what_the_run_had(rows, written, tmp_path, which):
    folder, weights = written
    expected = logits(with_adapter(weights[which]), rows[0])
    export(folder, tmp_path / "merged", which=which, dtype="float32")
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", **options)
    torch.testing.assert_close(logits(merged, rows[0]), expected, atol=2e-5, rtol=1e-5)
    export(folder, tmp_path / "adapter", which=which, adapter=True)
    files = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files <= {*files, "README.md"}
    peft = PeftModel.from_pretrained(load(), tmp_path / "adapter")
    assert {name for name, _ in peft.named_parameters() if is_adapter(name)} == weights[which].keys()
    torch.testing.assert_close(logits(peft, rows[0]), expected, atol=1e-9, rtol=1e-9)


def test_a_run_starts_from_an_exported_adapter(written, tmp_path):
    folder, weights = written
    export(folder, tmp_path / "adapter", adapter=True)
    start = f"actor_rollout_ref.model.lora_adapter_path={tmp_path / 'adapter'}"
    student, teacher = engines(start)
    for found in (adapters(student), teachers_adapter(teacher)):
        assert all(torch.equal(found[name], weight) for name, weight in weights["student"].items())
    with pytest.raises(RecipeError, match="has rank 4; set that"):
        engines(start, "actor_rollout_ref.model.lora_rank=8")


def test_what_cannot_be_exported_is_said(rows, written, tmp_path):
    folder, _ = written
    student, _ = engines("+actor_rollout_ref.actor.checkpoint.save_lora_only=true")
    student.save_checkpoint(str(tmp_path / "alone" / "actor"))
    with pytest.raises(RecipeError, match="use --adapter, and peft's merge_and_unload"):
        export(tmp_path / "alone", tmp_path / "out")
    export(tmp_path / "alone", tmp_path / "adapter", adapter=True)
    meta = tmp_path / "alone" / "actor" / "lora_train_meta.json"
    meta.write_text('{"r": 2, "lora_alpha": 8}')
    with pytest.raises(RecipeError, match="has rank 4, lora_train_meta.json says 2"):
        export(tmp_path / "alone", tmp_path / "out", adapter=True)
    meta.write_text('{"r": 4}')
    with pytest.raises(RecipeError, match="does not say rank and alpha"):
        export(tmp_path / "alone", tmp_path / "out", adapter=True)
    meta.unlink()
    with pytest.raises(RecipeError, match="says how it is scaled"):
        export(tmp_path / "alone", tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()
    plain, _ = harness.engines(harness.config())
    plain.save_checkpoint(str(tmp_path / "plain" / "actor"))
    with pytest.raises(RecipeError, match="trained all weights and has no adapter"):
        export(tmp_path / "plain", tmp_path / "out", adapter=True)


# Settings


def test_the_random_half_is_drawn_from_the_runs_seed():
    torch.manual_seed(5)
    first, state = adapters(engines()[0]), torch.get_rng_state()
    torch.manual_seed(7)
    again = adapters(engines()[0])
    assert all(torch.equal(first[name], again[name]) for name in first)
    torch.manual_seed(5)
    assert torch.equal(state, torch.get_rng_state()), "and leaves everything else's randomness alone"


MODEL = "actor_rollout_ref.model"
REFUSED = [
    (["lora.merge=false"], "rollouts would not be the student's; set lora.merge=true"),
    (["target_modules=[q_proj,lm_head]"], "target_modules=.*has lm_head, whose weight the streamed head needs"),
    (["target_modules='.*(proj|head)'"], "has lm_head"),
    (["+target_parameters=[mlp.experts.down_proj]"], "target_parameters: must be null"),
    (["lora.rank=8"], "lora.rank=8: is for Megatron"),
    (["lora_rank=0", "lora_adapter_path=/a"], "lora_adapter_path=/a with lora_rank=0: it would not be loaded"),
    (["lora_rank=-1"], "lora_rank=-1, lora_alpha=32: must be whole numbers above 0"),
    (["lora_alpha=0"], "must be whole numbers above 0"),
    (["lora_alpha=2.5"], "must be whole numbers above 0"),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_refused(overrides, words):
    marked = [f"+{MODEL}.{o[1:]}" if o.startswith("+") else f"{MODEL}.{o}" for o in overrides]
    with pytest.raises(RecipeError, match=words):
        check_run(harness.config(*marked, overlay="[cpu,toy,lora]"), files=False)


def test_weights_that_are_sent_as_changes_are_refused():
    delta = "actor_rollout_ref.rollout.checkpoint_engine.backend=delta_sharded"
    with pytest.raises(RecipeError, match="sends the frozen weights alone"):
        check_run(harness.config(delta, overlay="[cpu,toy,lora]"), files=False)


@pytest.mark.parametrize(
    "targets", ["all-linear", "[q_proj,v_proj]", "'.*_proj'", "'.*(proj|head)' model.exclude_modules=lm_head"]
)
def test_let_pass(targets):
    overrides = [f"{MODEL}.{o.removeprefix('model.')}" for o in f"target_modules={targets}".split(" ")]
    check_run(config(*overrides), files=False)


@pytest.mark.parametrize(
    "option", [{"use_dora": True}, {"use_rslora": True}, {"bias": "lora_only"}, {"rank_pattern": {"q_proj": 2}}]
)
def test_an_adapter_that_is_not_plain_is_refused(option):
    with pytest.raises(RecipeError, match=f"the adapter has {next(iter(option))}; only plain LoRA"):
        check_adapter(LoraConfig(r=4, **option), 4)
    check_adapter(LoraConfig(r=4), 4)


def test_the_overlay_is_one_word():
    model = harness.config(overlay="[cpu,toy,lora]").actor_rollout_ref.model
    assert (model.lora_rank, model.lora_alpha, model.lora.merge) == (32, 32, True)
    assert LORA[0] == f"{MODEL}.lora_rank=4"
