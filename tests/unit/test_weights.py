import pytest
import torch

from opd_recipes.registry import RecipeError
from opd_recipes.weights import Weights

#: delta: 0.5, -1.0, 0.0, 2.0
POSITIVE = torch.tensor([-1.0, -3.0, -2.0, -0.5])
NEGATIVE = torch.tensor([-1.5, -2.0, -2.0, -2.5])
MASK = torch.tensor([1.0, 1.0, 1.0, 0.0])


def weights(**spec):
    return Weights.load(spec)


def test_margin_is_the_relu_of_the_log_ratio():
    assert weights(kind="margin")(POSITIVE, NEGATIVE).tolist() == [0.5, 0, 0, 2.0]
    assert weights(kind="margin", threshold=0.5)(POSITIVE, NEGATIVE).tolist() == [0, 0, 0, 2.0]


def test_binary_margin():
    assert weights(kind="binary_margin")(POSITIVE, NEGATIVE).tolist() == [1, 0, 0, 1]
    assert weights(kind="binary_margin", threshold=0.5)(POSITIVE, NEGATIVE).tolist() == [0, 0, 0, 1]


def test_none_needs_no_negative_view():
    none = weights(kind="none")
    assert none(POSITIVE, NEGATIVE).tolist() == [1, 1, 1, 1] and not none.contrast
    assert weights(kind="margin").contrast


def test_a_weight_has_no_gradient():
    out = weights(kind="margin")(POSITIVE.clone().requires_grad_(), NEGATIVE)
    assert not out.requires_grad


@pytest.mark.parametrize(("normaliser", "expected"), [("valid_tokens", 3), ("selected", 1), ("weight_sum", 0.5)])
def test_denominators_leave_masked_tokens_out(normaliser, expected):
    margin = weights(kind="margin", normaliser=normaliser)
    assert margin.total(margin(POSITIVE, NEGATIVE), MASK).item() == expected


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "margins"}, "known: binary_margin, margin, none"),
        ({"kind": "none", "threshold": 0.0}, "'none' has no option 'threshold'"),
        ({"kind": "margin", "normaliser": "mean"}, "known: valid_tokens, selected, weight_sum"),
        ({"kind": "margin", "threshold": -0.1}, "must not be negative"),
    ],
)
def test_refuses(spec, words):
    with pytest.raises(RecipeError, match=words):
        Weights.load(spec)
