import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opd_recipes.divergence import Divergence, bc_reverse_kl, jsd, utility
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
        ("union", "bucket"),
        ("union", "renormalise"),
        ("full", "none"),
    )
]
CASES.append(("bc_reverse_kl", "teacher", "none"))

ESTIMATORS = ("k1", "k2", "k3")


def logits(seed, positions=6, vocabulary=23):
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(2, positions, vocabulary, generator=generator, dtype=torch.float64)).unbind()


def tokens(logits):
    """Some sampled tokens, (N,): no divergence but the sampled one may depend on them."""
    return torch.arange(logits.shape[0]) * 3 % logits.shape[1]


def compare(divergence, student, teacher):
    return divergence(student, teacher, tokens(student))


def sampled(estimator):
    return Divergence("sampled_kl", "sampled", "none", 1, estimator=estimator)


def both(kind, support, tail, seed=0, k=5, **options):
    """Value and student gradient: ours in fp32, the reference in float64."""
    student, teacher = logits(seed)
    ours_in = student.float().requires_grad_()
    ours, _ = compare(Divergence(kind, support, tail, k, **options), ours_in, teacher.float())
    ours.sum().backward()
    ref_in = student.clone().requires_grad_()
    rows = zip(ref_in, teacher, tokens(student).tolist(), strict=True)
    settings = {"kind": kind, "support": support, "tail": tail, "k": k, **options}
    ref = torch.stack([reference.divergence(s, t, label=label, **settings) for s, t, label in rows])
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
@example(seed=0, case=("forward_kl", "student", "bucket"), k=18)  # a tail of 5e-4 against one of 1e-2
@given(st.integers(0, 10_000), st.sampled_from(CASES), st.integers(1, 30))
def test_laws(seed, case, k):
    kind, support, tail = case
    student, teacher = (x.float() for x in logits(seed))
    divergence = Divergence(kind, support, tail, k)
    value, mass = compare(divergence, student, teacher)
    assert (value >= -1e-6).all()
    assert all(((m >= 0) & (m <= 1 + 1e-5)).all() for m in mass.values())
    if kind == "jsd":
        assert (value <= math.log(2) + 1e-6).all()
    shifted, _ = compare(divergence, student + 7.0, teacher - 3.0)  # a softmax does not see a constant
    torch.testing.assert_close(shifted, value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["jsd", "forward_kl", "reverse_kl"])
@pytest.mark.parametrize("gap", [8.0, 12.0, 15.0])
def test_a_small_tail_keeps_its_digits(kind, gap):
    """The student has 1e-3 to 1e-6 of its mass outside the kept ids, the teacher a good part: fp32 must see both."""
    student = torch.tensor([[gap, gap - 1, 0.3, -0.2, 0.1]], dtype=torch.float64)
    teacher = torch.tensor([[1.0, 0.5, 0.2, 0.9, -0.3]], dtype=torch.float64)
    ours = student.float().requires_grad_()
    value, _ = compare(Divergence(kind, "student", "bucket", 2), ours, teacher.float())
    value.sum().backward()
    plain = student.clone().requires_grad_()
    expected = reference.divergence(plain[0], teacher[0], label=0, kind=kind, support="student", tail="bucket", k=2)
    expected.backward()
    torch.testing.assert_close(value.double()[0], expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.grad.double(), plain.grad, rtol=1e-4, atol=1e-7)


def test_symmetry_at_one_half():
    student, teacher = (x.float() for x in logits(3))
    forth, _ = compare(Divergence("jsd", "full", "none", 1), student, teacher)
    back, _ = compare(Divergence("jsd", "full", "none", 1), teacher, student)
    torch.testing.assert_close(forth, back)


@pytest.mark.parametrize(("kind", "support", "tail"), CASES)
def test_equal_models_give_exactly_zero(kind, support, tail):
    student, _ = logits(1)
    student = student.float().requires_grad_()
    value, _ = compare(Divergence(kind, support, tail, 5), student, student.detach())
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
    ours, _ = compare(Divergence("bc_reverse_kl", "teacher", "none", 23), student, teacher)
    plain, _ = compare(Divergence("reverse_kl", "full", "none", 1), student, teacher)
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)


def test_close_models_are_told_apart_to_full_accuracy():
    student, _ = logits(6)
    teacher = student + 1e-4 * logits(7)[0]
    ours, _ = compare(Divergence("jsd", "full", "none", 1), student, teacher)
    p, q = student.softmax(-1), teacher.softmax(-1)
    second_order = ((p - q) ** 2 / (p + q)).sum(-1) / 4  # the leading term of JSD for small differences
    torch.testing.assert_close(ours, second_order, atol=0, rtol=1e-3)


