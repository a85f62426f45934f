"""Keys and tokens of the environment are in nothing that a command writes or says, whatever a server sends back."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra.core.global_hydra import GlobalHydra

from data_prep.rows import DataError
from data_prep.synthesize.client import CallFailed, CallRefused, Retry, Server, ServerError, check_url
from opd_recipes import main
from opd_recipes.report.page import build, write
from opd_recipes.report.settings import differences
from tests.report_run import write_config, write_run
from tests.unit.eval_helpers import evaluate, of_server, right, write_rows
from tests.unit.synthesize_server import FakeServer, Say, draw_image, good_answer
from tests.unit.synthesize_server import run as synthesize

#: Two have characters that JSON writes in another way.
SECRETS = {
    "ANSWERS_KEY": 'sk-answers-4f1d83"c2\\7a/90be',
    "JUDGE_KEY": "sk-judge-77aa02/19+cd5e0b==",
    "WANDB_API_KEY": "wandb0c9d8e7f6a5b4c3d2e1f",
    "HF_TOKEN": "hf_QmZtUvWxYzAaBbCcDdEe",
    "RAY_AUTH_TOKEN": "ray-9b1c7d2e5f8a4036",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPx",
}
#: So much of a key in a row is a leak, too.
PART = 10


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def leaks(text: str) -> list[str]:
    """Names of the secrets of which ``text`` has a part, as it is, as JSON has it, or in base64."""
    found = []
    for name, secret in SECRETS.items():
        forms = [secret, json.dumps(secret)[1:-1], base64.b64encode(secret.encode()).decode()]
        parts = {form[i : i + PART] for form in forms for i in range(len(form) - PART + 1)}
        if any(part.lower() in text.lower() for part in parts):
            found.append(name)
    return found


def written(folder: Path) -> dict[str, str]:
    """Every file with its text; of a table its rows."""
    return {
        str(file.relative_to(folder)): str(pq.read_table(file).to_pylist())
        if file.suffix == ".parquet"
        else file.read_bytes().decode(errors="replace")
        for file in folder.rglob("*")
        if file.is_file()
    }


def check(folder: Path, said: str, files: set[str]) -> None:
    """Nothing leaks, and the files that are named were among those that were looked at."""
    texts = written(folder)
    assert files <= {Path(name).name for name in texts}, sorted(texts)
    assert {name: leaks(text) for name, text in {**texts, "said": said}.items() if leaks(text)} == {}


def echo(server: FakeServer) -> str:
    """What a careless server sends back: the headers of the request."""
    return json.dumps(server.headers[-1])


def cut(server: FakeServer) -> bytes:
    """So that a part of the key stands at the end of the first 300 bytes."""
    return ("\n" * 280 + server.headers[-1].get("Authorization", "")).encode()


#: What a server does with a request, by its number.
HABITS: list[Callable[[FakeServer], Say]] = [
    lambda server: Say(status=400, raw=echo(server).encode()),
    lambda server: Say(status=400, raw=cut(server)),
    lambda server: Say(status=500, raw=echo(server).encode()),
    lambda server: Say(status=429, raw=cut(server), headers={"Retry-After": "0"}),
    lambda server: Say(status=307, raw=echo(server).encode(), headers={"Location": "http://h/?" + echo(server)}),
    lambda server: Say(raw=b"{}", content_type=server.headers[-1].get("Authorization", "")),
    lambda server: Say(raw=b"{}", headers={"Content-Encoding": echo(server)}),
    lambda server: Say(echo(server), finish=server.headers[-1].get("Authorization", "")),
    lambda server: Say(status=401, raw=echo(server).encode()),
]


def test_what_the_test_looks_for_is_found_where_it_is():
    key = SECRETS["ANSWERS_KEY"]
    assert leaks(f"Bearer {key}") == leaks(json.dumps({"a": key})) == leaks(key[3:15]) == ["ANSWERS_KEY"]
    assert leaks("Bearer ***") == []


# Commands


@pytest.mark.parametrize("habit", HABITS)
def test_evaluation_and_judge(tmp_path, capsys, habit):
    rows = write_rows(tmp_path / "rows.jsonl")

    def script(stage, prompt, number):
        return habit(server) if number % 2 else right(stage, prompt, number)

    with FakeServer(script) as server, FakeServer(lambda *_: habit(judge)) as judge:
        told = ("--judge-server", judge.url, "--judge-model", "j", "--judge-api-key-env", "JUDGE_KEY")
        evaluate(tmp_path / "out", *of_server(rows, server), "--api-key-env", "ANSWERS_KEY", *told)
        sent = [headers["Authorization"] for headers in server.headers]
        assert set(sent) == {f"Bearer {SECRETS['ANSWERS_KEY']}"}
    said = capsys.readouterr()
    check(tmp_path / "out", said.out + said.err, {"replies.jsonl"})


@pytest.mark.parametrize("habit", HABITS)
def test_synthesis(tmp_path, capsys, habit):
    draw_image(tmp_path / "images" / "0.png")

    def script(stage, prompt, number):
        return Say(good_answer(stage, prompt)) if number % 5 == 0 else habit(server)

    with FakeServer(script) as server:
        quick = ("--attempts", "2", "--max-wait", "0.01", "--timeout", "20", "--api-key-env", "ANSWERS_KEY")
        try:
            synthesize(server.url, tmp_path / "images", tmp_path / "out", *quick)
            told = ""
        except SystemExit as end:
            told = str(end)
    said = capsys.readouterr()
    check(tmp_path / "out", told + said.out + said.err, {"ledger.jsonl"})


def test_the_printed_configuration_and_what_hydra_keeps(tmp_path, capsys, monkeypatch):
    for words in (["--cfg", "job"], ["opd.objective.kind=none"]):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["opd_recipes", *words, f"hydra.run.dir={tmp_path}"])
        try:
            main.main()
            told = ""
        except SystemExit as end:
            told = str(end)
        said = capsys.readouterr()
        assert leaks(told + said.out + said.err) == []
    check(tmp_path, told, {"config.yaml", "overrides.yaml"})


def test_the_report_of_a_run_whose_configuration_has_keys(tmp_path):
    run = write_run(tmp_path / "run")
    write_config(
        run,
        "vision_opd",
        f"+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY={SECRETS['WANDB_API_KEY']}",
        f"+reward.custom_reward_function.reward_kwargs.access_token={SECRETS['HF_TOKEN']}",
        f"data.image_root='s3://id:{SECRETS['AWS_SECRET_ACCESS_KEY']}@bucket/images'",
    )
    write(build(run), tmp_path / "report" / "report.html")
    check(tmp_path / "report", "", {"report.html"})


@pytest.mark.parametrize(
    "key",
    ["a.api_key", "a.apikey", "a.access_token", "a.hf_token", "a.token", "a.password", "a.client_secret", "env_vars.X"],
)
def test_a_setting_that_is_named_like_a_secret_is_not_shown(key):
    (change,) = differences({}, {key: "s3cret"})
    assert "s3cret" not in change.run


# The client


def failure(raw: bytes) -> str:
    """What Python prints of a call to which a server sends ``raw``, causes included."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    async def call() -> None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
            async with Server(url, "m", Retry(attempts=1, timeout=5), "ANSWERS_KEY") as client:
                await client.chat({})

    try:
        asyncio.run(call())
    except (CallFailed, CallRefused, ServerError) as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError("the call did not fail")


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 %s\r\n\r\n",
        b"%s\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n%s\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\n",
        b"HTTP/1.1 500 %s\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_a_traceback_of_a_broken_reply_has_no_key(raw):
    assert leaks(failure(raw.replace(b"%s", SECRETS["ANSWERS_KEY"].encode()))) == []


@pytest.mark.parametrize("address", ["http://user:{}@h:99999/v1", "ftp://user:{}@h", "http://h/v1?key={}", "h?key={}"])
def test_a_refused_address_is_not_shown_with_its_password(address):
    with pytest.raises(DataError) as refused:
        check_url(address.format(SECRETS["RAY_AUTH_TOKEN"]))
    assert leaks(str(refused.value)) == []
