"""``opd_recipes report``: what the command writes, and when."""

import argparse
import threading
import time

import pytest

from opd_recipes import report
from opd_recipes.report import command
from opd_recipes.report.page import build, render, write
from tests.report_run import OVERRIDES, STEPS, metrics, trace, write_config, write_metrics, write_run, write_traces
from tests.unit.test_report_page import bare_run


def arguments(*words):
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def run(*words):
    return report.run(arguments(*words))


def test_it_writes_the_page_beside_the_metrics_and_says_so(tmp_path, capsys):
    assert run(write_run(tmp_path / "run")) == 0
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "step 30, 0 warnings" in capsys.readouterr().out
    assert run(tmp_path / "run") == 0  # a page may be written over


@pytest.mark.parametrize(
    "out, reason", [("metrics.jsonl", "is no HTML page"), ("metrics.jsonl/a.html", "cannot be written")]
)
def test_nothing_but_a_page_is_written_over(tmp_path, out, reason, capsys):
    before = (bare_run(tmp_path) / "metrics.jsonl").read_bytes()
    assert run(tmp_path, "--out", tmp_path / out) == 2
    assert reason in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_folder_that_is_no_run_ends_with_a_reason(tmp_path, capsys):
    assert run(tmp_path / "none") == 2 and run(tmp_path) == 2
    assert "is not a folder" in (said := capsys.readouterr().err) and "has no metrics" in said


def test_the_page_is_replaced_whole(tmp_path, monkeypatch):
    made = build(bare_run(tmp_path))
    write(made, tmp_path / "a.html")
    before = (tmp_path / "a.html").read_text()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(Exception, match="disk full"):
        write(made, tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text() == before


def test_only_a_watched_page_loads_itself_again(tmp_path):
    assert 'data-refresh="5"' in render(build(bare_run(tmp_path)), refresh=5)
    assert "data-refresh" not in render(build(tmp_path))


def test_watching_waits_writes_whenever_the_run_does_and_ends_with_it(tmp_path, capsys):
    folder = tmp_path / "run"
    out = folder / "report.html"
    write_config(folder, "vision_opd", *OVERRIDES)  # a run that has just been started has this, and no step
    watcher = threading.Thread(target=run, args=(folder, "--watch", "0.1"), daemon=True)
    watcher.start()
    assert _until(lambda: "waiting: " in capsys.readouterr().out)
    entries = {step: metrics(step) for step in range(1, STEPS + 1)}
    write_metrics(folder / "metrics.jsonl", {1: entries[1]})
    assert _until(lambda: out.exists() and 'data-refresh="0.1"' in out.read_text())
    write_metrics(folder / "metrics.jsonl", entries)
    watcher.join(timeout=20)
    assert not watcher.is_alive()
    assert "data-refresh" not in out.read_text() and ", step 30</title>" in out.read_text()


def _until(holds, seconds=20):
    end = time.monotonic() + seconds
    while not (reached := holds()) and time.monotonic() < end:
        time.sleep(0.02)
    return reached


def test_the_page_itself_is_no_reason_to_write_again(tmp_path):
    bare_run(tmp_path)
    before = command.state(tmp_path)
    assert run(tmp_path) == 0 and command.state(tmp_path) == before
    write_traces(tmp_path, [trace("a", 1, [])], images=False)
    assert command.state(tmp_path) != before


@pytest.mark.parametrize("words", [["--watch", "0"], ["--rollouts", "-1"], ["--watch", "x"]])
def test_values_out_of_range_are_refused(tmp_path, words):
    with pytest.raises(SystemExit):
        arguments(tmp_path, *words)
