"""Asks what has no reply yet, many questions at a time; every reply is on disk before the next question takes its place.

A question that fails is recorded with its reason, is in no score, and is asked again by the next run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from data_prep.rows import DataError
from data_prep.synthesize.client import CallFailed, CallRefused, Retry, Server, ServerError
from data_prep.synthesize.ledger import Ledger
from opd_recipes.eval.asking import images_hash, prompt_hash
from opd_recipes.eval.job import Job
from opd_recipes.eval.question import Question
from opd_recipes.eval.server import VllmServer, check_checkpoint, serving
from opd_recipes.registry import RecipeError
from opd_recipes.view_steps import ViewError


@dataclass(frozen=True)
class Endpoint:
    """Who answers: a running server, or a checkpoint folder that is served for as long as there is something to ask.

    Args:
        model: Name for the requests.
        url: Of a running server; None: ``checkpoint`` is served.
        log: File for the output of the server that is started.
        key_variable: Environment variable with the running server's key.
        concurrency: Most questions at one time.
        serve_arguments: Further arguments of ``vllm serve``.
        start_s: Seconds until a started server must be ready.
    """

    model: str
    log: Path
    url: str | None = None
    checkpoint: Path | None = None
    key_variable: str | None = None
    retry: Retry = field(default_factory=Retry)
    concurrency: int = 16
    serve_arguments: Sequence[str] = ()
    start_s: float = 1800.0

    def check(self) -> None:
        """Find what is wrong before any data is read.

        Raises:
            RecipeError, DataError: The folder holds no model, the address is none, or the key is not set.
        """
        if self.url is not None:
            self.server(self.url)
        else:
            assert self.checkpoint is not None
            check_checkpoint(self.checkpoint)

    def server(self, url: str) -> Server:
        return Server(url, self.model, self.retry, self.key_variable, option="--server")

    @contextmanager
    def open(self) -> Iterator[tuple[str, VllmServer | None]]:
        """The address, and the server where it is ours."""
        if self.url is not None:
            yield self.url, None
            return
        assert self.checkpoint is not None
        print(f"starting vllm serve on {self.checkpoint}; its log is {self.log}", flush=True)
        with serving(self.checkpoint, self.model, self.log, self.serve_arguments, self.start_s) as server:
            yield server.url, server


def ask(jobs: Sequence[Job], endpoint: Endpoint) -> str | None:
    """Ask the questions of prepared ``jobs`` that have no reply; no server is started where none is missing.

    Returns:
        Why it was stopped before all were asked; None where it was not.

    Raises:
        RecipeError, DataError, OSError: The server did not start, or the data changed.
    """
    waiting = [job for job in jobs if job.wanted]
    if not waiting:
        return None
    with endpoint.open() as (url, ours):
        stopped = asyncio.run(_ask_all(waiting, endpoint, url))
        if stopped and ours and ours.ended:
            stopped = ours.told(f"{stopped}\nvllm serve has ended")
    return stopped


async def _ask_all(jobs: Sequence[Job], endpoint: Endpoint, url: str) -> str | None:
    for job in jobs:
        assert job.settings is not None
        server = endpoint.server(url)
        job.store.begin(job.fingerprint)
        with job.store.ledger() as ledger:
            async with server:
                asker = _Asker(job, server, ledger)
                try:
                    await asker.run(endpoint.concurrency)
                finally:
                    job.recorded = job.store.recorded()
                    job.failures = {name: asker.failures.get(name, "not asked") for name in job.wanted}
                    job.store.write_failures(job.failures)
        if asker.stopped:
            return str(asker.stopped)
    return None


@dataclass
class _Asker:
    job: Job
    server: Server
    ledger: Ledger
    failures: dict[str, str] = field(default_factory=dict)
    stopped: Exception | None = None

    async def run(self, concurrency: int) -> None:
        running: set[asyncio.Task[None]] = set()
        questions = self.job.to_ask()
        wanted = len(self.job.wanted)
        with tqdm(total=wanted, desc=self.job.label, unit="question", mininterval=1) as progress:
            try:
                # The next question is read in a thread: a picture of 8K is no small thing to decode.
                while not self.stopped and (question := await asyncio.to_thread(next, questions, None)):
                    if len(running) >= concurrency:
                        _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    running.add(asyncio.create_task(self._one(question, progress)))
            except Exception:
                # Those on their way are paid for: let them end and be recorded. Ctrl-C does not wait for them.
                await asyncio.gather(*running)
                raise
            await asyncio.gather(*running)

    async def _one(self, question: Question, progress: tqdm) -> None:
        if self.stopped:
            return
        settings = self.job.settings
        assert settings is not None
        try:
            request = await asyncio.to_thread(settings.request, question)
            images = await asyncio.to_thread(images_hash, question)
            reply = await self.server.chat(request)
            asked = {"prompt": prompt_hash(question), "images": images, "at": round(time.time(), 3)}
            await self.ledger.append(question.id, reply, **asked)
        except (CallFailed, CallRefused, ViewError, RecipeError) as error:
            self.failures[question.id] = str(error)
            progress.set_postfix(failed=len(self.failures))
        except (ServerError, DataError, OSError) as error:
            self.failures[question.id] = str(error)
            self.stopped = self.stopped or error
        progress.update()


def spent(job: Job) -> dict[str, float | int]:
    """Tokens and time of the replies to this run's questions.

    ``seconds`` is how long at least one of them was under way; ``request_seconds`` their sum; ``uncounted`` replies came
    without a count of tokens.
    """
    replies = [job.recorded[question.id] for question in job.questions if question.id in job.recorded]
    return {
        "prompt_tokens": sum(reply.prompt_tokens or 0 for reply in replies),
        "completion_tokens": sum(reply.completion_tokens or 0 for reply in replies),
        "uncounted": sum(reply.prompt_tokens is None or reply.completion_tokens is None for reply in replies),
        "seconds": round(_covered([(reply.at - reply.seconds, reply.at) for reply in replies]), 3),
        "request_seconds": round(sum(reply.seconds for reply in replies), 3),
    }


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
