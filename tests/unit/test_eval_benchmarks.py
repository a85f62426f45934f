"""What the loaders of benchmarks with small evidence make of each published layout: text, options, answers, groups, boxes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.unit.eval_fixtures import base64_png, hub_image, json_lines, load, parquet, picture, png, refusal

LETTER = "Answer with the option's letter from the given choices directly."
GLOVE = f"What is the material of the glove?\n(A) rubber\n(B) cotton\n(C) kevlar\n(D) leather\n{LETTER}"


# V*


def vstar_folder(root: Path) -> Path:
    rows = [
        ("direct_attributes", "sa_4690", GLOVE, "A", 0),
        (
            "relative_position",
            "sa_6183",
            f"Is the dog left or right of the cat?\n(A) left.\n(B) right.\n{LETTER}",
            "B",
            0,
        ),
    ]
    json_lines(
        root / "test_questions.jsonl",
        [
            {"image": f"{task}/{image}.jpg", "text": text, "category": task, "label": label, "question_id": number}
            for task, image, text, label, number in rows
        ],
    )
    for (task, image, *_), boxes in zip(rows, ([[1, 2, 3, 4]], [[0, 0, 2, 2], [5, 4, 2, 3]]), strict=True):
        picture(root / task / f"{image}.jpg")
        (root / task / f"{image}.json").write_text(json.dumps({"target_object": ["x"], "bbox": boxes, "question": "?"}))
    return root


def test_vstar_reads_text_options_label_and_the_box_around_all_targets(tmp_path):
    glove, dog = load("vstar", vstar_folder(tmp_path))
    assert glove.text == GLOVE
    assert glove.options == {"A": "rubber", "B": "cotton", "C": "kevlar", "D": "leather"}
    assert (glove.kind, glove.answer, glove.category) == ("choice", ("A",), {"task": "direct_attributes"})
    assert glove.bbox == (1, 2, 4, 6), "x, y, width, height in the file"
    assert dog.options == {"A": "left.", "B": "right."}
    assert dog.bbox == (0, 0, 7, 7)
    assert glove.images[0].read() == png()


def test_question_numbers_that_repeat_between_categories_stay_two_questions(tmp_path):
    assert [q.id for q in load("vstar", vstar_folder(tmp_path))] == ["direct_attributes/0", "relative_position/0"]


def test_vstar_reads_the_parquet_of_lmms_lab(tmp_path):
    row = {"image": hub_image(), "text": GLOVE, "label": "A", "question_id": "7", "category": "direct_attributes"}
    parquet(tmp_path / "data/test-00000-of-00001.parquet", [row])
    (question,) = load("vstar", tmp_path)
    assert (question.id, question.answer, question.bbox) == ("direct_attributes/7", ("A",), None)


def test_a_split_is_loaded_alone(tmp_path):
    assert [q.category["task"] for q in load("vstar", vstar_folder(tmp_path), "relative_position")] == [
        "relative_position"
    ]


def test_images_of_a_hugging_face_cache_are_found_through_its_links(tmp_path):
    cache = tmp_path / "datasets--craigwu--vstar_bench"
    vstar_folder(snapshot := cache / "snapshots" / "abc")
    (cache / "blobs").mkdir()
    for number, file in enumerate(sorted(file for file in snapshot.rglob("*") if file.is_file())):
        blob = cache / "blobs" / str(number)
        file.rename(blob)
        file.symlink_to(blob)
    assert [q.bbox for q in load("vstar", cache)] == [(1, 2, 4, 6), (0, 0, 7, 7)]


# ZoomBench


def test_zoombench_has_choices_and_blanks_full_images_and_crops_under_the_same_ids(tmp_path):
    choice = "What colour is the cup?\nA. red\nB. tan\nAnswer with the option's letter from the given choices."
    common = {"image": hub_image("red"), "crop_image": hub_image("blue"), "bbox": [1, 2, 5, 6]}
    rows = [
        {"id": "z1", "query": choice, "response": "B", "question_type": "mcq", **common},
        {"id": "z2", "query": "How many cups?", "response": "4", "question_type": "blank", **common},
        {"id": "z3", "query": "What does the sign say?", "response": "STOP", "question_type": "blank", **common},
    ]
    parquet(tmp_path / "data/test.parquet", rows)
    full, crop = load("zoombench", tmp_path), load("zoombench", tmp_path, "crop")
    assert [(q.id, q.kind, q.answer) for q in full] == [
        ("z1", "choice", ("B",)),
        ("z2", "number", ("4",)),
        ("z3", "short", ("STOP",)),
    ]
    assert (full[0].text, full[0].options, full[0].bbox) == (choice, {"A": "red", "B": "tan"}, (1, 2, 5, 6))
    assert full[0].category == {"form": "mcq"}
    assert [q.id for q in crop] == [q.id for q in full]
    assert (full[0].images[0].read(), crop[0].images[0].read()) == (png("red"), png("blue"))
    assert crop[0].bbox is None, "the box is in pixels of the full image"


# HR-Bench


def hrbench_rows() -> list[dict]:
    texts = ["1", "2", "3", "4"]
    rows = []
    for cycle in range(4):
        for number, task in enumerate(("single", "single", "cross")):
            order = texts[cycle:] + texts[:cycle]
            rows.append(
                {
                    "index": len(rows),
                    "question": "Which number?" if number < 2 else "Which is larger?",
                    **dict(zip("ABCD", order, strict=True)),
                    "answer": "ABCD"[order.index("2")],
                    "category": task,
                    "cycle_category": str(cycle),
                    "image": base64_png(),
                }
            )
    return rows


@pytest.mark.parametrize("form", ["parquet", "tsv"])
def test_hrbench_has_the_authors_prompt_and_one_group_for_the_four_orders(tmp_path, form):
    rows = hrbench_rows()
    if form == "parquet":
        parquet(tmp_path / "hr_bench_4k.parquet", rows)
    else:
        with open(tmp_path / "hr_bench_4k.tsv", "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t")
            writer.writeheader()
            writer.writerows(rows)
    questions = load("hrbench-4k", tmp_path)
    assert questions[3].text == (
        "Question: Which number?\nOptions:\nA. 2\nB. 3\nC. 4\nD. 1\nPlease select the correct answer from the options above. \n"
    )
    assert questions[3].options == {"A": "2", "B": "3", "C": "4", "D": "1"}
    assert [q.answer for q in questions[::3]] == [("B",), ("A",), ("D",), ("C",)]
    assert questions[2].category == {"task": "cross", "cycle": "0"}
    groups = [q.group for q in questions]
    assert groups[:3] * 4 == groups and len(set(groups)) == 3, "two questions of the same words are two groups"
    assert "hr_bench_8k" in refusal("hrbench-8k", tmp_path)


# VisualProbe


def probe(root: Path, level: str) -> Path:
    folder = root / f"VisualProbe_{level}"
    rows = [{"doc_id": 3, "problem": "<image>\nWhat is on the bag?", "solution": "a cat"}]
    image = f"VisualProbe_{level}/data/1.jpg"
    picture(folder / "data/1.jpg")
    (folder / "val.json").write_text(json.dumps([{**row, "images": [image]} for row in rows]))
    return folder


def test_visualprobe_reads_its_three_parts_or_one(tmp_path):
    for level in ("Easy", "Medium", "Hard"):
        folder = probe(tmp_path, level)
    questions = load("visualprobe", tmp_path)
    assert [q.id for q in questions] == ["easy/3", "medium/3", "hard/3"]
    assert questions[0].text == "What is on the bag?"
    assert (questions[0].kind, questions[0].answer, questions[0].category) == (
        "short",
        ("a cat",),
        {"difficulty": "easy"},
    )
    assert [q.id for q in load("visualprobe", tmp_path, "hard")] == ["hard/3"]
    assert [q.id for q in load("visualprobe", folder)] == ["hard/3"]


def test_a_part_of_visualprobe_that_is_not_there_is_told_not_left_out(tmp_path):
    probe(tmp_path, "Easy")
    assert "VisualProbe_Medium is not there" in refusal("visualprobe", tmp_path)
