"""The toy scenes, the dataset written from them and the tiny base model that is shipped."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.__main__ import main
from data_prep.toy import dataset
from data_prep.toy.scenes import (
    COLOUR_JITTER,
    COLOURS,
    OBJECTS,
    QUESTION,
    SIDE,
    STUDENT_VIEW,
    TEACHER_VIEW,
    make_scene,
    scene_rng,
)
from opd_recipes.views import View

BASE = Path(dataset.__file__).parent / "base"
RED = (255, 0, 0)

student_view = View(STUDENT_VIEW)
teacher_view = View(TEACHER_VIEW)


@pytest.fixture(scope="module")
def scenes():
    return [make_scene(scene_rng("test", 0, index)) for index in range(64)]


def inside(inner, outer) -> bool:
    return inner[0] >= outer[0] and inner[1] >= outer[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def overlap(a, b) -> bool:
    return max(a[0], b[0]) < min(a[2], b[2]) and max(a[1], b[1]) < min(a[3], b[3])


def grown(box, margin):
    return (box[0] - margin, box[1] - margin, box[2] + margin, box[3] + margin)


def test_the_same_seed_draws_the_same_scene():
    first, again = (make_scene(scene_rng("test", 3, 7)) for _ in range(2))
    assert first.image.tobytes() == again.image.tobytes()
    assert (first.bbox, first.answer, first.objects) == (again.bbox, again.answer, again.objects)


@pytest.mark.parametrize("other", [("val", 0, 0), ("train", 1, 0), ("train", 0, 1)])
def test_stream_seed_and_index_each_change_the_scene(other):
    assert make_scene(scene_rng(*other)).image.tobytes() != make_scene(scene_rng("train", 0, 0)).image.tobytes()


def test_the_box_holds_its_object_and_no_other(scenes):
    for scene in scenes:
        subject, *others = scene.objects
        assert scene.image.size == (SIDE, SIDE) and scene.image.mode == "RGB"
        assert len(scene.objects) == OBJECTS
        assert scene.bbox == grown(subject.box, 4)
        assert inside(grown(scene.bbox, 2), (0, 0, SIDE, SIDE)), "the red box would leave the image"
        assert not any(overlap(grown(scene.bbox, 2), other.box) for other in others)


def test_the_object_box_is_tight_and_the_answer_is_its_colour(scenes):
    for scene in scenes:
        x0, y0, x1, y1 = scene.objects[0].box
        colour = scene.image.getpixel(((x0 + x1) // 2, (y0 + y1) // 2))
        wanted = COLOURS[scene.answer]
        assert all(abs(a - b) <= COLOUR_JITTER for a, b in zip(colour, wanted, strict=True))
        cut = scene.image.crop(scene.bbox)
        left, top, right, bottom = (4, 4, cut.width - 4, cut.height - 4)
        columns = [x for x in range(cut.width) if any(cut.getpixel((x, y)) == colour for y in range(cut.height))]
        rows = [y for y in range(cut.height) if any(cut.getpixel((x, y)) == colour for x in range(cut.width))]
        assert (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) == (left, top, right, bottom)


def test_no_scene_is_red_and_all_colours_occur(scenes):
    assert "red" not in COLOURS and len(COLOURS) == 7
    assert {scene.answer for scene in scenes} == set(COLOURS)


def test_views_show_the_whole_red_box(scenes):
    for scene in scenes:
        x0, y0, x1, y1 = grown(scene.bbox, 2)
        marked = student_view(scene.image, scene.bbox)
        edge = [(x, y) for x in (x0, x1 - 1) for y in range(y0, y1)]
        edge += [(x, y) for x in range(x0, x1) for y in (y0, y1 - 1)]
        assert all(marked.getpixel(point) == RED for point in edge)
        crop = teacher_view(scene.image, scene.bbox)
        assert crop.size == (96, 96)
        red, green, blue = np.moveaxis(np.asarray(crop, int), -1, 0)
        rows, columns = np.nonzero(red - np.maximum(green, blue) > 180)
        # Enlarged twice, give or take the resampling's soft edges; less would mean that a side is cut off.
        assert np.ptp(columns) + 1 == pytest.approx(2 * (x1 - x0), abs=2)
        assert np.ptp(rows) + 1 == pytest.approx(2 * (y1 - y0), abs=2)


def test_the_command_writes_verl_columns(tmp_path, capsys):
    import pyarrow.parquet as pq

    main(["toy", "--out", str(tmp_path), "--train", "6", "--val", "3", "--seed", "5"])
    assert "wrote 6 train and 3 val rows" in capsys.readouterr().out
    train = pq.read_table(tmp_path / "train.parquet").to_pylist()
    val = pq.read_table(tmp_path / "val.parquet").to_pylist()
    assert (len(train), len(val)) == (6, 3)
    for split, rows in (("train", train), ("val", val)):
        for index, row in enumerate(rows):
            scene = make_scene(scene_rng(split, 5, index))
            assert row == dataset.make_row(split, index, 5)
            assert row["data_source"] == "toy" and row["ability"] == "vqa"
            assert row["prompt"] == [{"role": "user", "content": "<image>" + QUESTION}]
            assert row["bbox"] == [float(v) for v in scene.bbox]
            assert row["reward_model"] == {"style": "rule", "ground_truth": scene.answer}
            assert row["extra_info"] == {"split": split, "index": index, "question": QUESTION, "answer": scene.answer}
            (image,) = row["images"]
            assert image["path"] is None
            assert Image.open(io.BytesIO(image["bytes"])).tobytes() == scene.image.tobytes()
    pixels = [row["images"][0]["bytes"] for row in train + val]
    assert len(set(pixels)) == len(pixels), "train and val share an image"


def test_the_command_is_repeatable_and_splits_do_not_depend_on_each_other(tmp_path):
    main(["toy", "--out", str(tmp_path / "a"), "--train", "4", "--val", "2"])
    main(["toy", "--out", str(tmp_path / "b"), "--train", "8", "--val", "2"])
    assert (tmp_path / "a/val.parquet").read_bytes() == (tmp_path / "b/val.parquet").read_bytes()
    assert dataset.make_row("train", 3, 0) == dataset.make_row("train", 3, 0)


@pytest.fixture(scope="module")
def base():
    """The shipped processor and model, loaded as a user would, on one thread."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield (
        transformers.AutoProcessor.from_pretrained(BASE, local_files_only=True),
        transformers.AutoModelForImageTextToText.from_pretrained(BASE, local_files_only=True),
    )
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("view", "tokens"), [(student_view, 36), (teacher_view, 9)], ids=["student", "teacher"])
def test_processor_gives_the_expected_image_tokens(base, scenes, view, tokens):
    from data_prep.toy.base_model import encode

    processor, _ = base
    inputs, is_answer = encode(processor, [view(s.image, s.bbox) for s in scenes[:2]])
    assert (inputs["input_ids"] == processor.image_token_id).sum(-1).tolist() == [tokens, tokens]
    assert not is_answer.any()


