"""As test_eval_benchmarks.py, for MME-RealWorld, MMVP, CV-Bench, MMStar and POPE."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.eval_fixtures import base64_png, hub_image, json_lines, load, parquet, picture, png, refusal

LETTER = "Answer with the option's letter from the given choices directly."

# MME-RealWorld

BUSES = ["(A) 13", "(B) 90", "(C) 77", "(D) 6", "(E) The image does not feature the buses"]
MME_TEXT = (
    "How many buses? The choices are listed below:\n" + "\n".join(BUSES) + "\nSelect the best answer to the above "
    "multiple-choice question based on the image. Respond with only the letter (A, B, C, D, or E) of the correct option.\n"
    "The best answer is:"
)


def test_mme_realworld_reads_the_parquet_of_its_lmms_eval_edition(tmp_path):
    row = {
        "index": 5,
        "question": "How many buses?",
        "multi-choice options": BUSES,
        "answer": "E",
        "category": "Perception/Monitoring",
        "l2-category": "Vehicle/attribute/color",
        "bytes": base64_png(),
    }
    parquet(tmp_path / "data/train-00000-of-00001.parquet", [row])
    (question,) = load("mme-realworld-lite", tmp_path)
    assert question.text == MME_TEXT
    assert question.options == {"A": "13", "B": "90", "C": "77", "D": "6", "E": "The image does not feature the buses"}
    assert question.answer == ("E",)
    assert question.category == {
        "task": "Perception",
        "domain": "Perception/Monitoring",
        "category": "Perception/Monitoring/vehicle/attribute",
    }, "the authors' script counts all attributes of one kind of object together"


def test_mme_realworld_reads_the_json_of_the_first_edition(tmp_path):
    row = {
        "Question_id": "perception/monitoring/Vehicle/counting/0310",
        "Image": "monitoring_images/1.jpg",
        "Text": "How many buses?",
        "Answer choices": BUSES,
        "Ground truth": "E",
        "Category": "Vehicle/counting",
        "Subtask": "Monitoring",
        "Task": "Perception",
    }
    picture(tmp_path / "monitoring_images/1.jpg")
    (tmp_path / "MME_RealWorld.json").write_text(json.dumps([row]))
    (question,) = load("mme-realworld-en", tmp_path)
    assert (question.text, question.answer) == (MME_TEXT, ("E",))
    assert (question.id, question.group) == (row["Question_id"], row["Image"])
    assert question.category["category"] == "Perception/Monitoring/vehicle/counting"


def test_mme_realworld_cn_asks_in_chinese(tmp_path):
    row = {
        "index": 1,
        "question": "图中有什么?",
        "multi-choice options": ["(A) 猫", "(B) 狗", "(C) 鸟", "(D) 鱼", "(E) 图像中没有"],
        "answer": "A",
        "category": "Reasoning/Diagram and Table",
        "l2-category": "diagram",
        "bytes": base64_png(),
    }
    parquet(tmp_path / "data/train-0.parquet", [row])
    (question,) = load("mme-realworld-cn", tmp_path)
    assert question.text == (
        "图中有什么? 选项如下所示:\n(A) 猫\n(B) 狗\n(C) 鸟\n(D) 鱼\n(E) 图像中没有\n"
        "根据图像选择上述多项选择题的最佳答案。只需回答正确选项的字母（A, B, C, D 或 E）。\n最佳答案为："
    )
    assert question.options["E"] == "图像中没有"


# MMVP


def mmvp_folder(root: Path, header: str = "Index") -> Path:
    lines = [f"{header},Question,Options,Correct Answer"]
    for number, answer in enumerate(("(a)", "(b)", "(b)", "(a)"), 1):
        picture(root / "MMVP Images" / f"{number}.jpg")
        lines.append(f'{number},"Are the wings open, or closed?",(a) Open (b) Closed,{answer}')
    (root / "Questions.csv").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize("header", ["Index", "lndex"])
def test_mmvp_has_the_authors_prompt_and_neighbours_are_pairs(tmp_path, header):
    questions = load("mmvp", mmvp_folder(tmp_path, header))
    assert questions[0].text == "Are the wings open, or closed? (a) Open (b) Closed"
    assert questions[0].options == {"A": "Open", "B": "Closed"}
    assert [q.answer for q in questions] == [("A",), ("B",), ("B",), ("A",)]
    assert [q.group for q in questions] == ["pair 1", "pair 1", "pair 2", "pair 2"]


def test_mmvp_rows_out_of_order_are_refused(tmp_path):
    lines = (mmvp_folder(tmp_path) / "Questions.csv").read_text().splitlines()
    (tmp_path / "Questions.csv").write_text("\n".join([lines[0], lines[4], *lines[1:4]]))
    assert "must be in order" in refusal("mmvp", tmp_path)


# CV-Bench


def test_cv_bench_adds_the_instruction_of_its_authors_and_keeps_both_parts_apart(tmp_path):
    prompt = "How many cars? Select from the following choices.\n(A) 3\n(B) 2"
    for part, source in (("2D", "COCO"), ("3D", "Omni3D")):
        row = {
            "idx": 0,
            "type": part,
            "task": "Count",
            "image": hub_image(),
            "prompt": prompt,
            "choices": ["3", "2"],
            "answer": "(B)",
            "source": source,
            "source_filename": "000.jpg",
        }
        parquet(tmp_path / f"test_{part.lower()}.parquet", [row])
    questions = load("cv-bench", tmp_path)
    assert [q.id for q in questions] == ["2D/0", "3D/0"]
    assert questions[0].text == f"{prompt}\n{LETTER}"
    assert (questions[0].options, questions[0].answer) == ({"A": "3", "B": "2"}, ("B",))
    assert questions[0].category == {"type": "2D", "task": "Count", "source": "COCO"}
    assert [q.id for q in load("cv-bench", tmp_path, "3d")] == ["3D/0"]


# MMStar


def test_mmstar_finds_the_options_inside_the_question(tmp_path):
    asked = "Which option describes the image?\nOptions: A: a cat, black, B: a dog, C: a bird, D: a fish"
    row = {
        "index": 12,
        "question": asked,
        "image": png(),
        "answer": "C",
        "category": "math",
        "l2_category": "geometry",
        "meta_info": {"source": "MMBench", "split": "val", "image_path": "1.jpg"},
    }
    parquet(tmp_path / "mmstar.parquet", [row])
    (question,) = load("mmstar", tmp_path)
    assert question.text == f"{asked}\n{LETTER}"
    assert question.options == {"A": "a cat, black", "B": "a dog", "C": "a bird", "D": "a fish"}
    assert question.category == {"category": "math", "axis": "geometry"}


# POPE


def test_pope_reads_the_parquet_of_lmms_lab_whose_numbers_repeat_in_each_split(tmp_path):
    rows = [
        {
            "id": str(number),
            "question_id": "1",
            "question": "Is there a snowboard in the image?",
            "answer": answer,
            "image_source": "COCO_val2014_000000310196",
            "image": hub_image(),
            "category": split,
        }
        for number, (split, answer) in enumerate((("adversarial", "yes"), ("popular", "no"), ("random", "yes")))
    ]
    parquet(tmp_path / "data/test-00000-of-00003.parquet", rows)
    questions = load("pope", tmp_path)
    assert [q.id for q in questions] == ["adversarial/1", "popular/1", "random/1"]
    assert questions[0].text == "Is there a snowboard in the image?\nAnswer the question using a single word or phrase."
    assert [(q.kind, q.answer) for q in questions[:2]] == [("yes_no", ("yes",)), ("yes_no", ("no",))]
    assert {q.group for q in questions} == {"COCO_val2014_000000310196"}, "questions of one picture are drawn together"
    assert [q.id for q in load("pope", tmp_path, "popular")] == ["popular/1"]


def test_pope_reads_the_authors_json_lines_under_the_name_json(tmp_path):
    name = "COCO_val2014_000000548882.jpg"
    row = {"question_id": 0, "image": name, "text": "Is there a sandwich in the image?", "label": "yes"}
    picture(tmp_path / "val2014" / name)
    json_lines(tmp_path / "coco_pope_random.json", [row])
    (question,) = load("pope", tmp_path)
    assert (question.id, question.answer, question.category) == ("random/0", ("yes",), {"split": "random"})
    assert question.group == name
