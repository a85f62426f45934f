"""The real engines against whole-logits float64 models: values, gradients, alignment, splits, ranks, teacher, checkpoints."""

import math
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from opd_recipes.registry import RecipeError
from tests import harness, reference

# Unequal lengths of prompts and responses, an empty response, one that hits the limit of 4.
RESPONSES = [[5, 6], [7], [8, 9, 10, 11], [], [12, 13, 14]]
SIZES = [192, 128, 192, 160, 96]


@pytest.fixture(scope="module", autouse=True)
def process_group():
    """verl replaces methods of transformers' classes for its engines: other tests get the originals back."""
    from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

    classes = [value for value in vars(modeling).values() if isinstance(value, type)]
    before = {cls: dict(vars(cls)) for cls in classes if cls.__module__ == modeling.__name__}
    harness.start()
    yield
    for cls, attributes in before.items():
        for name, value in attributes.items():
            if callable(value) and vars(cls).get(name) is not value:
                setattr(cls, name, value)


@pytest.fixture(scope="module")
def rows():
    return with_rollout_log_probs(harness.rows(RESPONSES, sizes=SIZES))


def load(path=harness.BASE):
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float64, attn_implementation="eager")


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """The base model with a head of its own, which has more rows than the tokenizer has ids."""
    import shutil

    folder = tmp_path_factory.mktemp("untied")
    shutil.copytree(harness.BASE, folder, dirs_exist_ok=True)
    model = load().float()
    torch.manual_seed(0)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.02 * torch.randn(336, 128))
    model.resize_token_embeddings(352)
    model.save_pretrained(folder)
    return folder


def response_logits(model, ids, positions, inputs, length):
    """The logits that predict the last ``length`` tokens of one sequence, (length, V); one row at a time, no padding."""
    inputs = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_grid_thw")}
    inputs["pixel_values"] = inputs["pixel_values"].to(next(model.parameters()).dtype)
    logits = model(input_ids=ids[None], position_ids=positions[1:, None], **inputs).logits[0]
    return logits[len(ids) - length - 1 : len(ids) - 1]


def view_logits(model, row, view):
    """What the model says after ``teacher`` or ``negative``."""
    columns = (row[f"{view}_{name}"] for name in ("input_ids", "positions", "multi_modal_inputs"))
    ids, positions, inputs = columns
    with torch.no_grad():
        return response_logits(model, ids, positions.T, inputs, len(row["responses"]))


def scored(student, teacher, rows):
    """Rows for :func:`reference.loss`."""
    out = []
    for row in rows:
        n = len(row["responses"])
        ours = response_logits(student, row["input_ids"], row["position_ids"], row["multi_modal_inputs"], n)
        theirs = view_logits(teacher, row, "teacher")
        out.append(
            {
                "student": ours,
                "teacher": theirs,
                "negative": view_logits(teacher, row, "negative"),
                "labels": row["responses"],
                "mask": row["loss_mask"],
                "rollout": row["rollout_log_probs"],
            }
        )
    return out


def with_rollout_log_probs(rows):
    """As another engine would have them: near the model's, so that importance weights lie on both sides of 1 and the cap."""
    model = load()
    generator = torch.Generator().manual_seed(0)
    for row in rows:
        n = len(row["responses"])
        with torch.no_grad():
            logits = response_logits(model, row["input_ids"], row["position_ids"], row["multi_modal_inputs"], n)
        exact = logits.log_softmax(-1).gather(1, row["responses"][:, None])[:, 0]
        row["rollout_log_probs"] = (exact + torch.randn(n, generator=generator) * 0.6).float()
    return rows


