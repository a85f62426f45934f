"""Rows in shards on a Ray cluster, with results in the order of the rows.

Plain tasks over ranges of rows, not Ray Data: its readers know no layouts, lose the line that a fault is in, and fail a
block for one broken row. Here a shard is read and checked by the functions of the local run, so results are the same.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from data_prep.rows import DataError

#: Rows of a shard: some seconds of decoding, which a run that is stopped loses at most.
ROWS = 256
#: Shards that are under way for each CPU of the cluster, and at most.
AHEAD, MOST_AHEAD = 2, 512
LOCAL = "local"

#: Job, first row and number of rows -> a result for each row (fewer: the source ends there), and what else is to be told.
Work = Callable[[Any, int, int], tuple[list[Any], Any]]


@contextmanager
def cluster(address: str) -> Iterator[Any]:
    """The ``ray`` module, connected; one that was connected before stays so.

    Args:
        address: ``local`` starts Ray on this machine; ``auto`` or ``host:port`` joins a running cluster.

    Raises:
        DataError: There is no such cluster.
    """
    import ray

    if ray.is_initialized():
        yield ray
        return
    try:
        options = {"include_dashboard": False} if address == LOCAL else {}
        ray.init(address=address, log_to_driver=False, **options)
    except Exception as error:  # each way of connecting has errors of its own
        raise DataError(f"--ray {address}: {error}; 'local' starts Ray on this machine") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def in_shards(
    address: str, job: Any, work: Work, what: str, total: int | None, needed: Sequence[str], rows: int | None = None
) -> Iterator[tuple[list[Any], Any]]:
    """What ``work`` gives for each shard, in order; as many are under way as :data:`AHEAD` says.

    Args:
        address: See :func:`cluster`.
        job: Sent to each machine once.
        work: A function of a module, so that other machines can import it.
        what: For the progress line.
        total: Rows, where their number is known.
        needed: Local files and folders that each machine must see.
        rows: Of a shard.

    Raises:
        DataError: A machine does not see the source, or what ``work`` raises.
    """
    rows = rows or ROWS
    with cluster(address) as ray, tqdm(total=total, desc=what, unit="row", mininterval=1) as progress:
        sent, task = ray.put(job), ray.remote(num_cpus=1)(_shard)
        most = min(MOST_AHEAD, max(1, AHEAD * int(ray.cluster_resources().get("CPU", 1))))
        waiting: deque[Any] = deque()
        start, ended = 0, False
        try:
            while waiting or not ended:
                while not ended and len(waiting) < most and (total is None or start < total):
                    waiting.append(task.remote(work, sent, start, rows, os.getcwd(), list(needed)))
                    start += rows
                if not waiting:
                    return
                found, more = _result(ray, waiting.popleft())
                ended = ended or len(found) < rows
                progress.update(len(found))
                yield found, more
        finally:
            for left in waiting:
                ray.cancel(left, force=True)


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error  # its own text would be a traceback


def _shard(work: Work, job: Any, start: int, count: int, folder: str, needed: Sequence[str]) -> Any:
    """On a machine of the cluster."""
    if os.path.isdir(folder):
        os.chdir(folder)  # what relative paths are relative to
    for path in needed:
        if "://" not in path and not os.path.exists(path):
            raise DataError(
                f"{path}: the machine {socket.gethostname()} does not see it; put it on a file system that all machines "
                "share, or name it by an address (s3://...)"
            )
    return work(job, start, count)
