"""What ``benchmarks.soak`` computes from what it has seen."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks import soak
from benchmarks.soak import Fault, Life, Soak
from benchmarks.soak_report import MB, fit, growing, markdown, repetition, result, slopes, write, wrong
from benchmarks.soak_watch import Sample, Watch, Who, kind
from opd_recipes.runs import ProgressLine
from tests.unit.test_leftovers import Holder

#: A training without anything: 12 steps, a checkpoint after every third, which it goes on from.
TRAINING = """
import json, os, pathlib, sys, time
tracker = pathlib.Path(sys.argv[1]) / "latest_checkpointed_iteration.txt"
tracker.parent.mkdir(exist_ok=True)
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w", buffering=1) as file:
    for step in range(int(tracker.read_text()) + 1 if tracker.exists() else 1, 13):
        time.sleep(0.25)
        print(json.dumps({"step": step, "data": {"opd/divergence": 1 / step}}), file=file)
        if step % 3 == 0:
            tracker.write_text(str(step))
print("the end", flush=True)
"""


def test_a_common_slope_does_not_see_how_high_the_lines_are():
    slope, error = fit([[(0, 1), (10, 2)], [(5, 100), (15, 101)]])
    assert (slope, error) == (pytest.approx(0.1), pytest.approx(0, abs=1e-9))


def test_the_standard_error_of_a_slope():
    # By hand: slope 1/2, residuals 1/6, -1/3, 1/6, one degree of freedom, sum of squares of x 2.
    slope, error = fit([[(0, 0), (1, 1), (2, 1)]])
    assert (slope, error) == (pytest.approx(0.5), pytest.approx((1 / 6 / 2) ** 0.5))


def test_one_sample_of_each_process_says_nothing():
    assert fit([[(3, 1)], [(4, 2)]]) == (None, None)


def test_growth_is_of_one_process_after_the_warm_up():
    life = Life(1, metrics={step: {} for step in range(1, 101)})
    for step in (1, 20, 60, 100):
        one = [Sample(Who(pid, 0), "actor", 100 * MB * (step > 1) + step * MB, 0, 5, 1) for pid in (1, 2)]
        life.samples.append((0.0, step, 3, one))
    row = slopes([life], warm_up=15)["actor"]
    assert row["rss"]["per_100_steps"] == pytest.approx(100) and row["files"]["per_100_steps"] == 0
    assert (row["processes"], row["samples"]) == (2, 6)


@pytest.mark.parametrize(("slope", "error", "grows"), [(6, 1, True), (4, 1, False), (6, 4, False), (None, None, False)])
def test_what_clearly_grows_is_told(slope, error, grows):
    assert bool(growing({"actor": {"pss": {"per_100_steps": slope, "error": error}}})) is grows


def test_repeated_steps_are_compared_with_those_before():
    lives = [{1: {"opd/divergence": 1.0}, 2: {"opd/divergence": 2.0}}, {2: {"opd/divergence": 2.2}, 3: {}}]
    assert repetition(lives) == {"steps": 1, "largest_difference": pytest.approx(0.1)}
    assert repetition(lives[:1]) == {"steps": 0, "largest_difference": None}


def fault(**changes) -> Fault:
    return Fault(**{"kind": "actor", "at": 27, "checkpoint": 20, "time": 0.0, "resumed": 20, **changes})


NOTHING: dict = {"processes": [], "segments": {}, "sockets": [], "ray_session_megabytes": {"a": 1.0}}


@pytest.mark.parametrize(
    ("changes", "left", "told"),
    [
        ({}, {}, []),
        ({"resumed": 0}, {}, ["actor: went on after step 0, with a checkpoint of step 20"]),
        ({"resumed": None}, {}, ["actor: the run did not go on"]),
        ({"hung": True}, {}, ["actor: the run did not end by itself"]),
        ({"orphans": ["VLLM::EngineCore"]}, {}, ["actor: processes stayed: VLLM::EngineCore"]),
        ({}, {"sockets": ["/tmp/a"]}, ["left at the end: sockets ['/tmp/a']"]),
    ],
)
def test_what_must_not_be(changes, left, told):
    assert wrong([fault(**changes)], {**NOTHING, **left}) == told


def test_a_step_that_a_checkpoint_had_is_not_repeated():
    assert fault().repeated == 7


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("ray::WorkerDict.actor_update", "actor"),
        ("VLLM::EngineCore", "vLLM engine"),
        ("ray::IDLE", "Ray itself"),
        ("sh", "others"),
    ],
)
def test_a_process_is_known_by_its_title(title, name):
    assert kind(title) == name


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_a_process_is_followed_and_what_it_leaves_is_found(tmp_path):
    path = tmp_path / "psm_1"
    holder = Holder(path)
    watch = Watch(os.getpid())
    alive = watch.look()
    assert any(who.pid == holder.process.pid and "psm_1" in watch.known[who] for who in alive)
    (sample,) = [s for s in watch.measure(alive) if s.who.pid == holder.process.pid]
    assert 0 < sample.pss <= sample.rss and sample.files >= 3 and sample.sockets < sample.files
    watch.segments.add(str(path))
    assert watch.left_segments() == {str(path): pytest.approx(0, abs=8192)}
    holder.kill()
    assert all(who.pid != holder.process.pid for who in watch.look())


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_a_command_is_killed_and_started_again_until_it_is_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(soak, "SAMPLE_SECONDS", 0.1)
    checkpoints = tmp_path / "checkpoints"
    command = [sys.executable, "-S", "-E", "-c", TRAINING, str(checkpoints), "-m opd_recipes --config-name"]
    plan = [(4, "driver"), (8, "everything")]
    run = Soak(command, tmp_path, 12, plan, checkpoints, ProgressLine(), hang=20)
    run.run()
    found = result(run, run.finish(), "soak", "today")
    assert found["wrong"] == [] and found["starts"] == 3 and sorted(found["curve"]) == list(range(1, 13))
    first, second = found["faults"]
    for fault, named, step in ((first, "driver", 4), (second, "everything", 8)):
        assert (fault["kind"], fault["code"]) == (named, -9) and fault["at"] >= step
        assert fault["resumed"] >= fault["checkpoint"] >= step - 2 and fault["resumed"] % 3 == 0
        assert fault["repeated"] == fault["at"] - fault["resumed"] <= 3
    assert found["repetition"]["largest_difference"] in (0, None)
    write(found, tmp_path / "results")
    assert "| driver | " in (tmp_path / "results" / "soak.md").read_text() and "no process" in markdown(found)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_a_command_that_cannot_run_is_started_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "LOOK_SECONDS", 0.02)
    run = Soak([sys.executable, "-c", "raise SystemExit('no')"], tmp_path, 12, [], tmp_path, ProgressLine(), hang=20)
    with pytest.raises(SystemExit, match="1 and 2 ended by themselves"):
        run.run()
    assert result(run, [], "soak", "today")["wrong"][0] == "ended by itself at step 0: no"
