"""Numbers and picture of a run, from its metrics file."""

import json

import pytest
from PIL import Image

from opd_recipes.curve import Point, accuracy_curve, gap_closed, plot, record, summary


def metrics_file(tmp_path):
    lines = [
        {"step": 0, "data": {"val-core/toy@student/acc/mean@1": 0.5, "val-core/toy@teacher/acc/mean@1": 0.9}},
        {"step": 1, "data": {"opd/divergence": 0.1}},
        {"step": 2, "data": {"val-core/toy@student/acc/mean@1": 0.8, "val-core/toy@teacher/acc/mean@1": 0.88}},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "da')  # the last line is still being written
    return path


def test_curve_gap_and_summary_by_hand(tmp_path):
    points = accuracy_curve(metrics_file(tmp_path))
    assert points == [Point(0, 0.5, 0.9), Point(2, 0.8, 0.88)]
    assert gap_closed(points[0], points[-1]) == pytest.approx(0.75)
    assert summary(points, 6.2) == (
        "full 50% -> 80%, crop 90% -> 88%, gap 40 -> 8 points (75% of it closed by the student), 2 steps, 6 min"
    )


def test_no_file_yet(tmp_path):
    assert accuracy_curve(tmp_path / "none.jsonl") == []


def test_record_and_picture(tmp_path):
    points = accuracy_curve(metrics_file(tmp_path))
    run = record(points, seed=3, command="demo")
    assert {"seed", "command", "full_before", "full_after", "crop_before", "crop_after", "gap_closed"} < run.keys()
    plot([run, run], tmp_path / "a" / "plot.png", "title")
    with Image.open(tmp_path / "a" / "plot.png") as image:
        assert image.width > 600 and len(image.convert("RGB").getcolors(1 << 24)) > 10


def test_the_committed_results_are_the_demos():
    """Three seeds, at least 60% of the gap closed in each, the crop accuracy within 5 points."""
    from pathlib import Path

    runs = json.loads((Path(__file__).parents[2] / "docs" / "results" / "vision_opd_toy.json").read_text())
    assert len({run["seed"] for run in runs}) >= 3
    for run in runs:
        closed = (run["full_after"] - run["full_before"]) / (run["crop_before"] - run["full_before"])
        assert run["gap_closed"] == pytest.approx(closed) and closed >= 0.6
        assert run["crop_before"] >= 0.85 and run["crop_before"] - run["full_before"] >= 0.3
        assert run["crop_after"] >= run["crop_before"] - 0.05
