import pytest
import torch
from torch import nn

from opd_recipes.divergence import Divergence
from opd_recipes.topk_head import HiddenRequest, ScoreRequest, StreamedHead, TeacherStates
from tests import reference

D, V, K = 16, 53, 7


def setup(seed=0, rows=3, length=11):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, D, generator=generator)
    linear = nn.Linear(D, V, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(V, D, generator=generator))
    index = torch.tensor([2, 3, 4, 13, 14, 25, 26, 27, 30])
    labels = torch.randint(V, (len(index),), generator=generator)
    teacher = (torch.randn(len(index), D, generator=generator), torch.randn(V, D, generator=generator))
    return hidden, linear, index, labels, teacher


def streamed(chunk, temperature=1.0, divergence=None):
    hidden, linear, index, labels, teacher = setup()
    hidden.requires_grad_()
    head = StreamedHead(linear)
    divergence = divergence or Divergence("jsd", "student", "bucket", K)
    states = TeacherStates(*teacher)
    request = ScoreRequest(index, labels, temperature=temperature, chunk=chunk, teacher=states, divergence=divergence)
    with head.serving(request):
        out = head(hidden)
    (out["divergence"] * torch.arange(1, 10)).sum().add(out["log_probs"].sum()).backward()
    return out, hidden.grad, head.weight.grad