def test_top_k_with_tail_approaches_the_whole_vocabulary():
    student, teacher = (x.float() for x in logits(5))
    whole, _ = compare(Divergence("jsd", "full", "none", 1), student, teacher)
    errors = [
        (whole - compare(Divergence("jsd", "student", "bucket", k), student, teacher)[0]).abs().max().item()
        for k in (1, 5, 15, 22)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-5


def test_a_bucketed_divergence_never_exceeds_the_full_one():
    # Merging bins cannot increase an f-divergence (data processing inequality).
    student, teacher = (x.float() for x in logits(8))
    for kind in ("jsd", "forward_kl", "reverse_kl"):
        whole, _ = compare(Divergence(kind, "full", "none", 1), student, teacher)
        part, _ = compare(Divergence(kind, "student", "bucket", 4), student, teacher)
        assert (part <= whole + 1e-5).all()


def test_k_beyond_the_vocabulary_keeps_every_token():
    student, teacher = (x.float() for x in logits(2))
    many, mass = compare(Divergence("jsd", "student", "renormalise", 1000), student, teacher)
    whole, _ = compare(Divergence("jsd", "full", "none", 1), student, teacher)
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
        value, _ = compare(Divergence(kind, support, "none", 23), student, teacher)
        (grad,) = torch.autograd.grad(value.sum(), student)
        assert value.isfinite().all() and grad.isfinite().all()


def test_nearly_certain_model_has_a_finite_tail_and_gradient():
    student = torch.full((1, 50), -60.0)
    student[0, 3] = 60.0
    student.requires_grad_()
    value, mass = compare(Divergence("jsd", "student", "bucket", 5), student, student.detach().roll(1, -1))
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
        (("bc_reverse_kl", "union", "none", 5), "support=teacher and tail=none"),
        (("reverse_kl", "union", "none", 5), "tail=bucket or tail=renormalise"),
        (("jsd", "sampled", "none", 5), "use kind=sampled_kl"),
        (("reverse_kl", "sampled", "bucket", 5), "use kind=sampled_kl"),
        (("sampled_kl", "sampled", "none", 5), "'sampled_kl' needs estimator"),
        (("jsd", "student", "bucket", 0), "at least 1"),
        (("jds", "student", "bucket", 5), "known: bc_reverse_kl, forward_kl, jsd, reverse_kl, sampled_kl"),
        (("jsd", "both", "bucket", 5), "known: full, sampled, student, teacher, union"),
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


@pytest.mark.parametrize(
    ("support", "tail", "estimator", "words"),
    [
        ("student", "bucket", "k2", "set support=sampled and tail=none"),
        ("full", "none", "k2", "set support=sampled and tail=none"),
        ("sampled", "renormalise", "k2", "set support=sampled and tail=none"),
        ("sampled", "none", "k4", "opd.divergence.estimator: unknown value 'k4'; known: k1, k2, k3"),
        ("sampled", "none", 2, "opd.divergence.estimator: expected str, got 2"),
    ],
)
def test_refuses_a_sampled_kl(support, tail, estimator, words):
    with pytest.raises(RecipeError, match=words):
        Divergence("sampled_kl", support, tail, 5, estimator=estimator)


def test_an_estimator_belongs_to_sampled_kl_alone():
    with pytest.raises(RecipeError, match="'jsd' has no option 'estimator'"):
        Divergence("jsd", "student", "bucket", 5, estimator="k2")


def test_says_what_it_compares():
    one, top = sampled("k3"), Divergence("jsd", "union", "bucket", 5)
    assert (one.sampled, one.full, one.estimator) == (True, False, "k3")
    assert (top.sampled, top.full, top.estimator) == (False, False, None)
    assert Divergence("jsd", "full", "none", 5).full


def test_union_by_hand():
    # p = (6, 3, 1) / 10 and q = (1, 3, 6) / 10 with K = 1: the union is {0, 2}, and the tail is token 1 on both sides.
    p, q = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.1, 0.3, 0.6]])
    value, mass = compare(Divergence("reverse_kl", "union", "bucket", 1), p.log(), q.log())
    assert value.item() == pytest.approx(0.6 * math.log(6) + 0.1 * math.log(1 / 6), abs=1e-6)
    assert mass["student_mass"].item() == pytest.approx(0.7) and mass["teacher_mass"].item() == pytest.approx(0.7)
    value, _ = compare(Divergence("reverse_kl", "union", "renormalise", 1), p.log(), q.log())
    assert value.item() == pytest.approx((6 * math.log(6) + math.log(1 / 6)) / 7, abs=1e-6)


