"""What a reply answers: cases read by hand, laws, truncation, thinking, comparison with references, and time."""

import string
import time
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from opd_recipes.eval.extraction import (
    RULES,
    UNDECIDED,
    Extracted,
    choice,
    matches_number,
    matches_text,
    number,
    short,
    yes_no,
)
from opd_recipes.registry import RecipeError
from tests.unit.extraction_cases import CHOICE, RED, TEN
from tests.unit.extraction_values import NUMBER, SHORT, YES_NO

DOCS = Path(__file__).parents[2] / "docs" / "extraction.md"
KINDS = {"yes_no": (yes_no, YES_NO), "number": (number, NUMBER), "short": (short, SHORT)}
CASES = [("choice", lambda reply, options=options: choice(reply, options), *case) for options, *case in CHOICE]
CASES += [(kind, read, *case) for kind, (read, cases) in KINDS.items() for case in cases]


@pytest.mark.parametrize(("options", "reply", "value", "rule"), CHOICE)
def test_choice(options, reply, value, rule):
    found = choice(reply, options)
    assert (found.value, found.rule) == (value, rule), found.why


@pytest.mark.parametrize(("reply", "value", "rule"), YES_NO)
def test_yes_no(reply, value, rule):
    found = yes_no(reply)
    assert (found.value, found.rule) == (value, rule), found.why


@pytest.mark.parametrize(("reply", "value", "rule"), NUMBER)
def test_number(reply, value, rule):
    found = number(reply)
    assert (found.value, found.rule) == (value, rule), found.why


@pytest.mark.parametrize(("reply", "value", "rule"), SHORT)
def test_short(reply, value, rule):
    found = short(reply)
    assert (found.value, found.rule) == (value, rule), found.why


def test_no_reply_at_all_is_an_empty_one():
    assert choice(None, RED) == Extracted(None, "empty", "the reply is empty (or all of it is thinking)")


# What results say of themselves


def test_an_answer_is_named_by_a_rule_of_its_kind_and_an_undecided_reply_by_a_reason():
    for kind, read, reply, *_ in CASES:
        found = read(reply)
        names = {name for rule in RULES[kind] for name in rule.name.split(" / ")}
        assert found.rule in (names if found.value is not None else UNDECIDED), (reply, found)
        assert found.why and "\n" not in found.why, reply


def test_each_rule_and_each_reason_has_a_case():
    seen: dict[str, set[str]] = {kind: set() for kind in RULES}
    for kind, read, reply, *_ in CASES:
        seen[kind].add(read(reply).rule)
    for kind, rules in RULES.items():
        assert {name for rule in rules for name in rule.name.split(" / ")} <= seen[kind], kind
    assert set(UNDECIDED) <= set().union(*seen.values())


def test_the_documentation_lists_every_rule_and_every_reason():
    text = DOCS.read_text()
    for rules in RULES.values():
        for rule in rules:
            if rule.name not in UNDECIDED:
                assert f"| {rule.name} | {rule.reads} |" in text, f"| {rule.name} | {rule.reads} |"
    for reason, meaning in UNDECIDED.items():
        assert f"| {reason} | {meaning} |" in text, f"| {reason} | {meaning} |"


# Laws

_FEW = settings(max_examples=80, deadline=None)
_SETS = st.lists(st.text(max_size=20), min_size=2, max_size=26).map(
    lambda texts: dict(zip(string.ascii_uppercase, texts, strict=False))
)
_NUMBER_FORMS = ("{}", "{} cm", "The answer is {}.", r"\boxed{{{}}}")
_USUAL = "the answer is correct option choice so I Answer think image car and of it not my : , . ?"
#: No option of RED is made of these.
_FILLING = st.lists(st.text("bcdfgkmpqz", min_size=3, max_size=8) | st.sampled_from(_USUAL.split()), max_size=30)


@_FEW
@given(_SETS, st.data())
def test_the_answer_is_x_is_x(options, data):
    letter = data.draw(st.sampled_from(sorted(options)))
    for form in (
        "The answer is {}.",
        "Answer: {}",
        "The correct answer is ({}).",
        "**{}**",
        r"\boxed{{{}}}",
        "答案是{}。",
    ):
        assert choice(form.format(letter), options).value == letter, form


@_FEW
@given(_FILLING)
def test_words_that_are_no_option_are_undecided(words):
    found = choice(" ".join(words), RED)
    assert found.value is None, found
    assert yes_no(" ".join(words)).value is None


@_FEW
@given(st.text(max_size=60), st.sampled_from(CASES))
def test_thinking_in_front_changes_nothing(thought, case):
    _, read, reply, value, rule = case
    assume("think" not in thought.lower() and "thought" not in thought.lower())
    found = read(f"<think>{thought}</think>\n\n{reply}")
    assert (found.value, found.rule) == (value, rule)


@_FEW
@given(st.text(max_size=300))
def test_any_text_is_read_without_an_error(reply):
    for _, read in {kind: read for kind, read, *_ in CASES}.items():
        assert isinstance(read(reply), Extracted)


@_FEW
@given(
    st.integers(-(10**12), 10**12),
    st.integers(0, 10**6),
    st.sampled_from(["{}", "{} cm", "The answer is {}.", r"\boxed{{{}}}"]),
)
def test_a_number_is_read_as_python_writes_it(whole, part, form):
    for text in (f"{whole}", f"{whole:,}", f"{whole}.{part:06d}", f"{whole:,}.{part:06d}"):
        assert matches_number(number(form.format(text)).value or "none", text.replace(",", ""))


