import pytest
import torch
from torch import nn

from opd_recipes.registry import RecipeError
from opd_recipes.teacher import TEACHERS, Teacher, follow


class Pair(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.vision = nn.Parameter(torch.full((2, 2), value))
        self.text = nn.Parameter(torch.full((3,), 10 * value))
        self.register_buffer("count", torch.full((1,), value))


def steps(spec, values=(1.0, 2.0, 3.0)):
    """The teacher's vision weight after each step, the student taking ``values``, the teacher starting at 0."""
    rule, teacher = TEACHERS.build(spec), Pair(0.0)
    out = []
    for step, value in enumerate(values, start=1):
        follow(rule, teacher, Pair(value), step)
        out.append(teacher.vision[0, 0].item())
    return teacher, out


def test_ema_by_hand():
    teacher, out = steps({"kind": "ema", "rate": 0.05})
    assert out == pytest.approx([0.05, 0.1475, 0.290125])
    assert teacher.text[0].item() == pytest.approx(2.90125)
    assert teacher.count.item() == 0  # buffers are not averaged


def test_ema_rate_is_the_students_share():
    assert steps({"kind": "ema", "rate": 1.0})[1] == [1.0, 2.0, 3.0]


def test_frozen_and_progressive():
    assert steps("frozen")[1] == [0, 0, 0]
    assert steps({"kind": "progressive", "every": 2})[1] == [0, 2.0, 2.0]


def test_current_is_the_live_student():
    assert steps("current")[1] == [1.0, 2.0, 3.0]


def test_trust_region_and_external_do_not_move():
    assert steps({"kind": "trust_region", "rate": 0.2})[1] == [0, 0, 0]
    assert steps({"kind": "external", "path": "x"})[1] == [0, 0, 0]
    assert Teacher.load({"kind": "trust_region", "rate": 0.2}).live_share == 0.2
    assert Teacher.load({"kind": "ema", "rate": 0.2}).live_share == 0
    assert Teacher.load({"kind": "external", "path": "x"}).path == "x" and Teacher.load("frozen").path is None


def test_parameters_are_paired_by_name():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.text = nn.Parameter(torch.zeros(3))
            self.video = nn.Parameter(torch.zeros(2, 2))

    with pytest.raises(ValueError, match="2 parameters.*'video', 'vision'"):
        follow(TEACHERS.build("ema"), Other(), Pair(0.0), 1)
    follow(TEACHERS.build({"kind": "external", "path": "x"}), Other(), Pair(0.0), 1)  # may be another model


def test_progressive_needs_its_interval():
    with pytest.raises(RecipeError, match="needs every"):
        TEACHERS.build("progressive")
