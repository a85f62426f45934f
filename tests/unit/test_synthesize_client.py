"""The client against a server that misbehaves, and the ledger against kills and damage."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from data_prep.rows import DataError
from data_prep.synthesize import client
from data_prep.synthesize.calls import Caller, Sampling, call_key
from data_prep.synthesize.client import CallFailed, CallRefused, Retry, Server, ServerError
from data_prep.synthesize.ledger import Ledger
from data_prep.synthesize.replies import Reply
from tests.unit.synthesize_server import FakeServer, Say

BODY = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}
QUICK = Retry(attempts=3, base=0.01, longest=5.0, timeout=5.0)


def chat(script, retry: Retry = QUICK, calls: int = 1) -> tuple[list, FakeServer, Server]:
    """``calls`` replies (or exceptions), one after another."""

    async def ask_all(server: Server) -> list:
        async with server:
            return [r for _ in range(calls) for r in await asyncio.gather(server.chat(BODY), return_exceptions=True)]

    with FakeServer(lambda stage, prompt, number: script(number)) as fake:
        server = Server(fake.url, "big", retry)
        return asyncio.run(ask_all(server)), fake, server


def test_a_reply_has_its_text_reason_and_tokens():
    (reply,), fake, _ = chat(
        lambda number: Say("hi", finish="length", usage={"prompt_tokens": 7, "completion_tokens": 2})
    )
    assert (reply.text, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens) == ("hi", "length", 7, 2)
    assert reply.seconds > 0 and fake.bodies == [{"model": "big", **BODY}]


@pytest.mark.parametrize(
    "trouble",
    [Say(status=429), Say(status=500), Say(status=503, raw=b"<html>"), Say(reset=True), Say("late", wait=0.6)],
    ids=["429", "500", "503", "reset", "timeout"],
)
def test_passing_trouble_is_tried_again(trouble):
    retry = Retry(attempts=3, base=0.01, longest=5.0, timeout=0.3)
    (reply,), fake, server = chat(lambda number: trouble if number < 2 else Say("hi"), retry)
    assert reply.text == "hi" and fake.calls == 3 and server.retries == 2


@pytest.mark.parametrize("trouble", [Say(status=429), Say(status=500), Say(reset=True)], ids=["429", "500", "reset"])
def test_lasting_trouble_is_given_up_after_the_attempts(trouble):
    (fault,), fake, _ = chat(lambda number: trouble)
    assert isinstance(fault, CallFailed) and fake.calls == 3 and "after 3 tries" in str(fault)


def test_a_server_that_is_not_there_is_given_up():
    async def ask() -> None:
        async with Server("http://127.0.0.1:9/v1", "big", QUICK) as server:
            await server.chat(BODY)

    with pytest.raises(CallFailed, match="connection failed"):
        asyncio.run(ask())


@pytest.mark.parametrize("status", [400, 402, 413, 422])
def test_what_the_server_refuses_is_not_asked_again(status):
    (fault,), fake, _ = chat(lambda number: Say(status=status, raw=b"too long"))
    assert isinstance(fault, CallRefused) and fake.calls == 1 and f"{status}" in str(fault) and "too long" in str(fault)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        (Say(status=401), "--api-key-env"),
        (Say(status=403), "--api-key-env"),
        (Say(status=404), "/v1"),
        (Say(status=302, headers={"Location": "http://127.0.0.1:9/elsewhere"}), "not followed"),
    ],
)
def test_what_no_other_call_would_fare_better_with_stops_everything(said, hint):
    (fault,), fake, _ = chat(lambda number: said)
    assert isinstance(fault, ServerError) and hint in str(fault) and fake.calls == 1


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Say(raw=b"<html>", content_type="text/html"), "text/html"),
        (Say(raw=b"not json"), "no chat completion"),
        (Say(raw=b"[]"), "no chat completion"),
        (Say(raw=b'{"choices": [{"message": null}]}'), "no chat completion"),
        (Say(raw=b"[" * 100_000), "no chat completion"),
        (Say(raw=b"x" * (5 * 2**20)), "longer than"),
    ],
)
def test_a_reply_that_is_no_completion_is_refused(said, reason):
    (fault,), fake, _ = chat(lambda number: said)
    assert isinstance(fault, CallRefused) and reason in str(fault) and fake.calls == 1


def test_a_message_without_text_is_an_empty_reply():
    (reply,), _, _ = chat(lambda number: Say(raw=b'{"choices": [{"message": {"content": null}}]}'))
    assert reply == Reply("", None, None, None, reply.seconds)


def test_retry_after_is_waited_for_by_all_calls():
    async def ask_two(server: Server) -> list[Reply]:
        async with server:
            first = asyncio.create_task(server.chat(BODY))
            await asyncio.sleep(0.3)  # by now the first was told to wait
            return await asyncio.gather(first, server.chat(BODY))

    said = Say(status=429, headers={"Retry-After": "1"})
    with FakeServer(lambda stage, prompt, number: said if number == 0 else None) as fake:
        asyncio.run(ask_two(Server(fake.url, "big", QUICK)))
        assert fake.calls == 3 and all(later - fake.times[0] >= 0.95 for later in fake.times[1:])


def test_a_server_that_asks_for_more_than_the_longest_wait_is_not_waited_for():
    start = time.monotonic()
    (fault,), fake, _ = chat(lambda number: Say(status=429, headers={"Retry-After": "3600"}))
    assert isinstance(fault, CallFailed) and "3600 s" in str(fault) and "--max-wait" in str(fault)
    assert fake.calls == 1 and time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [("2", 2, 2), ("0", 0, 0), ("-5", 0, 0), ("1.5", 1.5, 1.5)],
)
def test_retry_after_in_seconds(value, low, high):
    assert low <= client._retry_after(value) <= high


def test_retry_after_as_a_date_and_nonsense():
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    assert 55 < client._retry_after(soon) <= 60
    past = format_datetime(datetime.now(UTC) - timedelta(seconds=60), usegmt=True)
    assert client._retry_after(past) == 0
    assert [client._retry_after(value) for value in (None, "", "soon", "nan", "inf")] == [None] * 5


def test_delays_double_are_shortened_by_chance_and_have_an_upper_end():
    retry = Retry(base=1.0, longest=10.0)
    for tries, most in ((1, 1), (2, 2), (3, 4), (4, 8), (5, 10), (50, 10)):
        delays = [retry.delay(tries, None) for _ in range(50)]
        assert most / 2 <= min(delays) and max(delays) <= most and len(set(delays)) > 1
    assert retry.delay(1, 7.0) == 7.0


@pytest.mark.parametrize("status", [500, 400])
def test_many_failures_in_a_row_stop_everything_and_a_success_starts_the_count_again(status, monkeypatch):
    monkeypatch.setattr(client, "MAX_FAILURES", 3)
    once = Retry(attempts=1)
    told, fake, _ = chat(lambda number: Say("hi") if number == 2 else Say(status=status), once, calls=6)
    assert [type(fault) for fault in told[:5]].count(ServerError) == 0
    assert isinstance(told[5], ServerError) and "3 calls in a row failed" in str(told[5]) and fake.calls == 6


def test_a_key_is_sent_and_hidden_in_messages(monkeypatch):
    monkeypatch.setenv("VLM_KEY", "s3cret\n")
    with FakeServer(lambda *_: Say(status=400, raw=b"bad s3cret")) as fake:

        async def ask() -> None:
            async with Server(fake.url, "big", QUICK, "VLM_KEY") as server:
                await server.chat(BODY)

        with pytest.raises(CallRefused) as caught:
            asyncio.run(ask())
    assert "s3cret" not in str(caught.value) and fake.headers[0]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://h/v1",
        "http://",
        "http://h:99999/v1",
        "http://u:p@h/v1",
        "http://h/v1?key=1",
        "file:///etc",
    ],
)
def test_an_address_must_be_plain(url):
    with pytest.raises(DataError, match="--url"):
        Server(url, "big")


# The ledger


def record(path: Path, *texts: str) -> None:
    with Ledger(path) as ledger:
        for text in texts:
            asyncio.run(ledger.append(f"key of {text}", Reply(text), stage="lists"))


def test_what_is_recorded_is_found_again(tmp_path):
    path = tmp_path / "deep" / "ledger.jsonl"
    record(path, "a", "b\n漢字 \ud800")
    with Ledger(path) as ledger:
        assert len(ledger) == 2 and "key of a" in ledger and "other" not in ledger
        assert ledger.get("key of a") == Reply("a")
        assert ledger.get("key of b\n漢字 \ud800").text == "b\n漢字 \ud800"


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_last_line_is_dropped_and_the_next_call_follows_the_last_whole_one(tmp_path, cut):
    path = tmp_path / "ledger.jsonl"
    record(path, "a", "b")
    path.write_bytes(path.read_bytes()[:-cut])
    record(path, "c")
    with Ledger(path) as ledger:
        assert [ledger.get(f"key of {name}").text for name in "ac"] == ["a", "c"] and len(ledger) == 2
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


@pytest.mark.parametrize("damage", [b"{]\n", b"[]\n", b'{"key": "x"}\n', b"\xff\n", b"\n"])
def test_a_damaged_line_in_the_middle_is_told_with_its_number(tmp_path, damage):
    path = tmp_path / "ledger.jsonl"
    record(path, "a")
    path.write_bytes(path.read_bytes() + damage + path.read_bytes())
    with pytest.raises(DataError, match=r"line 2 is damaged"), Ledger(path):
        pass


def test_calls_that_finish_together_are_all_on_disk(tmp_path):
    async def many(ledger: Ledger) -> None:
        await asyncio.gather(*(ledger.append(str(i), Reply(str(i))) for i in range(200)))

    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        asyncio.run(many(ledger))
        assert all(ledger.get(str(i)).text == str(i) for i in range(200))
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert len(ledger) == 200


def test_a_write_that_fails_fails_every_call_in_it(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    async def many(ledger: Ledger) -> list:
        return await asyncio.gather(*(ledger.append(str(i), Reply("")) for i in range(5)), return_exceptions=True)

    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        monkeypatch.setattr("data_prep.synthesize.ledger.os.fsync", full)
        assert all(isinstance(result, OSError | DataError) for result in asyncio.run(many(ledger))) and len(ledger) == 0


# Calls


def with_caller(tmp_path: Path, fake: FakeServer, work):
    async def body(ledger: Ledger):
        async with Server(fake.url, "big", QUICK) as server:
            caller = Caller(ledger, 2)
            return await work(caller, server), caller

    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        return asyncio.run(body(ledger))


def test_the_same_call_at_the_same_time_is_made_once(tmp_path):
    with FakeServer(lambda *_: Say("hi"), delay=0.05) as fake:

        def work(caller, server):
            return asyncio.gather(*(caller.ask("lists", server, "p", [], Sampling()) for _ in range(5)))

        replies, caller = with_caller(tmp_path, fake, work)
        assert fake.calls == 1 and [reply.text for reply in replies] == ["hi"] * 5
        assert caller.totals()["asked"] == 1 and caller.totals()["prompt_tokens"] == 100


def test_no_more_calls_run_at_one_time_than_allowed(tmp_path):
    running, most = set(), []

    def script(stage, prompt, number):
        running.add(number)
        most.append(len(running))
        time.sleep(0.02)
        running.discard(number)
        return Say("hi")

    with FakeServer(script) as fake:
        with_caller(tmp_path, fake, lambda caller, server: caller.samples("agreed", server, "p", [], Sampling(), 12))
    assert max(most) == 2


def test_all_samples_end_before_a_failure_is_raised(tmp_path):
    with FakeServer(lambda stage, prompt, number: Say(status=400) if number == 0 else Say("hi")) as fake:
        with pytest.raises(CallRefused):
            with_caller(tmp_path, fake, lambda caller, server: caller.samples("agreed", server, "p", [], Sampling(), 6))
        assert fake.calls == 6
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert len(ledger) == 5


def test_the_key_has_all_that_a_reply_depends_on():
    base = {"prompt": "p", "images": [], "sampling": Sampling(), "sample": 0}
    server = Server("http://h/v1", "big")
    same = call_key(Server("http://elsewhere/v1", "big"), **base)
    assert call_key(server, **base) == same
    assert call_key(server, **{**base, "sampling": Sampling(max_tokens=9)}) == same, "but see cut-off replies"
    others = [
        call_key(Server("http://h/v1", "small"), **base),
        call_key(Server("http://h/v1", "big", extra={"x": 1}), **base),
        call_key(server, **{**base, "prompt": "q"}),
        call_key(server, **{**base, "sampling": Sampling(temperature=0.9)}),
        call_key(server, **{**base, "sampling": Sampling(seed=1)}),
        call_key(server, **{**base, "sample": 1}),
    ]
    assert len({same, *others}) == 7
