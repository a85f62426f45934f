"""A run's report: what is read of a run, which warnings it earns, how it differs from its paper, what is drawn."""

import math
import os
import re

import pytest

from opd_recipes.registry import RecipeError
from opd_recipes.report import settings as settings_module
from opd_recipes.report.accuracy import accuracies
from opd_recipes.report.chart import HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw, nice_ticks, tick_words
from opd_recipes.report.checks import alerts_of, split_step
from opd_recipes.report.curves import Chart, charts_of, thinned
from opd_recipes.report.reading import Run, merge, read_run
from opd_recipes.report.settings import differences, settings_of
from opd_recipes.report.words import number, percent, token
from tests import report_run
from tests.report_run import STEPS, metrics, write_config, write_metrics


def healthy(config=None, **changes):
    """A run of 30 steps that is in order but for ``changes``: a value, or a function of the step."""
    entries = {}
    for step in range(1, STEPS + 1):
        values = {key: value(step) if callable(value) else value for key, value in changes.items()}
        entries[step] = metrics(step, **values)
    return Run(folder="run", metrics=entries, config=config or {"opd": {"teacher": {"kind": "ema", "rate": 0.05}}})


# Reading


def test_null_is_not_a_number_and_a_line_that_is_being_written_is_none(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", {1: {"actor/loss": 1.5}, 2: {"actor/loss": math.nan}})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('no json\n{"step": 3, "data": {"actor/lo')
    run = read_run(tmp_path)
    assert list(run.metrics) == [1, 2] and run.metrics[1] == {"actor/loss": 1.5}
    assert math.isnan(run.metrics[2]["actor/loss"])
    assert run.odd_lines == 1


def test_a_resumed_run_has_the_later_values_and_nothing_of_the_abandoned_steps(tmp_path):
    first = write_metrics(tmp_path / "b_metrics.jsonl", {s: {"actor/loss": float(s), "x": 1.0} for s in range(1, 6)})
    second = write_metrics(tmp_path / "a_metrics.jsonl", {3: {"actor/loss": 30.0}, 4: {"actor/loss": 40.0}})
    os.utime(first, (1000, 1000))
    os.utime(second, (2000, 2000))
    run = read_run(tmp_path)
    assert run.series("actor/loss") == [(1, 1), (2, 2), (3, 30), (4, 40)]  # 5 was never reached again
    assert run.resumed == (3,)


def test_a_validation_of_its_own_takes_nothing_back():
    entries = [(1, {"train/loss": 1.0}), (2, {"train/loss": 0.5}), (0, {"val-core/a@full/acc/mean@1": 0.5})]
    merged, resumed = merge(entries)
    assert list(merged) == [0, 1, 2] and resumed == ()


@pytest.mark.parametrize(
    "files, reason",
    [
        ([], "has no metrics; train with 'trainer.logger=.console,file.'"),
        (["seed0/metrics.jsonl", "seed1/metrics.jsonl"], "several runs .seed0/metrics.jsonl, seed1/metrics.jsonl"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path, files, reason):
    for name in files:
        write_metrics(tmp_path / name, {1: {"actor/loss": 1.0}})
    with pytest.raises(RecipeError, match=reason):
        read_run(tmp_path)


def test_metrics_of_verls_default_place_are_found_and_traces_are_none(tmp_path):
    write_metrics(tmp_path / "opd_recipes" / "vision_opd.jsonl", {1: {"actor/loss": 1.0}})
    report_run.write_traces(tmp_path, [report_run.trace("a", 1, [])], images=False)
    assert read_run(tmp_path).last_step == 1


def test_named_files_are_read_in_their_order(tmp_path):
    late, early = (write_metrics(tmp_path / f"{n}.jsonl", {1: {"actor/loss": v}}) for n, v in (("a", 1.0), ("b", 2.0)))
    assert read_run(tmp_path, [early, late]).metrics[1]["actor/loss"] == 1.0


def test_a_damaged_configuration_is_said(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", {1: {"actor/loss": 1.0}})
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("a: [")
    with pytest.raises(RecipeError, match="config.yaml cannot be read"):
        read_run(tmp_path)


# Warnings


def test_a_healthy_run_has_no_warning():
    assert alerts_of(healthy()) == []


def test_the_first_two_steps_of_a_healthy_run_have_none():
    run = healthy()
    assert alerts_of(Run("run", {step: run.metrics[step] for step in (1, 2)}, run.config)) == []


def test_answers_of_one_word_may_all_have_the_longest_length():
    short = {"response_length__mean": 2.0, "response_length__max": 2.0, "response_length__clip_ratio": 1.0}
    assert alerts_of(healthy({"data": {"max_response_length": 2}}, **short)) == []


def bc(**opd):
    return {"opd": {"divergence": {"kind": "bc_reverse_kl", "support": "teacher", "topk": 100}, **opd}}


def teacher(**options):
    return {"opd": {"teacher": options}}


BROKEN = {
    "Values that are not finite": (
        None,
        {"opd__divergence": lambda s: math.nan if s in (4, 9) else 0.1},
        "at 2 steps; the first at step 4",
    ),
    "Skipped updates": (
        None,
        {"opd__skipped_updates": lambda s: min(s // 10, 1)},
        "1 updates in 30 steps .* at step 10",
    ),
    "Failed rollouts": (
        None,
        {"opd__failed_rollouts": lambda s: 2.0 * (s == 3)},
        "2 rollouts in 1 steps, the first at step 3",
    ),
    # 95% at step 10, then 75%: the gap closes, too.
    "The teacher's view gets worse": (
        None,
        {"val-core__toy@teacher__acc__mean@1": lambda s: 0.95 if s < 20 else 0.75},
        r"fell from 95% \(step 1\) to 75% \(step 30\), -20.0 points; the gap went from",
    ),
    "The student's entropy has collapsed": (
        None,
        {"opd__entropy": lambda s: 0.6 / s**2},
        "0.272 nats per token at the start, 0.000715 now",
    ),
    "Responses have become almost empty": (
        None,
        {"response_length__mean": lambda s: 100 if s < 15 else 1},
        "100 tokens .* 1 now",
    ),
    "Responses run into the limit": (None, {"response_length__clip_ratio": lambda s: s / 30}, "96.7% of the responses"),
    "Response length drifts": (None, {"response_length__mean": lambda s: 100 + 10 * s}, "3.25 times as long"),
    "Much of the student lies outside the compared tokens": (
        None,
        {"opd__student_mass": 0.85, "opd__teacher_mass": 0.85},
        "85%",
    ),
    # The correction, sum of teacher - student over the kept ids, is the difference of the masses.
    "The bias correction is large": (bc(), {"opd__student_mass": 0.92, "opd__teacher_mass": 0.98}, "0.06"),
    "Importance weights are truncated": (None, {"opd__importance_capped": 0.05}, "^5% of the tokens"),
    # 1 - 0.999^30 = 2.96%; in 30 steps with 0.05 it would be 78.5%.
    "The teacher hardly moves": (teacher(kind="ema", rate=0.001), {}, r"3.0% the student's weights after 30 updates"),
    "The teacher follows at once": (teacher(kind="ema", rate=0.95), {}, "rate=0.95"),
    "The teacher never moves": (teacher(kind="progressive", every=50), {}, "every=50, and the run has 30 steps"),
    # 29 steps of 11 s with 5 s of model time, and three validations of 2 s more: 180 of 325 s, 166.5 of them unnamed.
    "Most of the time trains nothing": (None, {"timing_s__step": 11.0}, "55% of the time .* other 51%"),
}


@pytest.mark.parametrize("title", BROKEN)
def test_each_fault_has_its_warning_with_numbers_and_advice(title):
    config, changes, numbers = BROKEN[title]
    found = alerts_of(healthy(config, **changes))
    assert [alert.title for alert in found] == [title]
    assert re.search(numbers, found[0].numbers), found[0].numbers
    assert found[0].meaning and found[0].action


def test_many_skipped_updates_mean_a_teacher_that_has_not_moved():
    run = healthy(opd__skipped_updates=float, actor__grad_norm=math.nan)
    assert [alert.title for alert in alerts_of(run)] == ["Skipped updates", "The teacher hardly moves"]


def test_the_correction_is_that_of_one_divergence_alone():
    masses = {"opd__student_mass": 0.92, "opd__teacher_mass": 0.98}
    assert alerts_of(healthy({"opd": {"divergence": {"kind": "jsd"}}}, **masses)) == []


def test_a_step_is_split_into_its_parts_and_validation_comes_behind_it():
    parts = split_step(
        {"timing_s/step": 10.0, "timing_s/gen": 4.0, "timing_s/update_actor": 5.0, "timing_s/testing": 20.0}
    )
    assert parts == {"gen": 4.0, "update_actor": 5.0, "other": 1.0, "testing": 20.0}


# Settings


def test_settings_that_differ_stand_first_where_they_change_what_is_trained(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", {1: {"actor/loss": 1.0}})
    write_config(tmp_path, "vision_opd", *report_run.OVERRIDES)
    found = settings_of(read_run(tmp_path))
    assert found.recipe == "vision_opd"
    assert [(c.key, c.paper, c.run) for c in found.training] == [
        ("opd.teacher.rate", "0.05", "0.1"),  # and not actor_rollout_ref.opd.teacher.rate, which only follows it
        ("trainer.total_training_steps", "null", "30"),
    ]
    assert [(c.key, c.run) for c in found.machine] == [("trainer.default_local_dir", "/runs/a")]


def test_a_run_as_in_the_paper_differs_in_nothing(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", {1: {"actor/loss": 1.0}})
    write_config(tmp_path, "vision_opd")
    found = settings_of(read_run(tmp_path))
    assert (found.training, found.machine) == ((), ())


def test_verls_paths_of_examples_are_not_shown_as_the_papers(tmp_path):
    write_metrics(tmp_path / "metrics.jsonl", {1: {"actor/loss": 1.0}})
    write_config(tmp_path, "vision_opd", "data.train_files='~/mine.parquet'")
    (change,) = settings_of(read_run(tmp_path)).training
    assert (change.key, change.paper, change.run) == ("data.train_files", "not set", "~/mine.parquet")


def test_every_recipe_is_known():
    assert {"vision_opd", "rp_opsd", "opd_v", "bas_opd", "opsd", "grpo", "sft"} <= settings_module.known_recipes()


def test_what_differs_is_shown_as_in_yaml_and_secrets_are_not():
    paper = {"a": True, "b": 1, "empty": {}, "same": 1.0, "api_key": "one", "max_token_len": 3}
    run = {"a": None, "b": 1.0, "empty": {"x": 2}, "same": 1.0, "api_key": "two", "max_token_len": 4}
    shown = {change.key: (change.paper, change.run) for change in differences(paper, run)}
    assert shown == {
        "a": ("true", "null"),
        "b": ("1", "1.0"),
        "empty.x": ("not set", "2"),
        "api_key": ("(not shown)", "(not shown)"),
        "max_token_len": ("3", "4"),
    }
    environment = {"ray_init": {"runtime_env": {"env_vars": {"ANY_NAME": "hf_abc"}}}}
    assert "hf_abc" not in str(differences({}, environment))


@pytest.mark.parametrize(
    "config, recipe, reason",
    [
        (None, None, "no configuration"),
        ({"a": 1}, None, "its name is not known"),
        ({"a": 1}, "../mine", "'../mine' is not one"),
    ],
)
def test_why_nothing_is_compared_is_said(config, recipe, reason):
    found = settings_of(Run("run", {1: {}}, config, recipe))
    assert found.recipe is None and reason in found.reason


# Accuracy and curves


def test_accuracy_and_gap_by_data_source_and_view():
    entries = {}
    for step, full, crop in ((0, 0.5, 0.9), (10, 0.7, 0.8)):
        entries[step] = {
            "val-core/org/set@student/acc/mean@1": full,
            "val-core/org/set@teacher/acc/mean@1": crop,
            "val-core/b@half/acc/mean@1": 0.25,
            "val-core/org/set@student/acc/best@8/mean": 1.0,
        }
    half, found = accuracies(Run("run", entries))
    assert (found.source, found.of, list(found.views)) == ("org/set", " on org/set", ["student", "teacher"])
    assert found.gap == [(0, pytest.approx(0.4)), (10, pytest.approx(0.1))]
    assert found.closed == pytest.approx(0.5)  # (0.7 - 0.5) / (0.9 - 0.5); the crop's fall does not count
    assert half.gap == [] and half.closed is None


def test_a_metric_that_a_run_lacks_has_no_chart():
    titles = [chart.title for chart in charts_of(Run("run", {1: {"train/loss": 1.0, "train/lr": 0.1}}))]
    assert titles == ["Loss", "Learning rate"]
    assert "Selected" not in [chart.title for chart in charts_of(healthy())]
    assert "Selected" in [chart.title for chart in charts_of(healthy(selection__share=0.25))]


def test_a_metric_that_was_never_a_number_has_no_chart():
    assert charts_of(Run("run", {1: {"actor/loss": math.nan}})) == []


def test_parts_of_a_step_add_up_to_its_time():
    (chart,) = [chart for chart in charts_of(healthy()) if chart.stacked]
    assert [name for name, _ in chart.series] == ["rollouts", "update", "weight sync", "validation", "other"]
    sums = {step: sum(dict(points)[step] for _, points in chart.series) for step in (1, 10)}
    assert sums == {1: pytest.approx(5.5), 10: pytest.approx(7.5)}


def test_a_long_run_is_drawn_by_means():
    chart = thinned(Chart("a", "b", [("c", [(step, float(step)) for step in range(1, 1001)])]))
    (_, points) = chart.series[0]
    assert chart.bucket == 5 and len(points) == 200
    assert points[0] == (5, 3.0) and points[-1] == (1000, 998.0)


def test_a_point_is_where_it_belongs():
    drawing = draw(Chart("a", "b", [("c", [(0, 0.0), (5, 10.0), (10, math.nan), (20, 5.0), (30, 5.0)])]), (0, 40))
    assert [tick.label for tick in drawing.y] == ["0.0", "2.5", "5.0", "7.5", "10.0"]
    right, bottom = WIDTH - RIGHT, drawing.y[0].place
    assert bottom == HEIGHT - 36 and drawing.y[-1].place == TOP
    assert drawing.places == [LEFT + share * (right - LEFT) for share in (0, 0.125, 0.25, 0.5, 0.75)]
    # Not a number interrupts the line; it is no 0.
    middle = (bottom + TOP) / 2
    assert drawing.lines[0].paths == [f"M62 {bottom:g}L112.5 {TOP:g}", f"M264 {middle:g}L365 {middle:g}"]
    assert drawing.rows[2] == (10, ["not finite"])
    assert "not finite at 1 steps" in drawing.text


def test_parts_are_stacked():
    drawing = draw(Chart("a", "s", [("x", [(1, 3.0)]), ("y", [(1, 1.0)])], stacked=True), (1, 1))
    (lower,), (upper,) = drawing.lines[0].paths, drawing.lines[1].paths
    height = HEIGHT - 36 - TOP
    assert drawing.y[-1].label == "4"
    assert f"V{TOP + height / 4:g}" in lower and lower.endswith(f"V{HEIGHT - 36}z")  # three quarters of the height
    assert f"V{TOP}h" in upper and upper.endswith(f"V{TOP + height / 4:g}z")


def test_ticks_are_round_and_told_apart():
    assert nice_ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert nice_ticks(0.55, 0.95) == [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert nice_ticks(5, 5)[0] < 5 < nice_ticks(5, 5)[-1]
    assert nice_ticks(0, 0)[0] < nice_ticks(0, 0)[-1]
    assert [tick_words(tick, 0.25, False) for tick in (0.0, 0.25)] == ["0.00", "0.25"]
    assert [tick_words(tick, 0.025, True) for tick in (0.9, 0.925)] == ["90.0%", "92.5%"]
    assert tick_words(5e-7, 5e-7, False) == "5e-07" and tick_words(2000, 500, False) == "2,000"


def test_numbers_are_short():
    assert [number(x) for x in (0, 1984.0, 0.14149, 2e-6, 1234567.0, math.nan)] == [
        "0", "1,984", "0.141", "2.00e-06", "1.23e+06", "not finite",
    ]  # fmt: skip
    assert [percent(x) for x in (0.5, 0.918, 0.9993, 0.003, 1.0)] == ["50%", "91.8%", "99.9%", "0.3%", "100%"]


def test_white_space_of_a_token_is_visible():
    assert [token(x) for x in (" a", "\n", "\t", "", "\u202e")] == ["·a", "⏎", "⇥", "∅", "\\u202e"]
