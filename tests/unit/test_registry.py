import pytest

from opd_recipes.registry import RecipeError, Registry

TABLE = Registry("opd.part")


@TABLE.register("plain")
def plain(x):
    return x


@TABLE.register("scaled")
def scaled(x, *, factor: float, times: int = 1, color: tuple[int, int] = (0, 0)):
    return x * factor * times


def test_builds_with_options():
    assert TABLE.build({"kind": "scaled", "factor": 2, "times": 3})(5) == 30
    assert TABLE.build("plain")(5) == 5


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("plian", "opd.part: unknown value 'plian'; known: plain, scaled"),
        ({"factor": 1}, "opd.part: 'kind' is missing; known: plain, scaled"),
        ({"kind": "scaled"}, "'scaled' needs factor"),
        ({"kind": "scaled", "factor": "2"}, "opd.part.factor: expected float, got '2'"),
        ({"kind": "scaled", "factor": 1, "times": 1.5}, "opd.part.times: expected int, got 1.5"),
        ({"kind": "scaled", "factor": True}, "opd.part.factor: expected float, got True"),
        ({"kind": "scaled", "factor": 1, "color": [1, 2, 3]}, "opd.part.color"),
        ({"kind": "scaled", "factor": 1, "fctor": 1}, "no option 'fctor'; its options: factor, times, color"),
        ({"kind": "plain", "factor": 1}, "its options: none"),
        ({"kind": None}, "unknown value None"),
    ],
)
def test_messages(spec, words):
    with pytest.raises(RecipeError, match=words.replace("(", r"\(")):
        TABLE.build(spec)


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="already registered"):
        TABLE.register("plain")(plain)
