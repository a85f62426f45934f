"""``eval`` and ``gap`` with the tiny model behind a real ``vllm serve``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main as data_prep
from opd_recipes.eval import commands, gap_command

pytestmark = pytest.mark.e2e

ROWS = 48
#: The command in a process of its own, which can be killed.
COMMAND = [
    sys.executable,
    "-c",
    "import argparse, sys; from opd_recipes.eval import commands; parser = argparse.ArgumentParser();"
    "commands.add_arguments(parser); sys.exit(commands.run(parser.parse_args()))",
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    data_prep(["toy", "--out", str(folder), "--train", "1", "--val", str(ROWS)])
    return folder / "val.parquet"


@pytest.fixture(scope="module")
def crops(rows) -> Path:
    """The rows with the teacher's view as their image."""
    target = rows.parent / "crops.parquet"
    data_prep(["render", "--data", str(rows), "--out", str(target), "--view", "teacher", "--overlay", "toy"])
    return target


@pytest.fixture(scope="module")
def pope(rows) -> Path:
    """Toy scenes in POPE's layout."""
    folder = rows.parent / "pope"
    folder.mkdir()
    images = pq.read_table(rows, columns=["images"]).slice(0, 3)["images"].to_pylist()
    for number, (image,) in enumerate(images):
        (folder / f"{number}.png").write_bytes(image["bytes"])
    for split in ("random", "popular", "adversarial"):
        questions = [
            {"question_id": n, "image": f"{n}.png", "text": "Is there a dog in the image?", "label": "no"}
            for n in range(3)
        ]
        (folder / f"coco_pope_{split}.json").write_text("".join(json.dumps(question) + "\n" for question in questions))
    return folder


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def call(command, options: list) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(option) for option in options]))


@pytest.fixture(scope="module")
def evaluated(url, crops, pope, tmp_path_factory) -> Path:
    """Both sets asked; killed on the way, and started again with the same command."""
    out = tmp_path_factory.mktemp("eval")
    options = ["--benchmarks", "custom,pope", "--data", f"custom={crops}", "--data", f"pope={pope}", "--out", out]
    options += ["--server", url, "--model", "tiny", "--max-tokens", 8]
    command = [*COMMAND, *(str(option) for option in [*options, "--concurrency", 1])]
    with (out / "killed.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    replies, deadline = out / "custom" / "replies.jsonl", time.monotonic() + 120
    while not (replies.exists() and len(lines(replies)) >= 5):
        assert process.poll() is None and time.monotonic() < deadline, (out / "killed.txt").read_text()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with replies.open("ab") as file:
        file.write(b'{"key": "a line that the kill has torn')
    before = lines(replies)
    assert 5 <= len(before) < ROWS and not (out / "results.json").exists()
    assert call(commands, options) == 0
    assert lines(replies)[: len(before)] == before and len(lines(replies)) == ROWS
    return out


def test_a_killed_run_goes_on_and_every_question_has_one_reply(evaluated):
    replies = lines(evaluated / "custom" / "replies.jsonl")
    assert len({reply["key"] for reply in replies}) == len(replies) == ROWS
    assert all(reply["prompt_tokens"] > 0 and reply["completion_tokens"] > 0 for reply in replies)
    assert len(lines(evaluated / "pope" / "replies.jsonl")) == 9


def test_the_tiny_model_reads_colours_from_crops(evaluated):
    found = json.loads((evaluated / "results.json").read_text())["custom"]
    assert found["scores"]["overall"] > 0.8 and found["scores"]["n"] == ROWS and found["failed"] == 0
    assert found["intervals"]["overall"]["low"] > 0.5


def test_what_it_says_about_dogs_is_undecided_not_guessed(evaluated):
    """It has learned names of colours, so neither yes nor no."""
    found = json.loads((evaluated / "results.json").read_text())["pope"]
    assert found["scores"]["undecided"] == found["scores"]["n"] == 9
    assert sum(found["undecided_reasons"].values()) == 9 and "| pope |" in (evaluated / "results.md").read_text()


def test_the_gap_of_the_base_model_and_the_crop_as_it_is_evaluated(url, rows, evaluated, tmp_path):
    options = [
        "--data",
        rows,
        "--overlay",
        "toy",
        "--out",
        tmp_path,
        "--server",
        url,
        "--model",
        "tiny",
        "--max-tokens",
        8,
    ]
    assert call(gap_command, options) == 0
    (point,) = json.loads((tmp_path / "gap.json").read_text())["points"]
    assert point["crop"]["accuracy"] > point["full"]["accuracy"] and point["gap"]["differences"]["overall"]["low"] > 0
    assert (tmp_path / "gap.png").stat().st_size > 10_000
    # The same pixels and words through another door: the replies are the same.
    rendered = [line["text"] for line in lines(evaluated / "custom" / "replies.jsonl")]
    drawn = [line["text"] for line in lines(tmp_path / "tiny" / "crop" / "replies.jsonl")]
    assert sorted(rendered) == sorted(drawn)
