"""What every loader does with what is missing, twice there, broken or hostile; reading of options; and one's own questions."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from opd_recipes.eval.benchmarks import BENCHMARKS, Question
from opd_recipes.eval.prompt_options import labelled, letter_of, parse_options
from opd_recipes.registry import RecipeError
from tests.unit.eval_fixtures import hub_image, json_lines, parquet, picture, png

GLOVE = "What is the material of the glove?\n(A) rubber\n(B) cotton\nAnswer with the option's letter."
ROW = {"image": hub_image(), "text": GLOVE, "label": "A", "question_id": "7", "category": "direct_attributes"}


def refusal(name: str, path: Path) -> str:
    with pytest.raises(RecipeError) as error:
        list(BENCHMARKS[name].load(path))
    return str(error.value)


def own(path: Path) -> list[Question]:
    questions = list(BENCHMARKS["custom"].load(path))
    assert [q.without_images() for q in questions] == list(BENCHMARKS["custom"].load(path, images=False))
    return questions


def test_two_questions_of_one_id_are_refused_not_merged(tmp_path):
    parquet(tmp_path / "test-0.parquet", [ROW, ROW])
    assert "'direct_attributes/7': two questions have this id" in refusal("vstar", tmp_path)


def test_an_answer_that_is_no_option_is_refused(tmp_path):
    parquet(tmp_path / "test-0.parquet", [{**ROW, "label": "E"}])
    assert "the answer 'E' is none of its options: A, B" in refusal("vstar", tmp_path)


def test_a_missing_column_is_told_with_row_what_was_looked_for_and_what_there_is(tmp_path):
    parquet(tmp_path / "test-0.parquet", [{key: ROW[key] for key in ("image", "label", "category")}])
    message = refusal("vstar", tmp_path)
    assert "test-0.parquet, row 0: looked for the column text" in message and "it has category, image, label" in message


def test_an_unknown_split_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(RecipeError, match="unknown split 'hard'; known: direct_attributes, relative_position"):
        BENCHMARKS["vstar"].load(tmp_path / "nowhere", "hard")


def test_a_missing_folder_a_missing_file_and_a_missing_image_are_told(tmp_path):
    assert "no such file or folder" in refusal("pope", tmp_path / "pope")
    assert "found none of test_questions.jsonl" in refusal("vstar", tmp_path)
    json_lines(tmp_path / "test_questions.jsonl", [{**ROW, "image": "direct_attributes/1.jpg"}])
    assert "its image 'direct_attributes/1.jpg' is not there" in refusal("vstar", tmp_path)


def test_an_empty_file_is_no_benchmark(tmp_path):
    (tmp_path / "test_questions.jsonl").write_text("\n")
    assert "has no question" in refusal("vstar", tmp_path)


def test_a_pointer_of_large_file_storage_and_a_torn_file_are_told(tmp_path):
    (tmp_path / "mmstar.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    assert "only points at the data" in refusal("mmstar", tmp_path)
    (tmp_path / "mmstar.parquet").write_bytes(b"PAR1 and no more")
    assert "is the download complete?" in refusal("mmstar", tmp_path)


def test_a_row_of_separated_values_with_another_number_of_fields_is_refused(tmp_path):
    (tmp_path / "MMStar.tsv").write_text("index\tquestion\tanswer\n1\tWhat?\n")
    assert "another number of fields than the header" in refusal("mmstar", tmp_path)


def test_a_row_cannot_name_an_image_or_a_link_outside_of_its_folder(tmp_path):
    picture(tmp_path / "secret.jpg")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/link.jpg").symlink_to(tmp_path / "secret.jpg")
    for name in ("../secret.jpg", "link.jpg"):
        json_lines(tmp_path / "bench/test_questions.jsonl", [{**ROW, "image": name}])
        assert "outside" in refusal("vstar", tmp_path / "bench")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("Which?\n(A) red\n(B) dark red", {"A": "red", "B": "dark red"}),
        ("Which?\nA. red\nB. blue\nAnswer with A or B.", {"A": "red", "B": "blue"}),
        ("Options: A: 3, B: 4, C: 5", {"A": "3", "B": "4", "C": "5"}),
        ("Are they open? (a) Open (b) Closed", {"A": "Open", "B": "Closed"}),
        ("A) a cat; B) a dog", {"A": "a cat", "B": "a dog"}),
        ("哪个?\nA、猫\nB、狗", {"A": "猫", "B": "狗"}),
        ("Vitamin A. Which?\n(A) yes\n(B) no", {"A": "yes", "B": "no"}),
        ("(A) type A. old\n(B) type B. new", {"A": "type A. old", "B": "type B. new"}),
        ("What is it? A dog.", {}),
        ("Plan A. Then stop.", {}),
    ],
)
def test_options_are_read_from_a_text(text, options):
    assert parse_options(text) == options


def test_options_of_a_list_keep_their_own_labels_or_get_some():
    assert labelled(["(B) two", "(A) one"]) == {"A": "one", "B": "two"}
    assert labelled(["red", "A. or not"]) == {"A": "red", "B": "A. or not"}
    assert [letter_of(text) for text in ("(c)", "C.", "C", "(C) red")] == ["C"] * 4


def test_own_questions_need_a_question_and_an_answer_and_their_kind_follows_from_these(tmp_path):
    rows = [
        {"question": "Which?", "answer": "blue", "options": ["red", "blue"]},
        {"question": "Is it red?", "answer": "No"},
        {"question": "How many?", "answer": 1200},
        {"question": "What does it say?", "answer": ["STOP", "stop sign"]},
        {"question": "Which?\n(A) cat\n(B) dog", "answer": "(B)"},
    ]
    questions = own(json_lines(tmp_path / "mine.jsonl", rows))
    assert [(q.kind, q.answer) for q in questions] == [
        ("choice", ("B",)),
        ("yes_no", ("no",)),
        ("number", ("1200",)),
        ("short", ("STOP", "stop sign")),
        ("choice", ("B",)),
    ]
    assert questions[0].text == "Which?\n(A) red\n(B) blue"
    assert questions[4].text == rows[4]["question"]
    assert [q.id for q in questions] == [f"mine.jsonl:{i}" for i in range(5)]
    assert [q.group for q in questions] == [q.id for q in questions]


def test_own_questions_say_id_category_group_box_tolerance_and_images_in_three_forms(tmp_path):
    picture(tmp_path / "images/1.png", "blue")
    common = {"question": "How many?", "answer": "3", "kind": "number", "tolerance": 0.1}
    rows = [
        {
            **common,
            "id": "a",
            "group": "g",
            "category": {"size": "small"},
            "bbox": [0, 1, 2, 3],
            "image": "images/1.png",
        },
        {
            **common,
            "id": "b",
            "group": "g",
            "category": "big",
            "images": [base64.b64encode(png()).decode(), "images/1.png"],
        },
    ]
    first, second = own(json_lines(tmp_path / "mine.jsonl", rows))
    assert (first.id, first.group, first.category, first.bbox) == ("a", "g", {"size": "small"}, (0, 1, 2, 3))
    assert (second.category, second.tolerance) == ({"category": "big"}, 0.1)
    assert [image.read() for image in (*first.images, *second.images)] == [png("blue"), png(), png("blue")]


def test_own_questions_may_be_the_rows_that_training_uses(tmp_path):
    row = {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": "<image>\nWhat colour is the disc?"}],
        "images": [hub_image("blue")],
        "bbox": [1.0, 1.0, 4.0, 4.0],
        "reward_model": {"style": "rule", "ground_truth": "blue"},
        "extra_info": {"index": 0},
    }
    (question,) = own(parquet(tmp_path / "val.parquet", [row]))
    assert (question.text, question.kind, question.answer) == ("What colour is the disc?", "short", ("blue",))
    assert (question.category, question.bbox) == ({"category": "toy"}, (1, 1, 4, 4))
    assert question.images[0].read() == png("blue")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": None}, "looked for the answer in 'answer' and 'reward_model.ground_truth', found none"),
        ({"answer": "green"}, "the answer 'green' is none of the options A, B, nor the text of one"),
        ({"kind": "essay"}, "unknown kind 'essay'; known: choice, yes_no, number, short"),
        ({"kind": "choice", "options": None}, "kind is choice, but there are no options"),
        ({"bbox": [5, 5, 5, 9]}, "has no area"),
        ({"category": {"extra": "x"}}, "'extra' cannot be the name"),
        ({"question": None}, "looked for the column question or text or prompt"),
        ({"image": "gone.png"}, "its image 'gone.png' is not there"),
        ({"question": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}, "one user turn"),
    ],
)
def test_own_questions_that_cannot_be_asked_are_refused_with_their_row(tmp_path, change, message):
    row = {"question": "Which?", "answer": "red", "options": ["red", "blue"], "kind": "choice", **change}
    told = refusal("custom", json_lines(tmp_path / "mine.jsonl", [row]))
    assert message in told and "row 0" in told


def test_a_folder_with_files_of_several_kinds_is_not_guessed_about(tmp_path):
    """As a folder of prepared rows, which has what was left out beside them."""
    json_lines(tmp_path / "rejects.jsonl", [{"file": "x", "row": 1}])
    parquet(tmp_path / "val.parquet", [{"question": "?", "answer": "yes"}])
    assert "files of several kinds (.jsonl, .parquet); name the file to use" in refusal("custom", tmp_path)
    assert [q.id for q in own(tmp_path / "val.parquet")] == ["val.parquet:0"]


def test_rows_are_counted_in_their_own_file(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        json_lines(tmp_path / name, [{"question": "?", "answer": "yes"}])
    assert [q.id for q in own(tmp_path)] == ["a.jsonl:0", "b.jsonl:0"]


def test_damaged_base64_is_told_when_the_image_is_read(tmp_path):
    row = {"question": "?", "answer": "yes", "image": "data:image/png;base64,abc"}
    (question,) = BENCHMARKS["custom"].load(json_lines(tmp_path / "mine.jsonl", [row]))
    with pytest.raises(RecipeError, match="base64 is damaged"):
        question.images[0].read()


def test_a_line_that_is_not_json_is_told_with_its_number(tmp_path):
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": "?", "answer": "yes"}) + "\n{torn\n")
    assert "mine.jsonl, line 2: not JSON" in refusal("custom", tmp_path / "mine.jsonl")


@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=list(BENCHMARKS))
def test_every_benchmark_says_what_it_is_and_where_it_lies(benchmark):
    assert BENCHMARKS[benchmark.name] is benchmark
    assert benchmark.title and benchmark.source and benchmark.layout and benchmark.max_tokens > 0
    assert f"`{benchmark.name}`" in (Path(__file__).parents[2] / "docs/eval.md").read_text()
