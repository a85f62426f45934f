"""Calls that are paid for once: the ledger in front of the server, a limit on how many run, and what they cost."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from data_prep.synthesize.client import CallFailed, CallRefused, Server
from data_prep.synthesize.images import Shown
from data_prep.synthesize.ledger import Ledger
from data_prep.synthesize.replies import Reply


@dataclass(frozen=True)
class Sampling:
    """``seed`` and the number of the sample are added to each other: samples differ, and a run can be repeated."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 1024
    seed: int = 0


@dataclass
class Spent:
    """Calls and tokens of one stage.

    Attributes:
        recorded: Replies that the ledger had.
        asked: Replies of this run.
        refused: Calls that the server would not answer.
        failed: Calls that were given up.
        uncounted: Replies without a count of tokens.
        seconds: Sum over the replies, from request to last byte.
    """

    model: str = ""
    recorded: int = 0
    asked: int = 0
    refused: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    seconds: float = 0.0

    def add(self, reply: Reply) -> None:
        self.prompt_tokens += reply.prompt_tokens or 0
        self.completion_tokens += reply.completion_tokens or 0
        self.uncounted += reply.prompt_tokens is None or reply.completion_tokens is None
        self.seconds += reply.seconds


@dataclass
class Caller:
    """Asks for replies, each at most once.

    Attributes:
        ledger: Finished calls.
        concurrency: Most calls at one time, over all servers.
        spent: By stage.
        stopped: Why no further call is made (the server or the disk is of no use). Calls on their way are still recorded.
    """

    ledger: Ledger
    concurrency: int
    spent: dict[str, Spent] = field(default_factory=dict)
    stopped: Exception | None = None

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.concurrency)
        self._running: dict[str, asyncio.Task[Reply]] = {}
        self._counted: set[str] = set()

    async def ask(
        self, stage: str, server: Server, prompt: str, images: Sequence[Shown], sampling: Sampling, sample: int = 0
    ) -> Reply:
        """The reply to ``prompt`` behind ``images``; from the ledger where it is known.

        Raises:
            CallRefused, CallFailed, ServerError: As :meth:`Server.chat`.
        """
        spent = self.spent.setdefault(stage, Spent(server.model))
        key = call_key(server, prompt, images, sampling, sample)
        if key not in self._running:
            for recorded in (key, cut_off_key(key, sampling)):
                if recorded in self.ledger:
                    return self._count(spent, recorded, self.ledger.get(recorded))
        if key not in self._running:
            task = asyncio.create_task(self._send(key, stage, server, prompt, images, sampling, sample))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        return await asyncio.shield(self._running[key])

    def _count(self, spent: Spent, key: str, reply: Reply) -> Reply:
        if key not in self._counted:
            self._counted.add(key)
            spent.recorded += 1
            spent.add(reply)
        return reply

    async def samples(
        self, stage: str, server: Server, prompt: str, images: Sequence[Shown], sampling: Sampling, count: int
    ) -> list[Reply]:
        """``count`` replies to the same prompt; all are finished before a failure is raised, so that none is paid twice."""
        calls = [self.ask(stage, server, prompt, images, sampling, number) for number in range(count)]
        return await finish_all(calls)

    async def _send(
        self,
        key: str,
        stage: str,
        server: Server,
        prompt: str,
        images: Sequence[Shown],
        sampling: Sampling,
        sample: int,
    ) -> Reply:
        spent = self.spent[stage]
        async with self._slots:
            if self.stopped:
                raise self.stopped
            content: list[dict[str, Any]] = []
            for image in images:
                url = await asyncio.to_thread(image.data_url)
                content.append({"type": "image_url", "image_url": {"url": url}})
            content.append({"type": "text", "text": prompt})
            settings = {**asdict(sampling), "seed": sampling.seed + sample}
            try:
                reply = await server.chat({"messages": [{"role": "user", "content": content}], **settings})
                key = cut_off_key(key, sampling) if reply.finish_reason == "length" else key
                await self.ledger.append(key, reply, stage=stage, model=server.model, sample=sample)
            except CallRefused:
                spent.refused += 1
                raise
            except CallFailed:
                spent.failed += 1
                raise
            except Exception as error:
                self.stopped = self.stopped or error
                raise
        self._counted.add(key)
        spent.asked += 1
        spent.add(reply)
        return reply

    def totals(self) -> Counter[str]:
        """All stages together."""
        sums: Counter[str] = Counter()
        for spent in self.spent.values():
            sums.update({name: value for name, value in asdict(spent).items() if name != "model"})
        return sums


def call_key(server: Server, prompt: str, images: Sequence[Shown], sampling: Sampling, sample: int) -> str:
    """The hash of all that a reply depends on.

    Not the address: a server may move. Not ``max_tokens``, on which only a reply that was cut off depends.
    """
    settings = {name: value for name, value in asdict(sampling).items() if name != "max_tokens"}
    parts = {
        "model": server.model,
        "extra": server.extra,
        "prompt": prompt,
        "images": [image.identity for image in images],
        "sampling": settings,
        "sample": sample,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def cut_off_key(key: str, sampling: Sampling) -> str:
    """The key of a reply that reached ``max_tokens``: with more of them it is asked again."""
    return f"{key} {sampling.max_tokens}"


async def finish_all(calls: Sequence[Any]) -> list[Any]:
    """Await all, then return their results or raise the first exception."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    await asyncio.gather(*tasks, return_exceptions=True)
    return [task.result() for task in tasks]  # a failure that a call returns, rather than raises, is a result
