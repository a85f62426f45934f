"""``opd_recipes gap``: the same questions on both views of the recipe, paired, for each model."""

from __future__ import annotations

import argparse
import io
import json
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.__main__ import main as data_prep
from data_prep.toy.dataset import make_row
from opd_recipes.eval import gap_command
from opd_recipes.eval.gap import Source, model_folder, sources_of, viewed
from opd_recipes.eval.gap_page import gap_closed
from opd_recipes.eval.question import ImageSource, Question
from opd_recipes.images import RowImages, decode
from opd_recipes.registry import RecipeError
from opd_recipes.views import View
from tests.unit.synthesize_server import FakeServer, Say, images_of

ROWS = 8


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    data_prep(["toy", "--out", str(folder), "--train", "1", "--val", str(ROWS)])
    return folder / "val.parquet"


#: Composing a configuration takes a second: once is enough.
composed = cache(gap_command.recipe_views)


@pytest.fixture(autouse=True)
def views(monkeypatch) -> dict[str, View]:
    monkeypatch.setattr(gap_command, "recipe_views", composed)
    return composed("vision_opd", "toy")


def measure(out: Path, rows: Path, *options) -> int:
    parser = argparse.ArgumentParser()
    gap_command.add_arguments(parser)
    given = ("--data", rows, "--out", out, "--overlay", "toy", "--attempts", 1, "--concurrency", 1, *options)
    return gap_command.run(parser.parse_args([str(option) for option in given]))


class Model:
    """Right on every crop (96 pixels), and on the full image of the first ``knows`` rows."""

    def __init__(self, views: dict[str, View], knows: int):
        made = [make_row("val", number, 0) for number in range(ROWS)]
        self.answers: dict[bytes, str] = {}
        for number, row in enumerate(made):
            source = RowImages(row["images"], row["bbox"])
            for name, view in views.items():
                known = name == "crop" or number < knows
                self.answers[source.render(view)[-1].tobytes()] = (
                    row["reward_model"]["ground_truth"] if known else "black"
                )

    def server(self) -> FakeServer:
        server = FakeServer(lambda *_: Say(self.answers[images_of(server.bodies[-1])[-1].convert("RGB").tobytes()]))
        return server


def test_the_views_are_the_recipes_own_pixel_for_pixel_and_the_gap_is_paired(tmp_path, rows, views):
    # A picture that training does not draw like this has no answer: the model would not know it.
    with Model(views, knows=2).server() as server:
        assert measure(tmp_path, rows, "--server", server.url, "--model", "m") == 0
    assert server.calls == 2 * ROWS
    (point,) = json.loads((tmp_path / "gap.json").read_text())["points"]
    assert (point["full"]["accuracy"], point["crop"]["accuracy"], point["questions"]) == (0.25, 1.0, ROWS)
    difference = point["gap"]["differences"]["overall"]
    assert difference["value"] == 0.75 and 0.25 <= difference["low"] < 0.75 < difference["high"] <= 1
    assert (point["gap"]["only_b"], point["gap"]["only_a"]) == (6, 0)
    assert "| m | 25.00 |" in (tmp_path / "gap.md").read_text()
    assert Image.open(tmp_path / "gap.png").size == (1050, 630)


def test_a_second_run_asks_nothing_and_other_views_are_refused(tmp_path, rows, views, capsys):
    with Model(views, knows=2).server() as server:
        named = ("--server", server.url, "--model", "m")
        measure(tmp_path, rows, *named)
        assert measure(tmp_path, rows, *named) == 0
        assert measure(tmp_path, rows, *named, "--overlay", "toy,toy_rp_opsd") == 2
        assert server.calls == 2 * ROWS
    assert "view was" in capsys.readouterr().err


def test_a_question_that_fails_in_one_view_leaves_the_pair_out_and_is_told(tmp_path, rows, views, capsys):
    with Model(views, knows=2).server() as server:
        good = server.script
        server.script = lambda stage, prompt, number: Say(status=400) if number == 0 else good(stage, prompt, number)
        assert measure(tmp_path, rows, "--server", server.url, "--model", "m") == 1
    (point,) = json.loads((tmp_path / "gap.json").read_text())["points"]
    assert point["failed"] == {"full": 1, "crop": 0} and point["gap"]["n"] == ROWS - 1
    assert "1 questions have no reply" in capsys.readouterr().err


