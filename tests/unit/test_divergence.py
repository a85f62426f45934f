import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opd_recipes.divergence import Divergence, bc_reverse_kl, jsd
from opd_recipes.registry import RecipeError
from tests import reference

CASES = [
    (kind, support, tail)
    for kind in ("jsd", "forward_kl", "reverse_kl")
    for support, tail in (
        ("student", "bucket"),
        ("student", "renormalise"),
        ("teacher", "bucket"),
        ("teacher", "renormalise"),
        ("full", "none"),
    )
]


CASES.append(("bc_reverse_kl", "teacher", "none"))


def logits(seed, positions=6, vocabulary=23):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(2, positions, vocabulary, generator=generator, dtype=torch.float64)).unbind()


def both(kind, support, tail, seed=0, k=5, alpha=0.5):
    """Value and student gradient: ours in fp32, the reference in float64."""
    student, teacher = logits(seed)
    options = {"alpha": alpha} if kind == "jsd" else {}
    ours_in = student.float().requires_grad_()
    ours, _ = Divergence(kind, support, tail, k, **options)(ours_in, teacher.float())
    ours.sum().backward()
    ref_in = student.clone().requires_grad_()
    ref = torch.stack(
        [
            reference.divergence(s, t, kind=kind, support=support, tail=tail, k=k, alpha=alpha)
            for s, t in zip(ref_in, teacher, strict=True)
        ]
    )
    ref.sum().backward()
    return ours.detach().double(), ref.detach(), ours_in.grad.double(), ref_in.grad


@pytest.mark.parametrize(("kind", "support", "tail"), CASES)
def test_equals_float64_reference_with_gradient(kind, support, tail):
    ours, ref, grad, ref_grad = both(kind, support, tail)
    torch.testing.assert_close(ours, ref, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(grad, ref_grad, atol=2e-6, rtol=2e-4)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.9])
def test_generalised_jsd(alpha):
    ours, ref, grad, ref_grad = both("jsd", "student", "bucket", alpha=alpha)
    torch.testing.assert_close(ours, ref, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(grad, ref_grad, atol=2e-6, rtol=2e-4)


def test_jsd_by_hand():
    # p = (1/2, 1/2), q = (1/4, 3/4), m = (3/8, 5/8)
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    by_hand = 0.5 * (0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5)) + 0.5 * (
        0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)
    )
    assert jsd(p, q).item() == pytest.approx(by_hand, abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(CASES), st.integers(1, 30))
def test_laws(seed, case, k):
    kind, support, tail = case
    student, teacher = (x.float() for x in logits(seed))
    compare = Divergence(kind, support, tail, k)
    value, mass = compare(student, teacher)
    assert (value >= -1e-6).all()
    assert all(((m >= 0) & (m <= 1 + 1e-5)).all() for m in mass.values())
    if kind == "jsd":
        assert (value <= math.log(2) + 1e-6).all()
    shifted, _ = compare(student + 7.0, teacher - 3.0)  # a softmax does not see a constant
    torch.testing.assert_close(shifted, value, atol=1e-5, rtol=1e-4)


def test_symmetry_at_one_half():
    student, teacher = (x.float() for x in logits(3))
    forth, _ = Divergence("jsd", "full", "none", 1)(student, teacher)
    back, _ = Divergence("jsd", "full", "none", 1)(teacher, student)
    torch.testing.assert_close(forth, back)


@pytest.mark.parametrize(("kind", "support", "tail"), CASES)
def test_equal_models_give_exactly_zero(kind, support, tail):
    student, _ = logits(1)
    student = student.float().requires_grad_()
    value, _ = Divergence(kind, support, tail, 5)(student, student.detach())
    assert (value == 0).all()


def test_bias_corrected_reverse_kl_by_hand():
    p, q = torch.tensor([0.5, 0.2]), torch.tensor([0.25, 0.4])
    by_hand = 0.5 * math.log(2) - 0.5 + 0.25 + 0.2 * math.log(0.5) - 0.2 + 0.4
    assert bc_reverse_kl(p.log(), q.log()).item() == pytest.approx(by_hand, abs=1e-6)
    log_p = p.log().requires_grad_()
    bc_reverse_kl(log_p, q.log()).backward()
    torch.testing.assert_close(log_p.grad / p, (p / q).log())  # d/dp = log(p / q)


