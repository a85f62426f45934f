"""A checkpoint's server: ``vllm serve`` (here a stand-in) is started where something is to be asked, and ended in any case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opd_recipes.eval.server import VllmServer, check_checkpoint, checkpoint_digest, serving
from opd_recipes.registry import RecipeError
from tests.unit.eval_helpers import evaluate, results, write_rows


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


def test_a_training_checkpoint_must_be_exported_first(tmp_path):
    shard = tmp_path / "global_step_4" / "actor" / "model_world_size_1_rank_0.pt"
    shard.parent.mkdir(parents=True)
    shard.touch()
    with pytest.raises(RecipeError, match=f"opd_recipes export {shard.parent}"):
        check_checkpoint(tmp_path / "global_step_4")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match="it has no config.json"):
        check_checkpoint(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").touch()
    with pytest.raises(RecipeError, match="it has no weights"):
        check_checkpoint(tmp_path / "empty")


def test_checkpoints_are_told_apart_by_their_weights(tmp_path):
    weights = bytearray(3 * 2**20)
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").write_text("{}")
    first = checkpoint_digest(tmp_path)
    assert checkpoint_digest(tmp_path) == first
    weights[-1] = 1
    (tmp_path / "model.safetensors").write_bytes(weights)
    second = checkpoint_digest(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert len({first, second, checkpoint_digest(tmp_path)}) == 3


def model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


#: A server that answers every question with A; its arguments are those of ``vllm serve``.
SERVER = """
import http.server, json, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(float(os.environ.get("ANSWER_AFTER", "0")))
        self.reply({"choices": [{"message": {"content": "Answer: A"}, "finish_reason": "stop"}]})
    def reply(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
print(os.getpid(), *sys.argv[1:], flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def beside_vllm(folder: Path) -> Path:
    """Where Python would be if :data:`SERVER` were vLLM."""
    (folder / "vllm").write_text(f"#!{sys.executable}\n{SERVER}")
    (folder / "vllm").chmod(0o755)
    return folder / "python"


def test_a_checkpoint_is_served_while_it_is_asked_and_known_by_its_weights(tmp_path, rows, monkeypatch, capsys):
    checkpoint, out = model(tmp_path / "step_400"), tmp_path / "out"
    python = beside_vllm(tmp_path)
    monkeypatch.setattr("opd_recipes.eval.server.sys.executable", str(python))
    named = ("--benchmarks", "custom", "--data", f"custom={rows}", "--checkpoint", checkpoint, "--serve-args=--seed 1")
    assert evaluate(out, *named) == 0
    log = (out / "vllm_serve.log").read_text()
    assert f"serve {checkpoint}" in log and "--served-model-name step_400" in log and "--seed 1" in log
    (tmp_path / "pid").write_text(log.split()[0])
    assert ended(tmp_path) and results(out)["scores"]["overall"] == 0.5
    settings = json.loads((out / "custom" / "settings.json").read_text())
    assert settings["model"] == "step_400" and settings["weights"] == checkpoint_digest(checkpoint)

    assert evaluate(out, *named) == 0
    assert (out / "vllm_serve.log").read_text() == log, "nothing is missing: no server is started"
    (checkpoint / "notes.md").write_text("no part of the model")
    assert evaluate(out, *named) == 0
    (checkpoint / "model.safetensors").write_bytes(b"others!")
    assert evaluate(out, *named) == 2 and "weights was" in capsys.readouterr().err


#: The command in a process of its own, with the stand-in of ``vllm``.
COMMAND = """
import argparse, sys
from opd_recipes.eval import commands, server
server.sys = argparse.Namespace(executable=sys.argv.pop(1))
parser = argparse.ArgumentParser()
commands.add_arguments(parser)
sys.exit(commands.run(parser.parse_args()))
"""


def test_the_server_ends_with_the_command_however_that_ends(tmp_path, rows):
    """Ctrl-C, a request to end, a kill; at the same time, as each takes a second to start."""
    checkpoint = model(tmp_path / "model")
    python = beside_vllm(tmp_path)
    runs = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        out = tmp_path / number.name
        named = ("--benchmarks", "custom", "--data", f"custom={rows}", "--checkpoint", checkpoint, "--out", out)
        command = [sys.executable, "-c", COMMAND, python, *named]
        runs[number] = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "ANSWER_AFTER": "60"},
        )
    for number, process in runs.items():
        log = tmp_path / number.name / "vllm_serve.log"
        asked = tmp_path / number.name / "custom" / "settings.json"
        deadline = time.monotonic() + 60
        while not asked.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        (tmp_path / "pid").write_text(log.read_text().split()[0])
        assert running(tmp_path)
        process.send_signal(number)
        _, told = process.communicate(timeout=30)
        assert ended(tmp_path), number.name
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
        assert b"run the same command again" in told or number != signal.SIGINT


def stand_in(tmp_path: Path, monkeypatch, script: str) -> Path:
    """A program in the place of ``vllm``."""
    program = tmp_path / "vllm.sh"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(VllmServer, "command", property(lambda self: [str(program), str(self._port)]))
    return program


def test_a_server_that_does_not_start_is_told_with_the_end_of_its_log(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "for i in $(seq 60); do echo line $i; done; echo out of memory >&2; exit 3")
    expected = "(?s)ended before it was ready.*line 60\n  out of memory"
    with pytest.raises(RecipeError, match=expected) as told, serving(tmp_path, "m", tmp_path / "log.txt"):
        pass
    assert "line 20\n" not in str(told.value) and "line 20\n" in (tmp_path / "log.txt").read_text()


def test_a_server_that_is_never_ready_is_ended(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "echo $$ > " + str(tmp_path / "pid") + "; exec sleep 60")
    with pytest.raises(RecipeError, match="not ready within 1 s"), serving(tmp_path, "m", tmp_path / "log", start_s=1):
        pass
    assert ended(tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_the_server_and_its_children_are_stopped_whatever_happens(tmp_path, monkeypatch, error):
    # Its child ignores the request to end.
    child = "(trap '' TERM; sleep 60) &"
    stand_in(tmp_path, monkeypatch, f"{child} echo $! > {tmp_path / 'pid'}; exec python3 -m http.server $1")
    pid = tmp_path / "pid"
    monkeypatch.setattr(
        "opd_recipes.eval.server._healthy", lambda port: pid.exists() and pid.read_text().endswith("\n")
    )
    with pytest.raises(error), serving(tmp_path, "m", tmp_path / "log"):
        assert running(tmp_path)
        raise error
    assert ended(tmp_path)


def ended(tmp_path: Path) -> bool:
    """A signal takes its time."""
    deadline = time.monotonic() + 5
    while running(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not running(tmp_path)


def running(tmp_path: Path) -> bool:
    """Whether the process of the file ``pid`` runs; one that has ended and was not fetched does not."""
    status = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