def test_answers_are_two_tokens_and_only_they_are_learned(base, scenes):
    from data_prep.toy.base_model import encode

    processor, _ = base
    pair = scenes[:2]
    inputs, is_answer = encode(processor, [student_view(s.image, s.bbox) for s in pair], [s.answer for s in pair])
    assert is_answer.sum(-1).tolist() == [2, 2]
    learned = processor.batch_decode([ids[mask] for ids, mask in zip(inputs["input_ids"], is_answer, strict=True)])
    assert learned == [s.answer + "<|im_end|>" for s in pair]


def test_base_vocabulary_and_special_tokens(base):
    processor, model = base
    tokenizer = processor.tokenizer
    assert model.config.text_config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert model.config.image_token_id == processor.image_token_id
    assert (BASE / "model.safetensors").stat().st_size < 5e6


def test_base_reads_crops_well_and_full_images_badly(base):
    from data_prep.toy.base_model import forced_accuracy

    processor, model = base
    record = json.loads((BASE / "base.json").read_text())
    scenes = [make_scene(scene_rng("val", record["seed"], index)) for index in range(record["val_scenes"])]
    full = forced_accuracy(model, processor, scenes, student_view)
    crop = forced_accuracy(model, processor, scenes, teacher_view)
    assert crop >= 0.85
    assert crop - full >= 0.30
    # Another machine's arithmetic may tip a scene or two.
    assert full == pytest.approx(record["val_full_accuracy"], abs=0.01)
    assert crop == pytest.approx(record["val_crop_accuracy"], abs=0.01)


@pytest.mark.parametrize("view", [student_view, teacher_view], ids=["student", "teacher"])
def test_the_quick_accuracy_is_that_of_generated_answers(base, scenes, view):
    from data_prep.toy.base_model import forced_accuracy, generated_accuracy

    processor, model = base
    assert forced_accuracy(model, processor, scenes, view) == generated_accuracy(model, processor, scenes, view)
