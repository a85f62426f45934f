"""The benchmarks' plain side computes what ours does, and the report says what was measured."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import engines, growth, head, model, report
from benchmarks.head import Size
from benchmarks.measure import alternate, peak_memory, ratios, spread
from tests import reference
from tests.unit.test_engine import process_group  # noqa: F401  puts back what verl replaces in transformers

SMALL = Size(vocabulary=53, prompt=12, response=9, hidden=16, topk=7, chunk=4)


def test_the_plain_head_gives_the_loss_and_gradients_of_ours():
    given = head.inputs(SMALL)
    found = {}
    for side, run in head.SIDES.items():
        head.fresh(given)
        found[side] = [run(SMALL, given), given["hidden"].grad, given["weight"].grad]
    for plain, ours in zip(found["plain"], found["ours"], strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-4)


def test_the_plain_head_gives_the_loss_of_the_formula():
    given = head.inputs(SMALL)
    index, weights = given["index"], (given["weight"].double(), given["teacher_weight"].double())
    states = (given[name].double()[0][index] for name in ("hidden", "teacher_hidden"))
    student, teacher = (x @ weight.T for x, weight in zip(states, weights, strict=True))
    row = {"student": student.detach(), "teacher": teacher, "labels": given["labels"]}
    row |= {"mask": torch.ones(9), "rollout": given["rollout_log_probs"].double()}
    assert head.run_plain(SMALL, given).item() == pytest.approx(reference.loss([row], k=7).item(), rel=1e-4)


def test_only_the_plain_head_grows_with_the_prompt():
    """4 KiB of logits per position, 8192 prompt tokens: 32 MiB for each of the three copies that the plain way makes."""
    size = Size(vocabulary=1024, prompt=8192, response=16, hidden=8, topk=7, chunk=8)
    peaks = {side: head.measure_peak({"side": side, **vars(size)})["bytes"] for side in head.SIDES}
    assert peaks["plain"] > 2.5 * 32 * 2**20
    assert peaks["ours"] < 16 * 2**20


def test_the_plain_update_has_the_loss_of_the_engines(tmp_path):
    rows = engines.Rows(count=2, image=(4, 6), teacher_image=(2, 3), response=8, micro_rows=1)
    model = engines.make_model(tmp_path, engines.Shape(512, 64, 128, 2, 2, 1, vision_hidden=32, vision_depth=2))
    batch = engines.make_rows(rows)
    ours, plain = engines.ours(model, rows)(batch), engines.plain_update(model, rows)(batch)
    assert plain > 0
    assert ours["loss"] == pytest.approx(plain, rel=1e-3)


def test_rows_of_a_prompt_share_image_and_question_but_not_the_answer():
    rows = engines.Rows(count=5, rollouts=2, image=(2, 3), teacher_image=(2, 2), text=4, response=6)
    made = engines.make_rows(rows)
    pixels = [row["multi_modal_inputs"]["pixel_values"] for row in made]
    same = [[torch.equal(a, b) for b in pixels] for a in pixels]
    assert same == [[i // 2 == j // 2 for j in range(5)] for i in range(5)]
    assert torch.equal(made[0]["input_ids"][:-6], made[1]["input_ids"][:-6])
    assert not torch.equal(made[0]["responses"], made[1]["responses"])


def test_the_plain_model_gives_the_loss_and_gradients_of_ours():
    sides = {name: side(model.TINY) for name, side in model.SIDES.items()}
    losses = {name: run() for name, run in sides.items()}
    assert losses["plain"] > 0
    torch.testing.assert_close(losses["ours"], losses["plain"], rtol=1e-4, atol=0)
    expected = dict(sides["plain"].student.named_parameters())
    scale = max(p.grad.abs().max().item() for p in expected.values())
    for name, parameter in sides["ours"].student.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-5 * scale)


def test_the_models_rows_need_neither_verl_nor_vllm():
    """As on a machine that has torch and transformers alone: every package that only a run needs is refused."""
    refused = ("verl", "vllm", "ray", "transfer_queue", "tensordict", "hydra", "omegaconf", "peft")
    script = (
        f"import json, sys; sys.modules.update(dict.fromkeys({refused}))\n"
        "from benchmarks import model\n"
        # Not in a process of its own, but by way of what one would get.
        "model.in_child = lambda module, settings: model.measure_peak(json.loads(json.dumps(settings)))\n"
        "print(model.measure(model.TINY, 1, print)['seconds'].keys())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "dict_keys(['plain', 'ours'])"


def test_peak_memory_is_what_was_alive_at_once():
    megabyte = 2**20
    with peak_memory("cpu") as peak:
        for _ in range(3):
            block = torch.ones(64 * megabyte // 4)
            del block
    assert 60 * megabyte < peak.bytes < 100 * megabyte


def test_peak_memory_counts_what_comes_from_the_allocators_store():
    megabyte = 2**20
    # Of some of these, freed, glibc's heap keeps what the next block can come from.
    for size, count in (31, 1), (16, 4), (16, 4), (1, 200), (1, 200), (0.1, 2000), (0.1, 2000):
        blocks = [torch.ones(int(size * megabyte) // 4) for _ in range(count)]
        del blocks
        with peak_memory("cpu") as peak:
            block = torch.ones(40 * megabyte // 4)
            del block
        assert peak.bytes > 39 * megabyte


def test_sides_take_turns_after_one_unmeasured_run():
    calls = []
    seconds = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
    assert "".join(calls) == "ab" * 3
    assert [len(seconds[side]) for side in "ab"] == [2, 2]


def test_spread_of_neighbouring_ratios():
    found = spread(ratios([4.0, 9.0, 2.0], [2.0, 3.0, 2.0]))
    assert found == {"median": 2.0, "low": 1.0, "high": 3.0, "values": [2.0, 3.0, 1.0]}


def test_slope_of_a_power_law():
    assert growth.slope([1, 2, 8], [5, 5 * 2**1.5, 5 * 8**1.5]) == pytest.approx(1.5)
    assert growth.slope([1, 2, 4], [3, 3, 3]) == 0


def test_what_does_not_fit_is_halved_in_proportion(monkeypatch, capsys):
    monkeypatch.setattr(command, "available", lambda device: 2**30)
    size = Size(vocabulary=150_000, prompt=4096, response=1024, hidden=16)
    smaller = command.fitting(size, "cpu")
    assert smaller == replace(size, prompt=256, response=64)
    assert "256 + 64 tokens instead" in capsys.readouterr().err


RESULTS = {
    "head_memory_ratio": {
        "vocabularies": {
            "151936": {
                "median": 20.0,
                "low": 20.0,
                "high": 20.0,
                "values": [20.0],
                "bytes": {"plain": 2**34, "ours": 2**29},
                "inputs": {"vocabulary": 151936, "prompt": 4096, "response": 1024, "hidden": 256, "dtype": "float32"},
            }
        },
    },
    "bas25_update_fraction": {
        "median": 0.4,
        "low": 0.3,
        "high": 0.5,
        "values": [0.4, 0.3, 0.5],
        "shares": {"0.1": {"median": 0.2, "low": 0.1, "high": 0.3}, "0.25": {}},
    },
}


def test_table_names_what_was_missed():
    lines = report.table(RESULTS).splitlines()
    assert (
        "| peak memory of head and loss, plain / ours, vocabulary 151,936 | 20.00 | one reading | >= 10.0 |  |" in lines
    )
    assert "| update of 25% of the rows / of all rows | 0.40 | 0.30 to 0.50 | <= 0.35 | missed |" in lines
    assert "| update of 10% of the rows / of all rows | 0.20 | 0.10 to 0.30 | | |" in lines


def test_the_command_writes_results_and_page(tmp_path, monkeypatch, capsys):
    def here(side, size):
        return head.measure_peak({"side": side, **vars(size)})["bytes"] + 1

    monkeypatch.setattr(head, "peak", here)
    arguments = ["benchmarks", "--quick", "--only", "head", "growth", "--repeats", "1", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    command.main()
    found = json.loads((tmp_path / "benchmarks.json").read_text())
    assert {"date", "command", "machine", "versions"} < found.keys()
    assert found["head_time_ratio"]["inputs"]["prompt"] == 32
    assert found["growth"]["slopes"].keys() == {"response", "vocabulary", "topk"}
    assert "mean nothing" in capsys.readouterr().out
    assert (tmp_path / "benchmarks.md").read_text().startswith("# Benchmarks")
