"""An OpenAI-compatible server: one POST for a call, retried where a retry can help.

Only the address that the user named is contacted: no redirect is followed. Its key is read from the environment, goes into one
header and nowhere else: where a server sends it back, it is taken out of what is said and kept.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
from tqdm import tqdm

from data_prep.rows import DataError
from data_prep.synthesize.replies import Reply

MAX_REPLY_BYTES = 4 * 2**20
#: Statuses that no other call will fare better with: wrong key, no right, wrong address or model.
HOPELESS = (401, 403, 404)
#: A shorter key is none ("EMPTY"), and may be a word of a reply: it is taken out of messages, not out of replies.
SHORTEST_KEY = 12
#: Calls in a row that fail before the run stops.
MAX_FAILURES = 20


class CallFailed(Exception):
    """A call was given up after its retries; started again, the run asks it again."""


class CallRefused(Exception):
    """The server took the call and will not answer it, now or later (a 4xx, or a reply that is no chat completion)."""


class ServerError(DataError):
    """The server cannot be used at all: the run stops, and what was paid for stays in the ledger."""


@dataclass(frozen=True)
class Retry:
    """When to try again.

    Attributes:
        attempts: Tries of one call, the first included.
        base: Seconds before the second try, doubled each time, each shortened by chance by up to a half.
        longest: Most seconds between two tries. A server that asks for more is not waited for.
        timeout: Seconds for one try, from connecting to the last byte.
    """

    attempts: int = 6
    base: float = 1.0
    longest: float = 120.0
    timeout: float = 180.0

    def delay(self, tries: int, asked: float | None) -> float:
        """Seconds to wait after ``tries`` tries; at least what the server asked for."""
        own = min(self.longest, self.base * 2 ** (tries - 1)) * random.uniform(0.5, 1.0)
        return max(own, asked or 0.0)


class Server:
    """One server and one model. Use as an asynchronous context manager.

    Args:
        url: Base address, e.g. ``http://localhost:8000/v1``.
        model: Name for the request.
        retry: When to try again.
        key_variable: Environment variable that holds the key; None for a server that needs none.
        extra: Further fields of each request, e.g. ``{"chat_template_kwargs": {"enable_thinking": False}}``.
        option: What the command calls the address, for messages.

    Attributes:
        retries: Tries after the first, of all calls.

    Raises:
        DataError: The address is no http(s) address or holds a password, or the variable is not set.
    """

    def __init__(
        self,
        url: str,
        model: str,
        retry: Retry | None = None,
        key_variable: str | None = None,
        extra: dict[str, Any] | None = None,
        option: str = "--url",
    ):
        self.url = check_url(url, option)
        self._option = option
        self.model = model
        self.extra = extra or {}
        self.retry = retry or Retry()
        self.retries = 0
        self._key = _read_key(key_variable)
        self._forms = re.compile("|".join(map(re.escape, _forms(self._key))), re.I) if self._key else None
        self._not_before = 0.0
        self._failures = 0

    async def __aenter__(self) -> Server:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}  # what is small must not unpack to much
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # The total for a try is set in _once; the number of connections by who calls.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, follow_redirects=False)
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._http.aclose()

    async def chat(self, body: dict[str, Any]) -> Reply:
        """Send one call.

        Raises:
            CallRefused: The server will not answer it.
            CallFailed: It was given up.
            ServerError: No call to this server can succeed, or too many in a row have failed.
        """
        data = json.dumps({"model": self.model, **self.extra, **body}).encode()
        for tries in range(1, self.retry.attempts + 1):
            await self._wait_turn()
            try:
                reply = await self._once(data)
            except _Again as fault:
                asked = fault.wait
                if tries == self.retry.attempts or (asked or 0) > self.retry.longest:
                    self._give_up(fault, tries)
                if asked:  # for all calls: the others would only be told the same
                    self._not_before = max(self._not_before, time.monotonic() + asked)
                self._warn_once(str(fault))
                self.retries += 1
                await asyncio.sleep(self.retry.delay(tries, asked))
            except CallRefused as fault:
                self._count_failure(str(fault))
                raise
            else:
                self._failures = 0
                return reply
        raise AssertionError("the last try returns or raises")

    async def _wait_turn(self) -> None:
        while (wait := self._not_before - time.monotonic()) > 0:
            await asyncio.sleep(wait)

    def _give_up(self, fault: _Again, tries: int) -> None:
        told = f"{fault}, given up after {tries} tries"
        if fault.wait and fault.wait > self.retry.longest:
            told = f"{fault}: the server asks to wait {fault.wait:.0f} s, longer than {self.retry.longest:.0f} s (--max-wait)"
        self._count_failure(told)
        raise CallFailed(told) from fault

    def _warn_once(self, told: str) -> None:
        if not self.retries:
            tqdm.write(f"{self.url}: {told}; trying again, as after each such failure")

    def _count_failure(self, told: str) -> None:
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise ServerError(
                f"{self.url}: {MAX_FAILURES} calls in a row failed, the last: {told}. What is done is kept: see to the "
                "server and run the same command again"
            )

    async def _once(self, data: bytes) -> Reply:
        start = time.monotonic()
        try:
            async with (
                asyncio.timeout(self.retry.timeout),
                self._http.stream(
                    "POST",
                    f"{self.url}/chat/completions",
                    content=data,
                    headers={"Content-Type": "application/json"},
                ) as response,
            ):
                body = await _read(response)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise _Again(f"no reply within {self.retry.timeout:g} s") from error
        except httpx.TransportError as error:  # without the error itself, which may quote the reply
            raise _Again(f"connection failed ({type(error).__name__}: {self._hide(str(error))})") from None
        except httpx.HTTPError as error:
            raise CallRefused(f"the reply cannot be read ({self._hide(str(error))})") from None
        self._check_status(response, body)
        try:
            reply = _completion(response, body, time.monotonic() - start, self._option)
        except CallRefused as fault:
            raise CallRefused(self._hide(str(fault))) from None
        if self._key is None or len(self._key) < SHORTEST_KEY:
            return reply
        return replace(reply, text=self._hide(reply.text), finish_reason=self._hide(reply.finish_reason or "") or None)

    def _check_status(self, response: httpx.Response, body: bytes) -> None:
        status = response.status_code
        if status == 200:
            return
        said = self._hide(body.decode(errors="replace"))  # all of it: a cut could leave a part of the key
        told = f"status {status}: {' '.join(said.split())[:200]!r}"
        if status == 429 or status >= 500:
            raise _Again(told, _retry_after(response.headers.get("retry-after")))
        if status in HOPELESS:
            remedy = {404: f"check {self._option} (it usually ends in /v1) and the model's name"}
            raise ServerError(
                f"{self.url}: {told}; {remedy.get(status, 'check the key (--api-key-env) and its rights')}"
            )
        if 300 <= status < 400:
            raise ServerError(f"{self.url}: {told}; it redirects, which is not followed: name the final address")
        raise CallRefused(told)

    def _hide(self, text: str) -> str:
        return self._forms.sub("***", text) if self._forms else text


class _Again(Exception):
    """A try failed in a way that another may not."""

    def __init__(self, told: str, wait: float | None = None):
        super().__init__(told)
        self.wait = wait


def check_url(url: str, option: str = "--url") -> str:
    """The base address without a slash at its end.

    Args:
        option: What the command calls it.

    Raises:
        DataError: It is no plain http(s) address.
    """
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        sound = False
    if not sound:
        shown = re.sub("//[^/]*@", "//***@", re.split("[?#]", url)[0])
        raise DataError(f"{option} {shown!r}: it must be an address such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise DataError(
            f"{option} must hold no user, password, query or fragment; put the key into a variable (--api-key-env)"
        )
    return url.rstrip("/")


def _read_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise DataError(
            f"--api-key-env {variable}: this environment variable is not set; export it, or leave the option out"
        )
    if not key.isascii() or not key.isprintable():
        raise DataError(f"--api-key-env {variable}: its value has characters that a header cannot hold")
    return key


def _forms(key: str) -> list[str]:
    """How a server, or a message about what it sent, may write a key; the longest first."""
    escaped = json.dumps(key)[1:-1]
    forms = {key, escaped, escaped.replace("/", "\\/"), repr(key)[1:-1], repr(key.encode())[2:-1], quote(key, safe="")}
    return sorted(forms, key=len, reverse=True)


async def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise CallRefused(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
    return bytes(body)


def _completion(response: httpx.Response, body: bytes, seconds: float, option: str) -> Reply:
    """The first choice of a chat completion; a message without text is an empty one."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise CallRefused(
            f"the server sent {kind or 'no content type'} instead of application/json; does {option} end in /v1?"
        )
    try:
        content = json.loads(body)
        choice = content["choices"][0]
        text, reason = choice["message"].get("content"), choice.get("finish_reason")
        usage = content.get("usage") or {}
        tokens = [_count(usage.get(name)) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise CallRefused(f"the reply is no chat completion ({type(error).__name__})") from error
    return Reply(
        text=text if isinstance(text, str) else "",
        finish_reason=reason if isinstance(reason, str) else None,
        prompt_tokens=tokens[0],
        completion_tokens=tokens[1],
        seconds=round(seconds, 3),
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date (RFC 9110, section 10.2.3)."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = ((date if date.tzinfo else date.replace(tzinfo=UTC)) - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None