@pytest.mark.parametrize("kind", ["jsd", "forward_kl", "reverse_kl"])
@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
def test_union_is_the_students_top_k_where_both_name_the_same_ids(kind, tail):
    student, _ = (x.float() for x in logits(10))
    student = student.requires_grad_()
    teacher = (0.5 * student + 0.3).detach()  # another distribution, the same order
    values, gradients = [], []
    for support in ("student", "union"):
        value, mass = compare(Divergence(kind, support, tail, 5), student, teacher)
        values.append(torch.stack([value.detach(), *mass.values()]))
        gradients.append(torch.autograd.grad(value.sum(), student)[0])
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*gradients)
    assert (values[0][0] > 1e-4).all()


@pytest.mark.parametrize("k", [12, 23, 1000])
def test_union_over_the_whole_vocabulary_is_the_full_divergence(k):
    student, _ = (x.float() for x in logits(11))
    teacher = -student  # with K = 12 of 23 the two top-Ks, opposite ends of the order, share one id and miss none
    whole, _ = compare(Divergence("jsd", "full", "none", 1), student, teacher)
    part, mass = compare(Divergence("jsd", "union", "renormalise", k), student, teacher)
    torch.testing.assert_close(part, whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(mass["teacher_mass"], torch.ones(6))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sampled_kl_equals_float64_reference_with_gradient(estimator):
    ours, ref, grad, ref_grad = both("sampled_kl", "sampled", "none", estimator=estimator)
    torch.testing.assert_close(ours, ref, atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(grad, ref_grad, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sampled_kl_by_hand(estimator):
    p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
    by_hand = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)}
    value, mass = sampled(estimator)(p.log(), q.log(), torch.tensor([0]))
    assert value.item() == pytest.approx(by_hand[estimator], abs=1e-6)
    assert mass["student_mass"].item() == pytest.approx(0.5) and mass["teacher_mass"].item() == pytest.approx(0.25)


def expected_over_samples(estimator, student, teacher):
    """sum_y p(y) k(y) over every token y, p held fixed: the expected loss whose gradient a step follows. (V,) float64."""
    vocabulary = len(student)
    value, _ = sampled(estimator)(
        student.expand(vocabulary, -1), teacher.expand(vocabulary, -1), torch.arange(vocabulary)
    )
    return (student.detach().softmax(-1) * value).sum()


@pytest.mark.parametrize(("estimator", "law"), [("k1", None), ("k2", "reverse_kl"), ("k3", "forward_kl")])
def test_expected_gradient_of_each_estimator(estimator, law):
    # k1's is the expected score, zero; k2's is the reverse KL's; k3's is the forward KL's.
    for student, teacher in zip(*logits(12), strict=True):
        student = student.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(expected_over_samples(estimator, student, teacher), student)
        expected = torch.zeros_like(gradient)
        if law:
            divergence = reference.divergence(student, teacher, kind=law, support="full")
            (expected,) = torch.autograd.grad(divergence, student)
            assert expected.abs().max() > 1e-3
        torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_expected_value_of_each_unbiased_estimator_is_the_reverse_kl(estimator):
    for student, teacher in zip(*logits(13), strict=True):
        ref = reference.divergence(student, teacher, kind="reverse_kl", support="full")
        torch.testing.assert_close(expected_over_samples(estimator, student, teacher), ref, atol=1e-12, rtol=1e-10)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(ESTIMATORS))
