"""Ends a run that can only wait: one of its processes has died, or nothing has come for too long.

verl hands prompts to its rollout processes and looks into a queue until the answers are there. If such a process dies, nobody
is told: the look into the queue goes on without end.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

#: Seconds between two looks; what dies is noticed within two of them.
PAUSE_S = 5.0


class RunStopped(RuntimeError):
    """A run that could not go on. The message says what has happened to it."""


class Watch:
    """Ends its ``with`` block with :class:`RunStopped`, whatever the main thread waits for.

    Args:
        position: How far the run is; it changes as long as the run goes on.
        limit: Seconds in which it must change.
        alive: The names of the processes that are there. Those of the first look must stay.
        pause: Seconds between two looks.
    """

    def __init__(
        self, position: Callable[[], Hashable], limit: float, alive: Callable[[], set[str]], pause: float = PAUSE_S
    ):
        self._position, self._limit, self._alive, self._pause = position, limit, alive, pause
        self._over = threading.Event()
        self._reason = ""

    def __enter__(self) -> Watch:
        self._main, self._expected = threading.get_ident(), self._alive()
        # A signal reaches the main thread where it waits in C, too; this one is nobody else's here.
        self._before = signal.signal(signal.SIGUSR1, self._stop)
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._before)
        if isinstance(error, KeyboardInterrupt) and self._reason:
            raise RunStopped(self._reason) from error
        if isinstance(error, Exception) and (gone := self._expected - self._alive()):
            raise RunStopped(_died(gone)) from error

    def _stop(self, *_: Any) -> None:
        raise KeyboardInterrupt(self._reason)  # the one exception that Ray, waiting in C++, passes on

    def _look_on(self) -> None:
        last, since, missing = self._position(), time.monotonic(), set[str]()
        while not self._over.wait(self._pause):
            gone = self._expected - self._alive()
            if missing & gone:  # a second look: the run itself may be ending, or have been told already
                return self._end(_died(missing & gone))
            missing = gone
            if (now := self._position()) != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > self._limit:
                return self._end(f"nothing has come in {self._limit:g} seconds (opd.stall_timeout)")

    def _end(self, reason: str) -> None:
        self._reason = reason
        if not self._over.is_set():
            signal.pthread_kill(self._main, signal.SIGUSR1)


def _died(names: set[str]) -> str:
    return f"these processes of the run have died: {', '.join(sorted(names))}"


def living(handles: Mapping[str, Any]) -> Callable[[], set[str]]:
    """A function that names the living processes of this run: verl's named actors, and those of ``handles``.

    Args:
        handles: Of actors that have no name in Ray, by a name for messages.
    """
    import ray

    mine = (ray.get_runtime_context().namespace, "transfer_queue")
    asked = {name: handle.__ray_ready__.remote() for name, handle in handles.items()}

    def names() -> set[str]:
        named = {
            entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True) if entry["namespace"] in mine
        }
        for name, handle in handles.items():
            if ray.wait([asked[name]], timeout=0)[0]:
                try:
                    ray.get(asked[name])
                except ray.exceptions.RayActorError:
                    continue
                asked[name] = handle.__ray_ready__.remote()
            named.add(name)
        return named

    return names
