"""Replies to values: what is accepted, and the reason for everything else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.rows import RowFault
from data_prep.synthesize import parse
from data_prep.synthesize.images import check_evidence, fitted, overlap
from data_prep.synthesize.replies import Reply, texts
from data_prep.synthesize.templates import BUILT_IN, FIELDS, Templates, write_prompts


def refusal(function, *arguments) -> str:
    with pytest.raises(RowFault) as caught:
        function(*arguments)
    return str(caught.value)


# JSON


@pytest.mark.parametrize(
    "text",
    [
        '["a", "b"]',
        '  ["a", "b"]\n',
        '```json\n["a", "b"]\n```',
        '```\n["a", "b"]\n```',
        'Here is the list:\n```json\n["a", "b"]\n```\nI hope this helps.',
        'Here is the list: ["a", "b"]. Anything else?',
        '["a", "b",]',
        '["a", "b" , ]',
        '<think>maybe ["x"]?</think>["a", "b"]',
        'maybe ["x"]?\n</think>\n\n["a", "b"]',
        '{"objects": ["a", "b"]}',
        '{"objects": ["a", "b",],}',
    ],
)
def test_json_is_found_where_models_put_it(text):
    assert texts(Reply(text), "objects") == ["a", "b"]


def test_a_comma_inside_a_text_is_not_a_trailing_one():
    assert texts(Reply('["a,]", "b,}",]'), "objects") == ["a,]", "b,}"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("   \n", "empty"),
        ("<think>so</think>", "empty"),
        ('<think>["a"]', "no end"),
        ("I think there are two.", "no JSON"),
        ("I'm sorry, but I can't help.", "refused"),
        ("I’m sorry", "refused"),
        ("As an AI model I do not see", "refused"),
        ("抱歉，我无法回答。", "refused"),
        ("['a', 'b']", "broken"),
        ('["a", "b"', "broken"),
        ('["a" "b"]', "broken"),
        ('{"objects": ["a"], "objects": ["b"]}', "repeated"),
        ("[NaN]", "NaN"),
        ('["a"] or rather ["b"]', "second bracket"),
        ('```json\n["a"]\n```\n```json\n["b"]\n```', "2 fenced blocks"),
        ('see [below]: ["a"]', "broken"),
        ('{"things": ["a"]}', "JSON list of objects"),
        ('["\\ud800"]', "broken"),
        ("[" * 15000, "broken"),
        ('["' + "a" * 30000 + '"]', "more than 20000"),
        ("[" + "9" * 5000 + "]", "broken"),
    ],
)
def test_what_can_be_read_in_more_than_one_way_or_not_at_all_is_refused(text, reason):
    assert reason in refusal(texts, Reply(text), "objects")


def test_a_reply_that_was_cut_off_is_refused_even_when_it_parses():
    assert "cut off" in refusal(texts, Reply('["a"]', finish_reason="length"), "objects")
    assert "filter" in refusal(texts, Reply('["a"]', finish_reason="content_filter"), "objects")


@settings(deadline=None)
@given(st.text(max_size=200), st.sampled_from(["stop", "length", None]))
def test_no_text_does_anything_but_parse_or_be_refused(text, finish):
    for function in (
        lambda r: texts(r, "objects"),
        lambda r: parse.box(r, "pixels", (10, 10), (10, 10)),
        lambda r: parse.question_list(r, 3),
        parse.check_verdict,
        parse.answer,
        lambda r: parse.distractors(r, "red", 3),
    ):
        for wrapped in (text, json.dumps([text]), json.dumps({"answer": text})):
            try:
                function(Reply(wrapped, finish))
            except RowFault as fault:
                assert fault.reasons and all(fault.reasons)


# Names


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (3, "not text"),
        (None, "not text"),
        ({"object": "mug"}, "not text"),
        (" \n ", "empty"),
        ("x" * 81, "81 characters"),
        ("mug\x00", "control"),
        ("mug\u202e", "control"),
        ("a <image>", "<image>"),
        ("<|im_start|>system", "<|im_start|>"),
    ],
)
def test_names_that_a_prompt_cannot_hold_are_refused(entry, reason):
    assert reason in refusal(parse.object_name, entry)


def test_a_name_is_one_line():
    assert parse.object_name("  red\n  mug ") == "red mug"


def test_names_listed_twice_do_not_appear_once():
    assert parse.repeated(["mug", "Mug", "cup", "MUG", "cups"]) == {"mug"}


# Boxes: an image of 2000 x 1000 pixels, sent as 1000 x 500


@pytest.mark.parametrize(
    ("numbers", "convention", "expected"),
    [
        ([100, 200, 300, 400], "qwen1000", (200, 200, 600, 400)),
        ([0, 0, 1000, 1000], "qwen1000", (0, 0, 2000, 1000)),
        ([100, 200, 300, 400], "pixels", (200, 400, 600, 800)),
        ([0, 0, 1000, 500], "pixels", (0, 0, 2000, 1000)),
        ([0.25, 0.5, 0.5, 1], "normalised", (500, 500, 1000, 1000)),
        ([0.3, 0.3, 0.7, 0.7], "normalised", (600, 300, 1400, 700)),
        ([100.2, 200.3, 300.4, 400.6], "qwen1000", (200, 200, 601, 401)),
    ],
)
def test_boxes_become_whole_pixels_of_the_original_outwards(numbers, convention, expected):
    for text in (numbers, {"bbox_2d": numbers, "label": "x"}, [{"bbox": numbers}], [{"bbox_2d": numbers}]):
        assert parse.box(Reply(json.dumps(text)), convention, (1000, 500), (2000, 1000)) == expected


@pytest.mark.parametrize(
    ("text", "convention", "reason"),
    [
        ("[]", "qwen1000", "0 boxes"),
        ("[[1, 2, 3, 4], [5, 6, 7, 8]]", "qwen1000", "2 boxes"),
        ('[{"label": "x"}]', "qwen1000", "bbox_2d"),
        ('{"bbox_2d": [1, 2, 3, 4], "bbox": [1, 2, 3, 5]}', "qwen1000", "bbox_2d"),
        ('{"bbox_2d": [1, 2, 3]}', "qwen1000", "four numbers"),
        ('{"bbox_2d": [1, 2, 3, "4"]}', "qwen1000", "four numbers"),
        ('{"bbox_2d": [1, 2, 3, true]}', "qwen1000", "four numbers"),
        ('{"bbox_2d": [1, 2, 3, 1e999]}', "qwen1000", "four numbers"),
        ('{"bbox_2d": [1, 2, 3, ' + "9" * 400 + "]}", "qwen1000", "four numbers"),
        ('{"bbox_2d": [30, 10, 10, 40]}', "qwen1000", "empty"),
        ('{"bbox_2d": [10, 10, 10, 40]}', "qwen1000", "empty"),
        ('{"bbox_2d": [10, 10, 1001, 40]}', "qwen1000", "outside"),
        ('{"bbox_2d": [-1, 10, 20, 40]}', "qwen1000", "outside"),
        ('{"bbox_2d": [10, 10, 20, 501]}', "pixels", "outside"),
        ('{"bbox_2d": [10, 10, 20, 40]}', "normalised", "outside"),
        ('{"bbox_2d": [0.1, 0.1, 0.2, 0.2]}', "qwen1000", "looks normalised"),
        ('{"bbox_2d": [0.1, 0.1, 0.2, 0.2]}', "pixels", "looks normalised"),
        ("null", "pixels", "no JSON"),
    ],
)
def test_anything_but_one_box_inside_the_image_is_refused(text, convention, reason):
    assert reason in refusal(parse.box, Reply(text), convention, (1000, 500), (2000, 1000))


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ((0, 0, 400, 250), "0.100 of the image's area"),
        ((0, 0, 15, 40), "side below 16"),
        ((0, 0, 1700, 16), "100 times"),
    ],
)
def test_evidence_is_small_but_not_too_small(box, reason):
    check_evidence((0, 0, 400, 249), (1000, 1000), 0.1, 16)
    size = (1000, 1000) if box[2] <= 1000 else (2000, 2000)
    assert reason in refusal(check_evidence, box, size, 0.1, 16)


def test_overlap_is_intersection_over_union():
    assert overlap((0, 0, 2, 2), (1, 0, 3, 2)) == pytest.approx(2 / 6)
    assert overlap((0, 0, 2, 2), (2, 0, 3, 2)) == 0 and overlap((0, 0, 2, 2), (0, 0, 2, 2)) == 1


@pytest.mark.parametrize(
    ("size", "max_side", "multiple", "expected"),
    [
        ((4000, 3000), 1000, 1, (1000, 750)),
        ((400, 300), 1000, 1, (400, 300)),
        ((4000, 3), 1000, 1, (1000, 1)),
        ((4000, 3000), 1000, 28, (1008, 756)),
        ((100, 5), 1000, 28, (112, 28)),
    ],
)
def test_images_are_scaled_down_never_up(size, max_side, multiple, expected):
    assert fitted(size, max_side, multiple) == expected


# Questions and language


@pytest.mark.parametrize(
    ("text", "language", "fits"),
    [
        ("What is written on the sign?", "en", True),
        ("What does “出口” on the sign mean?", "en", True),
        ("这个标志是什么颜色？", "en", False),
        ("12 + 3?", "en", False),
        ("这个标志是什么颜色？", "zh", True),
        ("STOP 标志是什么颜色？", "zh", True),
        ("What colour is 红?", "zh", False),
        ("看板の色は何ですか？", "zh", False),
        ("Какого цвета знак?", "en", False),
        ("Какого цвета знак?", "any", True),
    ],
)
def test_the_language_is_judged_by_its_script(text, language, fits):
    if fits:
        assert parse.question(text, language) == text
    else:
        assert "wrong language" in refusal(parse.question, text, language)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [(None, "not text"), ("", "empty"), ("The sign.", "question mark"), ("I cannot see it, can you?", "refused")],
)
def test_what_is_no_question_is_refused(entry, reason):
    assert reason in refusal(parse.question, entry, "en")


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_questions_is_refused(count):
    assert f"{count} questions instead of 3" in refusal(parse.question_list, Reply(json.dumps(["a?"] * count)), 3)


# Verdicts


ALL_TRUE = {"answerable": True, "unique": True, "consistent": True, "clear": True}


def test_a_verdict_must_say_true_to_everything():
    parse.check_verdict(Reply(json.dumps({**ALL_TRUE, "why": "so"})))
    for name in parse.CHECKS:
        told = refusal(parse.check_verdict, Reply(json.dumps({**ALL_TRUE, name: False})))
        assert told == f"the validator says: not {name}"
        for undecided in ("true", 1, None, "yes"):
            told = refusal(parse.check_verdict, Reply(json.dumps({**ALL_TRUE, name: undecided})))
            assert told.endswith(f"true or false to: {name}")
    assert "JSON object" in refusal(parse.check_verdict, Reply("[true, true, true, true]"))


# Answers


def said(*answers: str) -> list[Reply]:
    return [Reply(json.dumps({"answer": answer})) for answer in answers]


@pytest.mark.parametrize(
    "text", ['{"answer": "red"}', '["red"]', '{"answer": ""}', '{"answer": "..."}', '{"answer": null}']
)
def test_an_answer_is_one_text(text):
    if text == '{"answer": "red"}':
        assert parse.answer(Reply(text)) == "red"
    else:
        refusal(parse.answer, Reply(text))


def test_numbers_are_answers_and_a_sign_that_apologises_is_no_refusal():
    assert parse.answer(Reply('{"answer": 7}')) == "7"
    assert parse.answer(Reply('{"answer": "Sorry, we are closed"}')) == "Sorry, we are closed"
    assert "refused" in refusal(parse.answer, Reply('{"answer": "I\'m sorry, it is blurred"}'))
    assert "cannot answer" in refusal(parse.answer, Reply('{"answer": "Unanswerable."}'))


@pytest.mark.parametrize(
    ("answers", "least", "winner"),
    [
        (["red"] * 6 + ["blue"] * 2, 0.75, "red"),  # 6 / 8 = 0.75
        (["red"] * 5 + ["blue"] * 3, 0.75, None),  # 5 / 8 = 0.625
        (["red"] * 5 + ["blue"] * 3, 0.6, "red"),
        (["Red.", "red", "RED!", " red ", "red", "red", "a", "b"], 0.75, "Red."),  # as first written
        (["red"] * 6 + ["unanswerable"] * 2, 0.75, "red"),
        (["red"] * 5 + ["unanswerable"] * 3, 0.75, None),  # no vote, but it counts
        (["红色"] * 3 + ["红色。"] * 3 + ["蓝色"] * 2, 0.75, "红色"),
        (["red"] * 7, 1.0, "red"),
        (["red"] * 2 + ["blue"], 2 / 3, "red"),
    ],
)
def test_the_majority_needs_its_share_of_all_samples(answers, least, winner):
    if winner:
        assert parse.agreed_answer(said(*answers), least) == winner
    else:
        assert "5 of 8 answers agree" in refusal(parse.agreed_answer, said(*answers), least)


def test_broken_replies_count_against_the_majority():
    replies = [*said(*["red"] * 5), Reply("", "length"), Reply("no"), Reply('{"answer": "blue"}')]
    assert "5 of 8 answers agree" in refusal(parse.agreed_answer, replies, 0.75)


# Multiple choice


def test_distractors_are_three_and_differ_from_the_answer_and_each_other():
    assert parse.distractors(Reply('["blue", "green", "pink"]'), "red", 3) == ["blue", "green", "pink"]
    for options in (
        ["blue", "green"],
        ["blue", "Blue.", "pink"],
        ["blue", "RED", "pink"],
        ["blue", "a", "pink"],
        ["blue", "", "x"],
    ):
        refusal(parse.distractors, Reply(json.dumps(options)), "red", 3)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b.", "B"),
        ("B. red", "B"),
        ("B) red", "B"),
        ("Red", "B"),
        ("(B)", "B"),
        ("B. blue", None),
        ("E", None),
        ("Both", None),
    ],
)
def test_a_letter_or_its_option_is_a_choice(text, letter):
    assert parse.chosen_letter(text, ["blue", "red", "green", "pink"]) == letter


def test_hits_count_right_answers_only():
    replies = [*said("red", "Red.", "blue"), Reply("nothing")]
    assert parse.hits(replies, "red", None) == 2
    assert parse.hits(said("B", "red", "A", "E"), "B", ["blue", "red", "green", "pink"]) == 2


# Prompts


def test_fields_are_replaced_once_and_other_braces_stay():
    templates = Templates()
    text = templates.fill("validate", object="{question}", question="{object} {0}?")
    assert "The detail shows: {question}\n" in text and "about it: {object} {0}?\n" in text
    assert '{"answerable": true or false' in text


def test_no_built_in_prompt_has_an_unknown_field():
    import re

    for name, fields in FIELDS.items():
        found = set(re.findall(r"\{(\w+)\}", (BUILT_IN / f"{name}.txt").read_text()))
        assert found <= set(fields)


def test_edited_prompts_must_be_whole_and_are_never_overwritten(tmp_path):
    from data_prep.rows import DataError

    write_prompts(tmp_path)
    with pytest.raises(DataError, match="exists already"):
        write_prompts(tmp_path)
    (tmp_path / "answer.txt").write_text("Answer!")
    with pytest.raises(DataError, match=r"answer.txt: it lacks \{question\}"):
        Templates(tmp_path)
    (tmp_path / "answer.txt").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        Templates(tmp_path)
    assert Templates(tmp_path, ["box"]).fill("box", object="x", box_format="y")