# Cut replies and open thinking


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("The answer is red", None),  # red wine?
        ("The answer is red. It can be", "A"),
        ("The answer is B.\nThis is bec", "B"),
        ("A", None),  # a red car?
        (r"So \boxed{B} because", "B"),
        (r"So \boxed{B", None),
        ("<answer>B</answer> and", "B"),
        ("<answer>B", None),
    ],
)
def test_of_a_cut_reply_only_whole_sentences_and_closed_marks_are_read(reply, value):
    assert choice(reply, RED, truncated=True).value == value


def test_a_number_at_the_end_of_a_cut_reply_may_be_cut_itself():
    assert number("The answer is 12", truncated=True).value is None
    assert number("The answer is 12.", truncated=True).value is None
    assert number("The answer is 12. ", truncated=True).value is None  # 12. 5? the next token may be anything
    assert number("The answer is 12.\nThere", truncated=True).value == "12"
    assert short("The answer is New York", truncated=True).value is None
    assert yes_no("The answer is yes. There", truncated=True).value == "yes"


def test_thinking_that_the_template_opened_ends_at_its_tag_only():
    assert choice("It is A. The answer is A", RED, thinking_opened=True).rule == "thinking"
    assert choice("It is A.</think>The answer is B.", RED, thinking_opened=True).value == "B"
    assert choice("<think>It is A.</think>The answer is B.", RED, thinking_opened=True).value == "B"


# Options


@pytest.mark.parametrize("options", [{}, {"a": "red"}, {"AB": "red"}, {"1": "red"}, {"": "red"}, {"Ä": "red"}])
def test_options_are_named_by_capital_letters(options):
    with pytest.raises(RecipeError, match="options: .*A to Z"):
        choice("A", options)


def test_no_rule_knows_more_than_the_reply_and_the_options():
    for letter, text in TEN.items():
        assert choice(text, TEN).value == letter and choice(f"It's {text}.", TEN).value == letter


# Comparison with references


@pytest.mark.parametrize(
    ("value", "reference", "tolerance", "absolute", "same"),
    [
        ("5", "5", 0, 0, True),
        ("5", 5, 0, 0, True),
        ("5.0", "5", 0, 0, True),
        ("5", "5.0001", 0, 0, False),
        ("0.1", 0.1, 0, 0, True),
        ("105", "100", 0.05, 0, True),
        ("95", "100", 0.05, 0, True),
        ("105.01", "100", 0.05, 0, False),
        ("-105", "-100", 0.05, 0, True),
        ("0.001", "0", 0.05, 0, False),
        ("0.001", "0", 0.05, 0.001, True),
        ("12", "10", 0, 2, True),
        ("12", "10", 0, 1.9, False),
        ("1234", "1,234 kg", 0, 0, True),
        ("5", "five", 0, 0, True),
        ("3", "三", 0, 0, True),
        ("45%", "45%", 0, 0, True),
        ("45%", "45", 0, 0, True),
        ("45%", "0.45", 0, 0, True),
        ("45", "45%", 0, 0, True),
        ("0.45", "45%", 0, 0, True),
        ("0.46", "45%", 0.05, 0, True),
        ("0.48", "45%", 0.05, 0, False),
        ("0.45", "45", 0, 0, False),
        ("45%", "4.5", 0, 0, False),
        ("red", "5", 0, 0, False),
        ("3 or 4", "3", 0, 0, False),
    ],
)
def test_matches_number(value, reference, tolerance, absolute, same):
    assert matches_number(value, reference, tolerance, absolute) is same


@pytest.mark.parametrize("reference", ["", "red", "3 or 4"])
def test_a_reference_must_be_one_number(reference):
    with pytest.raises(RecipeError, match="exactly one number"):
        matches_number("5", reference)


@pytest.mark.parametrize("tolerances", [(-0.1, 0), (0, -1), (float("nan"), 0)])
def test_tolerances_are_not_negative(tolerances):
    with pytest.raises(RecipeError, match="0 or more"):
        matches_number("5", "5", *tolerances)


@pytest.mark.parametrize(
    ("value", "references", "same"),
    [
        ("red", "red", True),
        ("Red.", "red", True),
        ("a red car", "The Red Car", True),
        ("red car", "red", False),
        ("dark red", ["red", "crimson"], False),
        ("crimson", ["red", "crimson"], True),
        ("Coca-Cola", "coca cola", True),
        ("ＲＥＤ", "red", True),
        ("红色。", "红色", True),
        ("红色", "深红色", False),
        ("**STOP**", "stop", True),
        ("U.S.A.", "USA", True),
        ("it's", "its", True),
        ("10 km", "10km", True),
        ("1,000", "1000", True),
        ("three", "3", True),
        ("三", "3", True),
        ("room five", "room 5", False),
        ("-5", "5", False),
        ("5%", "5", False),
        ("3.5", "35", False),
        ("10:30", "1030", False),
        ("the", "a", False),
        ("", "red", False),
        ("cafe", "café", False),
    ],
)
def test_matches_text(value, references, same):
    assert matches_text(value, references) is same


@pytest.mark.parametrize("references", ["", [], ["red", " "]])
def test_references_are_not_empty(references):
    with pytest.raises(RecipeError, match="references"):
        matches_text("red", references)


# Time


@pytest.mark.parametrize(
    "piece",
    ["A. ", "The answer is ", "is red ", r"\boxed{", "1,", "answer a b c ", " ", "选", "there is ", "a total of a "],
)
def test_a_reply_of_100_000_characters_is_read_within_a_second(piece):
    reply = (piece * (100_000 // len(piece) + 1))[:100_000]
    for _, read in {kind: read for kind, read, *_ in CASES}.items():
        start = time.process_time()
        read(reply)
        assert time.process_time() - start < 1.0, piece