def without_step(student):
    """Keep the gradients: the optimizer does not step, its norm is finite."""
    student.optimizer_step = lambda: 1.0
    return student


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean"])
def test_loss_equals_a_float64_reference(rows, aggregation):
    student, _ = harness.engines(harness.config(f"opd.objective.aggregation={aggregation}"))
    out = harness.update(without_step(student), harness.batch(rows))
    model, teacher = load(), load()
    expected = reference.loss(scored(model, teacher, rows), aggregation=aggregation)
    assert out["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert 0 < out["opd/importance_capped"] < 1


@pytest.mark.parametrize(("overrides", "chunk"), [((), 3), (("opd/weights=margin",), 512)])
def test_a_trace_is_what_float64_models_say_of_each_token(rows, overrides, chunk):
    negative = ["opd.views.negative=[{kind: crop, zoom: 2.0, min_size: 48}, {kind: mask_blur}]"] if overrides else []
    student, _ = harness.engines(harness.config(*overrides, *negative, f"opd.head_chunk={chunk}"))
    data = harness.batch(rows, temperature=0.7)
    weights = harness.full_weights(student.module)
    with student.eval_mode():
        traced = student.trace(data)
    assert all(torch.equal(w, weights[name]) for name, w in harness.full_weights(student.module).items())
    model = load()
    for i, row in enumerate(scored(model, model, rows)):
        got = {key.removeprefix("trace_"): traced[key][i] for key in list(traced.keys())}
        assert {len(values) for values in got.values()} == {len(row["labels"])}
        if len(row["labels"]) == 0:
            continue
        p, q, negative = ((row[key].detach() / 0.7).log_softmax(-1) for key in ("student", "teacher", "negative"))
        expected = [
            reference.divergence(a, b, label=int(y), kind="jsd", support="student", tail="bucket", k=100, alpha=0.5)
            for a, b, y in zip(p, q, row["labels"], strict=True)
        ]
        torch.testing.assert_close(got["divergence"].double(), torch.stack(expected), rtol=1e-3, atol=1e-6)
        for name, logs in (("student", p), ("teacher", q)):
            own = logs.gather(1, row["labels"][:, None])[:, 0]
            torch.testing.assert_close(got[f"{name}_logp"].double(), own, rtol=1e-4, atol=1e-4)
            entropy = -(logs.exp() * logs).sum(-1)
            torch.testing.assert_close(got[f"{name}_entropy"].double(), entropy, rtol=1e-4, atol=1e-4)
            top = logs.topk(5)
            torch.testing.assert_close(got[f"{name}_top_logp"].double(), top.values, rtol=1e-4, atol=1e-4)
            assert torch.equal(got[f"{name}_top_ids"], top.indices)
        assert ("weight" in got) == bool(overrides)
        if overrides:
            margin = (q - negative).gather(1, row["labels"][:, None])[:, 0].relu()
            torch.testing.assert_close(got["weight"].double(), margin, rtol=1e-3, atol=1e-4)


def gradients_of(rows, *overrides, micro_tokens=4096):
    """Gradients of the update, kept from being cleared on the way out of the training mode."""
    student, _ = harness.engines(harness.config(*overrides), micro_tokens=micro_tokens)
    kept = {}

    def keep():
        kept.update(harness.full_gradients(student.module))
        return 1.0

    student.optimizer_step = keep
    out = harness.update(student, harness.batch(rows, packed=student.use_remove_padding, micro_tokens=micro_tokens))
    return kept, out


def test_gradient_equals_a_float64_reference(rows):
    ours, _ = gradients_of(rows)
    model, teacher = load(), load()
    reference.loss(scored(model, teacher, rows)).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == expected.keys()
    scale = max(g.abs().max().item() for g in expected.values())
    for name, grad in ours.items():
        torch.testing.assert_close(
            grad.double(), expected[name], atol=2e-5 * scale, rtol=2e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


UNTIED = "actor_rollout_ref.model.path={}"
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing=true"


def test_gradient_of_an_untied_padded_head_under_gradient_checkpointing(rows, untied):
    ours, out = gradients_of(rows, UNTIED.format(untied), CHECKPOINTING)
    model, teacher = load(untied), load(untied)
    assert model.lm_head.weight is not model.get_input_embeddings().weight and len(model.lm_head.weight) == 352
    expected = reference.loss(scored(model, teacher, rows))
    expected.backward()
    assert out["loss"] == pytest.approx(expected.item(), rel=1e-4)
    exact = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == exact.keys() and "lm_head.weight" in ours
    scale = max(g.abs().max().item() for g in exact.values())
    for name, grad in ours.items():
        torch.testing.assert_close(grad.double(), exact[name], atol=2e-5 * scale, rtol=2e-3)


def test_gradient_does_not_depend_on_micro_batches_or_chunks(rows):
    whole, out = gradients_of(rows)
    for overrides, micro_tokens in (([], 64), ([], 120), (["opd.head_chunk=3"], 4096), (["opd.head_chunk=1"], 64)):
        parts, other = gradients_of(rows, *overrides, micro_tokens=micro_tokens)
        scale = max(g.abs().max().item() for g in whole.values())
        assert max((parts[n] - g).abs().max().item() for n, g in whole.items()) < 1e-5 * scale
        for key in ("loss", "opd/divergence", "opd/entropy", "opd/student_mass", "opd/importance_weight"):
            assert other[key] == pytest.approx(out[key], rel=1e-5), key


MARGIN = ["opd/weights=margin", "opd.views.negative=[{kind: noise}]", "opd.objective.aggregation=token_mean"]


@pytest.mark.parametrize(
    ("reshard", "recipe"),
    [("true", []), ("false", [UNTIED, CHECKPOINTING]), ("true", [*MARGIN, "opd.weights.normaliser=weight_sum"])],
    ids=["resharded", "gathered-untied-checkpointing", "margin-shared-image"],
)
def test_gradient_and_teacher_do_not_depend_on_the_number_of_ranks(rows, untied, tmp_path, reshard, recipe):
    recipe = [override.format(untied) if override == UNTIED else override for override in recipe]
    if "opd/weights=margin" in recipe:  # one rank has two rows that show one image, the other none
        rows = [rows[0], rows[1], rows[2], rows[4], deepcopy(rows[2])]
    single, out = gradients_of(rows, *recipe)
    scale = max(g.abs().max().item() for g in single.values())
    torch.save(rows, tmp_path / "rows.pt")
    port = str(harness.free_port())
    script = Path(__file__).parent / "two_ranks.py"
    options = [f"actor_rollout_ref.actor.fsdp_config.reshard_after_forward={reshard}", "opd.teacher.rate=0.05"]
    options += recipe
    command = [sys.executable, str(script)]
    ranks = [subprocess.Popen([*command, str(rank), port, str(tmp_path), *options]) for rank in range(2)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    result = torch.load(tmp_path / "result.pt")
    assert result["loss"] == pytest.approx(out["loss"], rel=1e-5)
    assert result["margins"] == pytest.approx({key: value for key, value in out.items() if "margin" in key}, rel=1e-4)
    assert max((result["gradients"][n] - g).abs().max().item() for n, g in single.items()) < 1e-5 * scale
    torch.testing.assert_close(
        result["teacher_gap_after"] / result["teacher_gap_before"], torch.tensor(0.95), rtol=1e-4, atol=0
    )
    one_rank_goes_on(rows, result, tmp_path, recipe)


def one_rank_goes_on(rows, result, folder, recipe):
    """From the two ranks' checkpoint: the same weights, and after another update, which needs Adam's moments, too."""
    student, teacher = harness.engines(harness.config(*recipe, "opd.teacher.rate=0.05"))
    student.load_checkpoint(str(folder / "student"))
    teacher.load_checkpoint(str(folder / "teacher"))
    for engine, saved in zip((student, teacher), result["saved"], strict=True):
        assert all(torch.equal(weight, saved[name]) for name, weight in harness.full_weights(engine.module).items())
    harness.update(student, harness.batch(rows))
    for engine, third in zip((student, teacher), result["third"], strict=True):
        for name, weight in harness.full_weights(engine.module).items():
            torch.testing.assert_close(weight, third[name], rtol=1e-4, atol=1e-5)
    moved = sum(not torch.equal(result["saved"][0][name], weight) for name, weight in result["third"][0].items())
    assert moved > 0.9 * len(result["third"][0])


def test_same_view_and_same_weights_diverge_by_exactly_zero():
    rows = harness.rows(RESPONSES, same_view=True)
    student, _ = harness.engines(harness.config())
    out = harness.update(student, harness.batch(rows))
    assert out["opd/divergence"] == 0 and out["loss"] == 0 and out["grad_norm"] == 0


def gap(student, teacher):
    ours, theirs = harness.full_weights(student.module), harness.full_weights(teacher.module)
    return {name: theirs[name] - ours[name] for name in ours}


def test_the_ema_gap_shrinks_by_exactly_the_rate(rows):
    student, teacher = harness.engines(harness.config("opd.teacher.rate=0.25"))
    before_step = harness.full_weights(teacher.module)
    harness.update(student, harness.batch(rows))
    after = harness.full_weights(student.module)
    moved = 0
    for name, weight in harness.full_weights(teacher.module).items():
        expected = before_step[name] + 0.25 * (after[name] - before_step[name])
        torch.testing.assert_close(weight, expected, atol=1e-7, rtol=1e-6)
        moved += (after[name] != before_step[name]).any().item()
    assert moved == len(before_step)  # every parameter was trained, the vision tower's included


def test_a_non_finite_gradient_moves_neither_student_nor_teacher(rows):
    student, teacher = harness.engines(harness.config())
    bad = [dict(row) for row in rows]
    bad[0]["multi_modal_inputs"] = {**bad[0]["multi_modal_inputs"]}
    bad[0]["multi_modal_inputs"]["pixel_values"] = bad[0]["multi_modal_inputs"]["pixel_values"] * math.nan
    before = harness.full_weights(student.module), harness.full_weights(teacher.module)
    out = harness.update(student, harness.batch(bad))
    after = harness.full_weights(student.module), harness.full_weights(teacher.module)
    assert out["opd/skipped_updates"] == 1 and student.finite_steps == 0
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    out = harness.update(student, harness.batch(rows))
    assert out["opd/skipped_updates"] == 1 and student.finite_steps == 1 and math.isfinite(out["grad_norm"])


def test_teacher_log_probs_sit_on_the_right_tokens(rows):
    """The sampled tokens' log-probs of both models, token by token, against one-row forwards without padding."""
    student, teacher = harness.engines(harness.config())
    seen = []

    def look(answer, micro_batch, total):
        seen.append((micro_batch["responses"].unbind(), micro_batch["responses"].offsets().diff().tolist(), answer))
        return answer["divergence"].sum() * 0, {}

    with student.train_mode():
        student.train_batch(harness.batch(rows, micro_tokens=120), look)
    assert len(seen) > 1
    found = {}
    for responses, lengths, answer in seen:
        pieces = zip(*(answer[k].detach().split(lengths) for k in ("log_probs", "teacher_log_probs")), strict=True)
        found |= {tuple(r.tolist()): piece for r, piece in zip(responses, pieces, strict=True)}
    model = load()
    for row, score in zip(rows, scored(model, model, rows), strict=True):
        ours, theirs = found[tuple(row["responses"].tolist())]
        for got, logits in ((ours, score["student"]), (theirs, score["teacher"])):
            expected = logits.log_softmax(-1).gather(1, row["responses"][:, None])[:, 0]
            torch.testing.assert_close(got.double(), expected.detach(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("responses", [[[5, 6], [7, 8], [9, 10]], RESPONSES], ids=["equal", "unequal"])
def test_log_prob_pass_agrees_with_one_row_forwards(responses):
    """verl's infer path (old log-probs), also where all sequences have one length and verl's positions go wrong."""
    equal = responses is not RESPONSES
    rows = harness.rows(responses, sizes=None if equal else SIZES)
    student, _ = harness.engines(harness.config())
    data = harness.batch(rows)
    with student.eval_mode():
        out = student.infer_batch(data)["model_output"]
    model = load()
    for row, log_probs, entropy in zip(rows, out["log_probs"].unbind(), out["entropy"].unbind(), strict=True):
        n = len(row["responses"])
        logits = response_logits(model, row["input_ids"], row["position_ids"], row["multi_modal_inputs"], n).detach()
        expected = logits.log_softmax(-1).gather(1, row["responses"][:, None])[:, 0]
        torch.testing.assert_close(log_probs[len(log_probs) - n - 1 : -1].double(), expected, atol=2e-5, rtol=1e-5)
        exact = torch.special.entr(logits.softmax(-1)).sum(-1)
        torch.testing.assert_close(entropy[len(entropy) - n - 1 : -1].double(), exact, atol=2e-5, rtol=1e-4)


def test_all_rows_masked_is_no_update_of_the_loss(rows):
    masked = [{**row, "loss_mask": torch.zeros_like(row["loss_mask"])} for row in rows]
    student, _ = harness.engines(harness.config())
    out = harness.update(without_step(student), harness.batch(masked))
    assert out["loss"] == 0


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("forward_kl", {}),
        ("reverse_kl", {}),
        ("bc_reverse_kl", {"support": "teacher", "tail": "none"}),
        ("sampled_kl", {"estimator": "k2"}),
    ],
)
def test_other_divergences_through_the_engine(rows, kind, options):
    student, _ = harness.engines(harness.config(f"opd/divergence={kind}"))
    out = harness.update(without_step(student), harness.batch(rows))
    model = load()
    expected = reference.loss(scored(model, model, rows), kind=kind, **options)
    assert out["loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_packed_rows_equal_padded_rows(rows):
    """The layout of GPU runs (use_remove_padding), here with PyTorch's attention in the place of flash-attn."""
    padded, out = gradients_of(rows)
    packed, other = gradients_of(rows, "actor_rollout_ref.model.use_remove_padding=true")
    assert other["loss"] == pytest.approx(out["loss"], rel=1e-5)
    scale = max(g.abs().max().item() for g in padded.values())
    assert max((packed[n] - g).abs().max().item() for n, g in padded.items()) < 1e-5 * scale


def test_checkpoint_of_the_teacher(rows, tmp_path):
    student, teacher = harness.engines(harness.config())
    harness.update(student, harness.batch(rows))
    teacher.save_checkpoint(str(tmp_path))
    saved = harness.full_weights(teacher.module)
    harness.update(student, harness.batch(rows))
    assert any(not torch.equal(saved[n], w) for n, w in harness.full_weights(teacher.module).items())
    teacher.load_checkpoint(str(tmp_path))
    assert all(torch.equal(saved[n], w) for n, w in harness.full_weights(teacher.module).items())


def test_checkpoint_with_everything_offloaded(rows, tmp_path):
    offload = [f"actor_rollout_ref.actor.fsdp_config.{kind}_offload=true" for kind in ("param", "optimizer")]
    student, teacher = harness.engines(harness.config(*offload))
    harness.update(student, harness.batch(rows))
    student.save_checkpoint(str(tmp_path / "student"))
    teacher.save_checkpoint(str(tmp_path / "teacher"))
    saved = harness.full_weights(student.module), harness.full_weights(teacher.module)
    harness.update(student, harness.batch(rows))
    student.load_checkpoint(str(tmp_path / "student"))
    teacher.load_checkpoint(str(tmp_path / "teacher"))
    for old, engine in zip(saved, (student, teacher), strict=True):
        assert all(torch.equal(old[name], weight) for name, weight in harness.full_weights(engine.module).items())


def test_verls_padding_rows_change_nothing(rows):
    """verl fills up a batch from which rollouts are missing with one-token text rows that have no loss."""
    from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

    whole, out = gradients_of(rows)
    padding, _ = construct_minimal_padding_template(dict(rows[0]), {}, eos_token_id=1)
    padded, other = gradients_of([*rows, {key: padding[key] for key in rows[0]}])
    assert other["loss"] == pytest.approx(out["loss"], rel=1e-6)
    scale = max(g.abs().max().item() for g in whole.values())
    assert max((padded[n] - g).abs().max().item() for n, g in whole.items()) < 1e-5 * scale


def test_non_finite_gradients_in_a_row_stop_the_run(rows):
    student, _ = harness.engines(harness.config("opd.max_skipped_updates=2"))
    bad = [dict(row) for row in rows]
    pixels = bad[0]["multi_modal_inputs"]["pixel_values"]
    bad[0]["multi_modal_inputs"] = {**bad[0]["multi_modal_inputs"], "pixel_values": pixels * math.nan}
    harness.update(student, harness.batch(bad))
    harness.update(student, harness.batch(rows))
    harness.update(student, harness.batch(bad))
    with pytest.raises(FloatingPointError, match="2 updates in a row.*lower learning rate"):
        harness.update(student, harness.batch(bad))


@pytest.mark.parametrize("normaliser", ["valid_tokens", "selected", "weight_sum"])
@pytest.mark.parametrize("micro_tokens", [64, 4096])
def test_margin_weights_equal_a_float64_reference(rows, normaliser, micro_tokens):
    """OPD-V: relu(log q+ - log q-) of the sampled token times the divergence, one teacher pass over both views."""
    student, _ = harness.engines(harness.config(*MARGIN, f"opd.weights.normaliser={normaliser}"), micro_tokens)
    out = harness.update(without_step(student), harness.batch(rows, micro_tokens=micro_tokens))
    model = load()
    table = scored(model, model, rows)
    margins = []
    for row in table:
        log_q = [row[view].log_softmax(-1).gather(1, row["labels"][:, None])[:, 0] for view in ("teacher", "negative")]
        margins.append(log_q[0] - log_q[1])
    flat = torch.cat(margins)
    relu = flat.clamp(min=0)
    denominator = {"valid_tokens": len(flat), "selected": (flat > 0).sum(), "weight_sum": relu.sum()}[normaliser]
    # The reference's rows one token long, so that its token mean is one term of the sum.
    tokens = [{**{k: v[t : t + 1] for k, v in row.items()}} for row in table for t in range(len(row["labels"]))]
    expected = sum(w * reference.loss([token], aggregation="token_mean") for w, token in zip(relu, tokens, strict=True))
    assert 0 < (flat > 0).sum() < len(flat)
    assert out["loss"] == pytest.approx((expected / denominator).item(), rel=1e-4)
    assert out["opd/margin_selected"] == pytest.approx((flat > 0).double().mean().item())
    for q in (5, 25, 50, 75, 95):
        assert out[f"opd/margin_p{q}"] == pytest.approx(torch.quantile(flat, q / 100).item(), abs=1e-4)
    both = sum(len(row["teacher_input_ids"]) + len(row["negative_input_ids"]) for row in rows)
    assert out["opd/teacher_tokens"] == both


def test_trust_region_mixes_the_live_student_on_the_teachers_view(rows):
    """After a step student and reference differ; the teacher's logits are between theirs."""
    student, teacher = harness.engines(harness.config("opd/teacher=trust_region", "opd.teacher.rate=0.3"))
    harness.update(student, harness.batch(rows))
    out = harness.update(without_step(student), harness.batch(rows))
    model, live = load(), load()
    live.load_state_dict(harness.full_weights(student.module), strict=False)
    live.double()
    table = scored(live, model, rows)
    for row, score in zip(rows, table, strict=True):
        score["teacher"] = torch.lerp(score["teacher"], view_logits(live, row, "teacher"), 0.3)
    assert out["loss"] == pytest.approx(reference.loss(table).item(), rel=1e-4)
    untouched = load().state_dict()
    for name, weight in harness.full_weights(teacher.module).items():
        assert torch.equal(weight.double(), untouched[name]), name


def test_an_external_teacher_may_have_other_sizes(rows, tmp_path):
    """Another checkpoint, one layer less: compared by logits, never changed by the student's steps."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    config = AutoConfig.from_pretrained(harness.BASE)
    config.text_config.num_hidden_layers -= 1
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = config.text_config.layer_types[:-1]
    torch.manual_seed(0)
    other = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float()
    other.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(harness.BASE).save_pretrained(tmp_path)
    student, teacher = harness.engines(harness.config("opd/teacher=external", f"opd.teacher.path={tmp_path}"))
    before = harness.full_weights(teacher.module)
    out = harness.update(student, harness.batch(rows))
    expected = reference.loss(scored(load(), other.double(), rows))
    assert out["loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert all(torch.equal(before[name], weight) for name, weight in harness.full_weights(teacher.module).items())


def test_an_external_teacher_with_another_tokenizer_or_other_patches_is_refused(tmp_path):
    import json
    import shutil

    cfg = harness.config("opd/teacher=external", f"opd.teacher.path={tmp_path / 'words'}")
    shutil.copytree(harness.BASE, tmp_path / "words")
    file = tmp_path / "words" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["added_tokens"][-1]["content"] = "<|other|>"
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(RecipeError, match="its tokenizer differs"):
        harness.engines(cfg)
    shutil.copytree(harness.BASE, tmp_path / "patches")
    file = tmp_path / "patches" / "processor_config.json"
    settings = json.loads(file.read_text())
    settings["image_processor"]["image_mean"] = [0.1, 0.2, 0.3]
    file.write_text(json.dumps(settings))
    with pytest.raises(RecipeError, match="image_mean"):
        harness.engines(harness.config("opd/teacher=external", f"opd.teacher.path={tmp_path / 'patches'}"))


SELECTING = ["opd/selection=random", "opd.divergence.topk=12"]


@pytest.mark.parametrize("micro_tokens", [64, 4096])
def test_utilities_come_back_in_the_order_of_the_rows(rows, micro_tokens):
    student, _ = harness.engines(harness.config(*SELECTING), micro_tokens)
    masked = [dict(row) for row in rows]
    masked[2]["loss_mask"] = torch.tensor([1, 0, 1, 0])
    harness.update(without_step(student), harness.batch(masked, micro_tokens=micro_tokens))
    model = load()
    expected = []
    for row in scored(model, model, masked):
        values = [reference.utility(p.detach(), q, 12) for p, q in zip(row["student"], row["teacher"], strict=True)]
        kept = [value for value, counts in zip(values, row["mask"], strict=True) if counts]
        expected.append(sum(kept) / max(len(kept), 1))
    assert student.utilities == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_a_compare_pass_gives_divergence_and_utility_without_an_update(rows):
    from verl.utils import tensordict_utils as tu

    student, _ = harness.engines(harness.config(*SELECTING))
    data = harness.batch(rows)
    tu.assign_non_tensor(data, compare=True)
    before = harness.full_weights(student.module)
    with student.eval_mode():
        out = student.infer_batch(data)["model_output"]
    assert all(torch.equal(before[n], w) for n, w in harness.full_weights(student.module).items())
    model = load()
    for i, row in enumerate(scored(model, model, rows)):
        n = len(row["labels"])
        found = {key: out[key].unbind()[i] for key in ("log_probs", "opd_divergence", "opd_utility")}
        found = {key: value[len(value) - n - 1 : -1].double() for key, value in found.items()}
        pairs = list(zip(row["student"].detach(), row["teacher"], strict=True))
        exact = row["student"].detach().log_softmax(-1).gather(1, row["labels"][:, None])[:, 0]
        torch.testing.assert_close(found["log_probs"], exact, atol=2e-5, rtol=1e-5)
        for key, formula in (
            ("opd_divergence", lambda p, q: float(reference.divergence(p, q, k=12))),
            ("opd_utility", lambda p, q: float(reference.utility(p, q, 12))),
        ):
            expected = torch.tensor([formula(p, q) for p, q in pairs], dtype=torch.float64)
            torch.testing.assert_close(found[key], expected, atol=1e-5, rtol=1e-3)


def test_the_advantage_objective_is_verls_policy_gradient_loss(rows):
    """Loss and gradient of -A exp(log p - log p_old) by token mean, at p = p_old; the teacher follows all the same."""
    from functools import partial

    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    cfg = harness.config("opd.teacher.rate=0.5", overlay="[cpu,toy,advantage]")
    student, teacher = harness.engines(cfg)
    model = load()
    generator = torch.Generator().manual_seed(2)
    ready, expected, count = [], 0.0, sum(map(len, RESPONSES))
    for row in rows:
        n = len(row["responses"])
        logits = response_logits(model, row["input_ids"], row["position_ids"], row["multi_modal_inputs"], n)
        log_probs = logits.log_softmax(-1).gather(1, row["responses"][:, None])[:, 0]
        advantage = torch.randn(n, generator=generator)
        expected = expected - (advantage.double() * log_probs).sum() / count
        ready.append(
            {
                **{
                    key: row[key]
                    for key in ("input_ids", "position_ids", "multi_modal_inputs", "responses", "loss_mask")
                },
                "prompts": row["input_ids"][: len(row["input_ids"]) - n],
                "response_mask": row["loss_mask"],
                "advantages": advantage,
                "old_log_probs": log_probs.detach().float(),
            }
        )
    expected.backward()
    data = harness.batch(ready, micro_tokens=120)
    tu.assign_non_tensor(data, global_batch_size=len(ready))
    kept = {}
    step = student.optimizer_step

    def look_and_step():
        kept.update(harness.full_gradients(student.module))
        return step()

    student.optimizer_step = look_and_step
    actor = omega_conf_to_dataclass(cfg.actor_rollout_ref.actor)
    before = harness.full_weights(teacher.module)
    with student.train_mode():
        student.train_batch(data, partial(ppo_loss, actor))
    exact = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    scale = max(g.abs().max().item() for g in exact.values())
    for name, grad in kept.items():
        torch.testing.assert_close(grad.double(), exact[name], atol=2e-5 * scale, rtol=2e-3)
    after = harness.full_weights(student.module)
    for name, weight in harness.full_weights(teacher.module).items():
        torch.testing.assert_close(weight, (before[name] + after[name]) / 2, atol=1e-7, rtol=1e-6)