def test_laws_of_sampled_kl(seed, estimator):
    student, teacher = (x.float() for x in logits(seed))
    value, _ = compare(sampled(estimator), student, teacher)
    if estimator != "k1":
        assert (value >= 0).all()
    shifted, _ = compare(sampled(estimator), student + 7.0, teacher - 3.0)
    torch.testing.assert_close(shifted, value, atol=1e-4, rtol=1e-4)
    same, _ = compare(sampled(estimator), student, student)
    assert (same == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_sampled_token_that_one_model_rules_out_is_finite_and_draws_the_student_to_the_teacher(estimator):
    # Row 0: the teacher gives token 0 no mass at all; row 1: the student all but rules it out, e^-1e4 of the other.
    student = torch.tensor([[0.0, 0.0], [0.0, 1e4]], requires_grad=True)
    teacher = torch.tensor([[-math.inf, 0.0], [0.0, 0.0]])
    value, _ = sampled(estimator)(student, teacher, torch.tensor([0, 0]))
    (gradient,) = torch.autograd.grad(value.sum(), student)
    assert value.isfinite().all() and gradient.isfinite().all()
    if estimator != "k1":
        assert gradient[0, 0] > 0 > gradient[1, 0]  # descent lowers the token the teacher denies, raises the other


def test_k3_is_exact_to_the_limit_of_its_exponent_and_straight_beyond():
    def k3(gap):  # log q - log p of token 0 is the gap, but for the e^-gap that a softmax of two takes off
        student = torch.tensor([[-gap, 0.0]], dtype=torch.float64, requires_grad=True)
        teacher = torch.tensor([[50.0, 0.0]], dtype=torch.float64)
        value, _ = sampled("k3")(student, teacher, torch.tensor([0]))
        return value.item(), torch.autograd.grad(value, student)[0][0, 0].item()

    assert k3(19.0)[0] == pytest.approx(math.exp(19) - 1 - 19, rel=1e-6)
    assert k3(25.0)[0] == pytest.approx(math.exp(20) * (1 + 5) - 1 - 25, rel=1e-6)
    assert k3(25.0)[1] == pytest.approx(1 - math.exp(20), rel=1e-6)


@pytest.mark.parametrize(("kind", "support", "tail"), CASES)
def test_extreme_logits_keep_value_and_gradient_finite(kind, support, tail):
    generator = torch.Generator().manual_seed(0)
    student = (1e4 * torch.randn(6, 23, generator=generator)).requires_grad_()
    teacher = 1e4 * torch.randn(6, 23, generator=generator)
    teacher[:, ::2] = -math.inf
    value, mass = compare(Divergence(kind, support, tail, 5), student, teacher)
    (gradient,) = torch.autograd.grad(value.sum(), student)
    assert value.isfinite().all() and gradient.isfinite().all()
    assert all(((m >= 0) & (m <= 1 + 1e-5)).all() for m in mass.values())


@pytest.mark.parametrize("k", [2, 5, 23, 100])
def test_utility_equals_float64_reference(k):
    student, other = logits(14)
    teacher = student + 0.5 * other  # close enough for the two top-Ks to meet
    ours = utility(student.float(), teacher.float(), k)
    ref = [reference.utility(s, t, min(k, 23)) for s, t in zip(student, teacher, strict=True)]
    torch.testing.assert_close(ours.double(), torch.tensor(ref, dtype=torch.float64), atol=1e-6, rtol=1e-4)
    assert max(ref) > 0.01


def test_utility_by_hand():
    # The student's top two are tokens 0 and 1, the teacher's 0 and 2: one of two is shared. On {0, 1} the student is
    # (3, 1) / 4 and the teacher (4, 1) / 5.
    student, teacher = torch.tensor([[0.6, 0.2, 0.15, 0.05]]), torch.tensor([[0.4, 0.1, 0.3, 0.2]])
    m = (0.75 + 0.8) / 2
    d = (0.75 * math.log(0.75 / m) + 0.25 * math.log(0.25 / (1 - m))) / 2
    d += (0.8 * math.log(0.8 / m) + 0.2 * math.log(0.2 / (1 - m))) / 2
    c = 1 + (0.8 * math.log(0.8) + 0.2 * math.log(0.2)) / math.log(2)
    assert utility(student.log(), teacher.log(), 2).item() == pytest.approx(d * 0.5 * c, rel=1e-3)


def test_utility_has_no_gradient_and_is_zero_where_there_is_nothing_to_teach():
    student, teacher = (x.float() for x in logits(15))
    student.requires_grad_()
    assert not utility(student, teacher, 5).requires_grad
    assert (utility(student, student, 5) == 0).all()  # no difference
    assert (utility(student, torch.zeros_like(student), 5) < 1e-6).all()  # a teacher that knows nothing
    assert (utility(student, -student, 5) == 0).all()  # no shared id
    assert (utility(student, teacher, 1) == 0).all()  # k = 1: one id has all the mass of both


def test_utility_of_extreme_logits_is_finite():
    student, teacher = torch.full((2, 9), -1e4), torch.full((2, 9), -math.inf)
    student[:, 0], teacher[0, 8], teacher[1, 0] = 1e4, 1e4, 1e4
    value = utility(student, teacher, 3)
    assert value.isfinite().all() and (value >= 0).all() and (value <= math.log(2)).all()