def test_nothing_answered_is_no_gap(tmp_path, rows, capsys):
    with FakeServer(lambda *_: Say(status=404)) as server:
        assert measure(tmp_path, rows, "--server", server.url, "--model", "m") == 2
    assert "no question has a reply in both views" in capsys.readouterr().err and "404" not in str(tmp_path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((), "name who answers"),
        (("--server", "http://h/v1", "--model", "m", "--run", "x"), "either --server"),
        (("--run", "nowhere"), "it has no global_step_*"),
        (("--checkpoint", "nowhere"), "no such folder"),
        (
            ("--server", "http://h/v1", "--model", "m", "--overlay", "vision_opd_6k"),
            "provided",
        ),
        (
            ("--server", "http://h/v1", "--model", "m", "--config-name", "grpo", "--overlay", "toy_grpo"),
            "it has no views",
        ),
    ],
)
def test_what_cannot_be_measured_is_told(tmp_path, rows, capsys, options, told):
    assert measure(tmp_path / "out", rows, *options) == 2
    assert told in capsys.readouterr().err


def test_a_row_without_a_box_is_told_before_anything_is_asked(tmp_path, capsys):
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"id": "q", "question": "What?", "answer": "red", "images": ["x.png"]}) + "\n")
    with FakeServer() as server:
        assert measure(tmp_path / "out", data, "--server", server.url, "--model", "m") == 2
    assert "'q' has no box" in capsys.readouterr().err and server.calls == 0


def test_a_box_outside_of_its_picture_is_told_with_its_question(tmp_path, capsys):
    Image.new("RGB", (64, 64)).save(tmp_path / "x.png")
    row = {"id": "q", "question": "What?", "answer": "red", "images": ["x.png"], "bbox": [60, 60, 90, 90]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with FakeServer() as server:
        assert measure(tmp_path / "out", tmp_path / "rows.jsonl", "--server", server.url, "--model", "m") == 2
    assert "question 'q'" in capsys.readouterr().err and server.calls == 0


def test_only_the_last_image_is_cropped(views):
    noise = random.Random(0)
    pictures = [Image.frombytes("RGB", (192, 192), noise.randbytes(192 * 192 * 3)) for _ in range(2)]
    sources = tuple(ImageSource(png(picture)) for picture in pictures)
    question = Question("q", sources, "?", "short", ("x",), bbox=(60.0, 60.0, 84.0, 84.0))
    (shown,) = viewed(iter([question]), views["crop"], "crop")
    first, last = (np.asarray(decode({"bytes": image.read()})) for image in shown.images)
    assert (first == np.asarray(pictures[0])).all() and last.shape == (96, 96, 3)
    (bare,) = viewed(iter([question.without_images()]), views["crop"], "crop")
    assert bare.images == ()


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


# Which models


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def training(run: Path, step: int) -> Path:
    actor = run / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    (actor / "model_world_size_1_rank_0.pt").write_text(str(step))
    return actor


def test_models_are_ordered_by_their_steps_which_names_and_options_tell(tmp_path):
    base, late, early = (
        model(tmp_path / "base"),
        model(tmp_path / "step_400"),
        model(tmp_path / "global_step_20" / "hf"),
    )
    found = sources_of([str(late), f"0={base}", str(early)], None)
    assert [(source.step, source.label) for source in found] == [(0, "step_0"), (20, "step_20"), (400, "step_400")]
    unknown = sources_of([str(late), str(base)], None)
    assert [source.label for source in unknown] == ["step_400", "base"], "as named, where a step is not known"


def test_a_run_gives_all_of_its_checkpoints(tmp_path):
    run = tmp_path / "run"
    for step in (100, 20):
        training(run / "checkpoints", step)
    found = sources_of([f"0={model(tmp_path / 'base')}"], run)
    assert [(source.step, source.training) for source in found] == [(0, False), (20, True), (100, True)]


def test_two_models_of_one_name_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="two checkpoints are called base"):
        sources_of([str(model(tmp_path / "a" / "base")), str(model(tmp_path / "b" / "base"))], None)


def test_a_training_checkpoint_is_exported_while_it_is_asked_and_not_kept(tmp_path, monkeypatch):
    actor = training(tmp_path / "run", 20)
    calls = []

    def export(checkpoint: Path, target: Path, *, which: str) -> None:
        calls.append((checkpoint, which))
        model(target)

    monkeypatch.setattr("opd_recipes.export.export", export)
    source = Source("step_20", 20, actor)
    (tmp_path / "exports" / "step_20").mkdir(parents=True)  # what a kill has left
    with pytest.raises(KeyboardInterrupt), model_folder(source, tmp_path / "exports", "teacher") as folder:
        assert folder is not None and (folder / "config.json").exists()
        raise KeyboardInterrupt
    assert calls == [(actor, "teacher")] and not list((tmp_path / "exports").iterdir())


def test_how_much_of_the_gap_is_closed():
    def point(full: float, crop: float) -> dict:
        return {"full": {"accuracy": full}, "crop": {"accuracy": crop}}

    assert gap_closed([point(0.5, 0.9), point(0.7, 0.8)]) == pytest.approx(0.5)
    assert gap_closed([point(0.5, 0.9)]) is None and gap_closed([point(0.5, 0.5), point(0.6, 0.5)]) is None
