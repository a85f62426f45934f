"""The real engines against whole-logits float64 models: values, gradients, alignment, splits, ranks, teacher, checkpoints."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def load():
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(harness.BASE, dtype=torch.float64, attn_implementation="eager")


def response_logits(model, ids, positions, inputs, length):
    """The logits that predict the last ``length`` tokens of one sequence, (length, V); one row at a time, no padding."""
    inputs = {k: v for k, v in inputs.items() if k in ("pixel_values", "image_grid_thw")}
    inputs["pixel_values"] = inputs["pixel_values"].to(next(model.parameters()).dtype)
    logits = model(input_ids=ids[None], position_ids=positions[1:, None], **inputs).logits[0]
    return logits[len(ids) - length - 1 : len(ids) - 1]


def scored(student, teacher, rows):
    """Rows for :func:`reference.loss`."""
    out = []
    for row in rows:
        n = len(row["responses"])
        ours = response_logits(student, row["input_ids"], row["position_ids"], row["multi_modal_inputs"], n)
        with torch.no_grad():
            theirs = response_logits(
                teacher, row["teacher_input_ids"], row["teacher_positions"].T, row["teacher_multi_modal_inputs"], n
            )
        out.append(
            {
                "student": ours,
                "teacher": theirs,
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


def test_gradient_does_not_depend_on_micro_batches_or_chunks(rows):
    whole, out = gradients_of(rows)
    for overrides, micro_tokens in (([], 64), ([], 120), (["opd.head_chunk=3"], 4096), (["opd.head_chunk=1"], 64)):
        parts, other = gradients_of(rows, *overrides, micro_tokens=micro_tokens)
        scale = max(g.abs().max().item() for g in whole.values())
        assert max((parts[n] - g).abs().max().item() for n, g in whole.items()) < 1e-5 * scale
        for key in ("loss", "opd/divergence", "opd/entropy", "opd/student_mass", "opd/importance_weight"):
            assert other[key] == pytest.approx(out[key], rel=1e-5), key


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_gradient_and_teacher_do_not_depend_on_the_number_of_ranks(rows, tmp_path, reshard):
    single, out = gradients_of(rows)
    scale = max(g.abs().max().item() for g in single.values())
    torch.save(rows, tmp_path / "rows.pt")
    port = str(harness.free_port())
    script = Path(__file__).parent / "two_ranks.py"
    options = [f"actor_rollout_ref.actor.fsdp_config.reshard_after_forward={reshard}", "opd.teacher.rate=0.05"]
    command = [sys.executable, str(script)]
    ranks = [subprocess.Popen([*command, str(rank), port, str(tmp_path), *options]) for rank in range(2)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    result = torch.load(tmp_path / "result.pt")
    assert result["loss"] == pytest.approx(out["loss"], rel=1e-5)
    assert max((result["gradients"][n] - g).abs().max().item() for n, g in single.items()) < 1e-5 * scale
    torch.testing.assert_close(
        result["teacher_gap_after"] / result["teacher_gap_before"], torch.tensor(0.95), rtol=1e-4, atol=0
    )


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
    ("kind", "extra"), [("forward_kl", "~opd.divergence.alpha"), ("reverse_kl", "~opd.divergence.alpha")]
)
def test_other_divergences_through_the_engine(rows, kind, extra):
    student, _ = harness.engines(harness.config(f"opd.divergence.kind={kind}", extra))
    out = harness.update(without_step(student), harness.batch(rows))
    model = load()
    expected = reference.loss(scored(model, model, rows), kind=kind)
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
