"""Rows as the published Vision-OPD set has them, real photographs: converted by the command, trained for two steps."""

import pytest

from data_prep.__main__ import main as data_prep
from tests.e2e.runs import Run
from tests.photos import make_vision_opd_6k

pytestmark = pytest.mark.e2e


def test_converts_and_trains_two_steps(tmp_path):
    source = make_vision_opd_6k(tmp_path / "source")
    data_prep(["vision-opd-6k", "--source", str(source), "--out", str(tmp_path / "data"), "--val-fraction", "0.2"])
    run = Run(
        tmp_path,
        "photographs",
        tmp_path / "data",
        "data.max_prompt_length=256",
        "data.max_response_length=16",
        "actor_rollout_ref.rollout.max_model_len=288",
        "data.train_batch_size=4",
        "trainer.test_freq=2",
        "trainer.val_before_train=true",
        overlay="[cpu,toy,vision_opd_6k]",
    ).ok()
    assert sorted(run.steps) == [0, 1, 2]
    for step in (1, 2):
        metrics = run.steps[step]
        assert metrics["opd/divergence"] > 0 and metrics["opd/failed_rollouts"] == 0
        # Photographs of different sizes: prompts of different lengths on both sides.
        assert metrics["prompt_length/min"] < metrics["prompt_length/max"]
        assert metrics["opd/rollout_pearson"] >= 0.9999
    assert {"val-core/vision_opd_6k@student/acc/mean@1", "val-core/vision_opd_6k@teacher/acc/mean@1"} <= run.steps[
        2
    ].keys()