def test_bias_corrected_reverse_kl_over_everything_is_the_reverse_kl():
    student, teacher = (x.float() for x in logits(9))
    ours, _ = Divergence("bc_reverse_kl", "teacher", "none", 23)(student, teacher)
    plain, _ = Divergence("reverse_kl", "full", "none", 1)(student, teacher)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def test_close_models_are_told_apart_to_full_accuracy():
    student, _ = logits(6)
    teacher = student + 1e-4 * logits(7)[0]
    ours, _ = Divergence("jsd", "full", "none", 1)(student, teacher)
    p, q = student.softmax(-1), teacher.softmax(-1)
    second_order = ((p - q) ** 2 / (p + q)).sum(-1) / 4  # the leading term of JSD for small differences
    torch.testing.assert_close(ours, second_order, atol=0, rtol=1e-3)


def test_top_k_with_tail_approaches_the_whole_vocabulary():
    student, teacher = (x.float() for x in logits(5))
    whole, _ = Divergence("jsd", "full", "none", 1)(student, teacher)
    errors = [
        (whole - Divergence("jsd", "student", "bucket", k)(student, teacher)[0]).abs().max().item()
        for k in (1, 5, 15, 22)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-5


def test_a_bucketed_divergence_never_exceeds_the_full_one():
    # Merging bins cannot increase an f-divergence (data processing inequality).
    student, teacher = (x.float() for x in logits(8))
    for kind in ("jsd", "forward_kl", "reverse_kl"):
        whole, _ = Divergence(kind, "full", "none", 1)(student, teacher)
        part, _ = Divergence(kind, "student", "bucket", 4)(student, teacher)
        assert (part <= whole + 1e-5).all()


def test_k_beyond_the_vocabulary_keeps_every_token():
    student, teacher = (x.float() for x in logits(2))
    many, mass = Divergence("jsd", "student", "renormalise", 1000)(student, teacher)
    whole, _ = Divergence("jsd", "full", "none", 1)(student, teacher)
    torch.testing.assert_close(many, whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(mass["student_mass"], torch.ones(6))


def test_impossible_tokens_do_not_make_nan():
    student, teacher = (x.float().clone() for x in logits(4))
    student[:, 20:] = teacher[:, 20:] = -math.inf  # padded vocabulary
    student.requires_grad_()
    for kind, support in (
        ("jsd", "full"),
        ("forward_kl", "full"),
        ("reverse_kl", "full"),
        ("bc_reverse_kl", "teacher"),
    ):
        value, _ = Divergence(kind, support, "none", 23)(student, teacher)
        (grad,) = torch.autograd.grad(value.sum(), student)
        assert value.isfinite().all() and grad.isfinite().all()


def test_nearly_certain_model_has_a_finite_tail_and_gradient():
    student = torch.full((1, 50), -60.0)
    student[0, 3] = 60.0
    student.requires_grad_()
    value, mass = Divergence("jsd", "student", "bucket", 5)(student, student.detach().roll(1, -1))
    value.sum().backward()
    assert value.isfinite().all() and student.grad.isfinite().all() and mass["student_mass"].item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("jsd", "student", "none", 5), "tail=bucket"),
        (("jsd", "full", "bucket", 5), "tail=none"),
        (("bc_reverse_kl", "student", "none", 5), "support=teacher and tail=none"),
        (("bc_reverse_kl", "teacher", "bucket", 5), "support=teacher and tail=none"),
        (("bc_reverse_kl", "full", "none", 5), "use kind=reverse_kl"),
        (("jsd", "student", "bucket", 0), "at least 1"),
        (("jds", "student", "bucket", 5), "known: bc_reverse_kl, forward_kl, jsd, reverse_kl"),
        (("jsd", "both", "bucket", 5), "known: full, student, teacher"),
        (("jsd", "student", "keep", 5), "known: bucket, none, renormalise"),
    ],
)
def test_refuses(arguments, words):
    with pytest.raises(RecipeError, match=words):
        Divergence(*arguments)


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5])
def test_refuses_an_alpha_at_the_ends(alpha):
    with pytest.raises(RecipeError, match="forward_kl"):
        Divergence("jsd", "student", "bucket", 5, alpha=alpha)