def direct(temperature=1.0):
    """Whole logits of every position, float64."""
    hidden, linear, index, labels, teacher = setup()
    hidden = hidden.double().requires_grad_()
    weight = linear.weight.detach().double().requires_grad_()
    logits = (hidden @ weight.T).flatten(0, 1)[index] / temperature
    other = teacher[0].double() @ teacher[1].double().T / temperature
    log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
    ids = log_p.detach().topk(K).indices
    value = []
    for p, q, kept in zip(log_p.exp(), log_q.exp(), ids, strict=True):
        p, q = (torch.cat([x[kept], 1 - x[kept].sum(0, keepdim=True)]) for x in (p, q))
        m = (p + q) / 2
        value.append((p * (p / m).log()).sum() / 2 + (q * (q / m).log()).sum() / 2)
    out = {
        "log_probs": log_p.gather(1, labels[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "divergence": torch.stack(value),
        "teacher_log_probs": log_q.gather(1, labels[:, None])[:, 0],
        "teacher_entropy": -(log_q.exp() * log_q).sum(-1),
        "student_mass": log_p.gather(1, ids).exp().sum(-1),
        "teacher_mass": log_q.gather(1, ids).exp().sum(-1),
    }
    (out["divergence"] * torch.arange(1, 10)).sum().add(out["log_probs"].sum()).backward()
    return out, hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 4, 9, 256])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_direct_formula_for_every_chunk_size(chunk, temperature):
    out, hidden_grad, weight_grad = streamed(chunk, temperature)
    ref, ref_hidden_grad, ref_weight_grad = direct(temperature)
    assert out.keys() == ref.keys()
    for key in ref:
        torch.testing.assert_close(out[key].double(), ref[key], atol=1e-5, rtol=1e-4, msg=lambda m, k=key: f"{k}: {m}")
    torch.testing.assert_close(hidden_grad.double(), ref_hidden_grad, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(weight_grad.double(), ref_weight_grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("chunk", [16, 4096])
def test_bf16_weight_gradient_is_added_up_in_fp32(chunk):
    """Many chunks must be no worse than one: bf16 sums of 256 chunks would be off by percents."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 4096, D, generator=generator).bfloat16()
    weight = torch.randn(V, D, generator=generator).bfloat16()
    labels = torch.randint(V, (4096,), generator=generator)
    head = StreamedHead(nn.Linear(D, V, bias=False))
    head.weight = nn.Parameter(weight.clone())
    shifted = hidden.clone().requires_grad_()
    with head.serving(ScoreRequest(torch.arange(4096), labels, chunk=chunk)):
        head(shifted)["log_probs"].sum().backward()
    exact = weight.double().requires_grad_()
    exact_hidden = hidden.double().requires_grad_()
    (exact_hidden[0] @ exact.T).log_softmax(-1).gather(1, labels[:, None]).sum().backward()
    assert head.weight.grad.dtype == torch.bfloat16
    error = (head.weight.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < 4e-3
    assert (shifted.grad.double() - exact_hidden.grad).norm() / exact_hidden.grad.norm() < 1e-2


def test_bf16_head_under_repeated_backward_passes():
    """Gradient accumulation: the second pass adds to the first, and nothing of the first is added twice."""
    hidden, linear, index, labels, _ = setup()
    head = StreamedHead(linear.bfloat16())

    def backward():
        with head.serving(ScoreRequest(index, labels, chunk=2)):
            head(hidden.bfloat16().requires_grad_())["log_probs"].sum().backward()
        return head.weight.grad.clone()

    once, twice = backward(), backward()
    torch.testing.assert_close(twice, 2 * once, rtol=1e-2, atol=1e-3)


DIVERGENCES = [
    ("jsd", "student", "bucket"),
    ("jsd", "union", "bucket"),
    ("jsd", "union", "renormalise"),
    ("jsd", "full", "none"),
    ("forward_kl", "teacher", "bucket"),
    ("reverse_kl", "student", "renormalise"),
    ("bc_reverse_kl", "teacher", "none"),
]


@pytest.mark.parametrize(("kind", "support", "tail"), DIVERGENCES)
@pytest.mark.parametrize("chunk", [4, 256])
def test_gradient_of_every_kind_of_divergence(kind, support, tail, chunk):
    """Through the ids that are kept, the sum of all others and the label, which is a kept id in some rows only."""
    out, hidden_grad, weight_grad = streamed(chunk, 0.7, Divergence(kind, support, tail, K))
    hidden, linear, index, labels, teacher = setup()
    hidden = hidden.double().requires_grad_()
    weight = linear.weight.detach().double().requires_grad_()
    logits = (hidden @ weight.T).flatten(0, 1)[index] / 0.7
    other = teacher[0].double() @ teacher[1].double().T / 0.7
    rows = zip(logits, other, strict=True)
    expected = torch.stack([reference.divergence(p, q, kind, support=support, tail=tail, k=K) for p, q in rows])
    torch.testing.assert_close(out["divergence"].double(), expected, atol=1e-5, rtol=1e-4)
    log_probs = logits.log_softmax(-1).gather(1, labels[:, None])
    ((expected * torch.arange(1, 10)).sum() + log_probs.sum()).backward()
    torch.testing.assert_close(hidden_grad.double(), hidden.grad, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(weight_grad.double(), weight.grad, atol=1e-4, rtol=1e-3)
    kept = logits.detach().topk(K).indices
    assert {bool(label in ids) for label, ids in zip(labels, kept, strict=True)} == {True, False}


def test_all_ids_kept_leave_nothing_to_the_others():
    """K beyond the vocabulary: the sum over no ids is 0, and neither it nor its gradient is NaN."""
    out, hidden_grad, _ = streamed(4, divergence=Divergence("jsd", "student", "bucket", 2 * V))
    whole, whole_hidden_grad, _ = streamed(4, divergence=Divergence("jsd", "full", "none", 1))
    torch.testing.assert_close(out["divergence"], whole["divergence"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(hidden_grad, whole_hidden_grad, atol=1e-4, rtol=1e-3)


def test_padding_of_the_vocabulary_is_part_of_the_formula():
    """A head may have more rows than the tokenizer has ids: their logits count in the sum, and no id of theirs is a label."""
    hidden, linear, index, labels, (states, weight) = setup()
    padded = nn.Linear(D, V + 11, bias=False)
    with torch.no_grad():
        padded.weight.copy_(torch.cat([linear.weight, torch.zeros(11, D)]))
    other = torch.cat([weight, torch.zeros(11, D)])
    head, divergence = StreamedHead(padded), Divergence("jsd", "student", "bucket", K)
    with head.serving(ScoreRequest(index, labels, teacher=TeacherStates(states, other), divergence=divergence)):
        out = head(hidden)
    out["divergence"].sum().backward()
    exact = padded.weight.detach().double().requires_grad_()
    ours, theirs = hidden.double().flatten(0, 1)[index] @ exact.T, states.double() @ other.double().T
    expected = torch.stack([reference.divergence(p, q, k=K) for p, q in zip(ours, theirs, strict=True)])
    expected.sum().backward()
    torch.testing.assert_close(out["divergence"].double(), expected.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(head.weight.grad.double(), exact.grad, atol=1e-4, rtol=1e-3)
    assert (head.weight.grad[V:] != 0).any()


def test_autocast_computes_in_its_dtype_and_gives_gradients_in_the_weights():
    hidden, linear, index, labels, _ = setup()
    head = StreamedHead(linear)
    with torch.autocast("cpu", dtype=torch.bfloat16), head.serving(ScoreRequest(index, labels, chunk=4)):
        out = head(hidden.requires_grad_())
    out["log_probs"].sum().backward()
    states, weight = hidden.detach().bfloat16(), linear.weight.detach().bfloat16()
    logits = (states.flatten(0, 1)[index] @ weight.T).float()
    torch.testing.assert_close(out["log_probs"], logits.log_softmax(-1).gather(1, labels[:, None])[:, 0])
    exact = linear.weight.detach().double().requires_grad_()
    log_probs = (hidden.detach().double().flatten(0, 1)[index] @ exact.T).log_softmax(-1)
    log_probs.gather(1, labels[:, None]).sum().backward()
    assert head.weight.grad.dtype == hidden.grad.dtype == torch.float32
    assert (head.weight.grad - exact.grad).norm() / exact.grad.norm() < 2e-2


def test_positions_that_are_not_asked_for_get_no_gradient():
    _, hidden_grad, _ = streamed(4)
    asked = setup()[2]
    untouched = torch.ones(33, dtype=torch.bool)
    untouched[asked] = False
    assert (hidden_grad.flatten(0, 1)[untouched] == 0).all()


def test_no_response_token_at_all_gives_empty_outputs_with_a_graph():
    hidden, linear, _, _, teacher = setup()
    head = StreamedHead(linear)
    none = torch.zeros(0, dtype=torch.long)
    request = ScoreRequest(
        none,
        none,
        teacher=TeacherStates(teacher[0][:0], teacher[1]),
        divergence=Divergence("jsd", "student", "bucket", K),
    )
    with head.serving(request):
        out = head(hidden.requires_grad_())
    assert all(value.shape == (0,) for value in out.values())
    out["divergence"].sum().backward()
    assert (head.weight.grad == 0).all()


def test_without_a_request_it_is_the_linear_layer():
    hidden, linear, *_ = setup()
    torch.testing.assert_close(StreamedHead(linear)(hidden), linear(hidden))


def test_hidden_request_picks_positions():
    hidden, linear, index, *_ = setup()
    head = StreamedHead(linear)
    with head.serving(HiddenRequest(index)):
        out = head(hidden)
    torch.testing.assert_close(out["hidden"], hidden.flatten(0, 1)[index])


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_hidden_request_scores_the_labels(chunk):
    hidden, linear, index, labels, _ = setup()
    head = StreamedHead(linear)
    with torch.no_grad(), head.serving(HiddenRequest(index, labels, temperature=0.7, chunk=chunk)):
        out = head(hidden)
    logits = hidden.double().flatten(0, 1)[index] @ linear.weight.detach().double().T / 0.7
    exact = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(out["log_probs"].double(), exact, atol=1e-5, rtol=1e-5)
    none = torch.zeros(0, dtype=torch.long)
    with torch.no_grad(), head.serving(HiddenRequest(none, none)):
        assert head(hidden)["log_probs"].shape == (0,)


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_a_trust_region_teacher_mixes_logits(chunk):
    """teacher logits = lerp(reference logits, the student's on the teacher's view, share); no gradient through the mixture."""
    hidden, linear, index, labels, (states, weight) = setup()
    live = torch.randn(len(index), D, generator=torch.Generator().manual_seed(5))
    head = StreamedHead(linear)
    hidden.requires_grad_()
    teacher = TeacherStates(states, weight, live=live, live_share=0.3)
    divergence = Divergence("jsd", "student", "bucket", K)
    request = ScoreRequest(index, labels, temperature=0.7, chunk=chunk, teacher=teacher, divergence=divergence)
    with head.serving(request):
        out = head(hidden)
    out["divergence"].sum().backward()
    exact = linear.weight.detach().double().requires_grad_()
    ours = hidden.detach().double().flatten(0, 1)[index] @ exact.T / 0.7
    mixed = 0.7 * (states.double() @ weight.double().T) + 0.3 * (live.double() @ exact.detach().T)
    expected = [reference.divergence(p, q, k=K) for p, q in zip(ours, mixed / 0.7, strict=True)]
    torch.testing.assert_close(out["divergence"].double(), torch.stack(expected), atol=1e-5, rtol=1e-4)
    sum(expected).backward()
    torch.testing.assert_close(head.weight.grad.double(), exact.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("rows", [V - 5, V + 9])
@pytest.mark.parametrize("support", ["student", "teacher", "union", "full"])
def test_a_teacher_whose_vocabulary_is_padded_to_another_size(rows, support):
    """Ids beyond the smaller head belong to no token: as if the teacher's probability there were 0."""
    hidden, linear, index, labels, (states, weight) = setup()
    labels = labels.clamp(max=V - 6)
    other = torch.cat([weight, torch.ones(20, D)])[:rows]
    head = StreamedHead(linear)
    divergence = Divergence("jsd", support, "none" if support == "full" else "bucket", K)
    with head.serving(ScoreRequest(index, labels, teacher=TeacherStates(states, other), divergence=divergence)):
        out = head(hidden)
    ours = hidden.double().flatten(0, 1)[index] @ linear.weight.detach().double().T
    theirs = torch.full((len(index), V), -1e9, dtype=torch.float64)
    theirs[:, :rows] = states.double() @ other[:V].double().T
    options = {"support": support, "tail": "none" if support == "full" else "bucket", "k": K}
    expected = [float(reference.divergence(p, q, **options)) for p, q in zip(ours, theirs, strict=True)]
    assert out["divergence"].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("chunk", [2, 256])
def test_utility_of_each_token(chunk):
    hidden, linear, index, labels, (states, weight) = setup()
    head = StreamedHead(linear)
    divergence = Divergence("jsd", "student", "renormalise", K)
    teacher = TeacherStates(states, weight)
    with head.serving(ScoreRequest(index, labels, chunk=chunk, teacher=teacher, divergence=divergence, utility_topk=K)):
        out = head(hidden)
    ours = hidden.double().flatten(0, 1)[index] @ linear.weight.detach().double().T
    expected = [reference.utility(p, q, K) for p, q in zip(ours, states.double() @ weight.double().T, strict=True)]
    torch.testing.assert_close(out["utility"].tolist(), expected, atol=1e-5, rtol=1e-4)
    assert not out["utility"].requires_grad


def test_logits_never_exist_whole():
    """The largest tensor that the forward allocates is one chunk's logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    self.size = max(self.size, tensor.numel())
            return out

    hidden = torch.randn(1, 640, D, requires_grad=True)
    head = StreamedHead(nn.Linear(D, 5000, bias=False))
    labels = torch.zeros(512, dtype=torch.long)
    teacher = TeacherStates(torch.randn(512, D), torch.randn(5000, D))
    request = ScoreRequest(
        torch.arange(512), labels, chunk=32, teacher=teacher, divergence=Divergence("jsd", "student", "bucket", K)
    )
    with Largest() as seen, head.serving(request):
        head(hidden)["divergence"].sum().backward()
    assert seen.size <= 32 * 5000


def test_tied_weights_stay_tied():
    from transformers import AutoModelForImageTextToText

    import data_prep.toy

    model = AutoModelForImageTextToText.from_pretrained(f"{data_prep.toy.__path__[0]}/base")
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    head = StreamedHead.install(model)
    assert model.get_output_embeddings() is head
    assert head.weight is model.get_input_embeddings().weight
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == keys


def test_refuses_a_head_with_a_bias():
    class Biased(nn.Module):
        def get_output_embeddings(self):
            return nn.Linear(4, 4)

    with pytest.raises(NotImplementedError, match="bias-free"):
        StreamedHead.install(Biased())
