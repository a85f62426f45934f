"""Weights from the actor to rollout servers on other devices, over gloo (``rollout.checkpoint_engine.backend=gloo``).

verl's own engines for this need CUDA, an NPU or RDMA. Chosen by ``+overlay=cpu_separate``, which names this module as verl's
``custom_backend_module``. Actor rank 0 broadcasts full weights in buckets; the other actor ranks only help to gather them.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

#: Longest wait for the other side.
TIMEOUT = datetime.timedelta(minutes=10)
#: Stands for no further bucket.
END = b"end"

Named = tuple[str, torch.Tensor]


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """One broadcast group for each sync: servers may have come or gone since the last one.

    Args:
        bucket_size: Bytes that are sent at a time.
        is_master: Whether this is actor rank 0, which serves the group's store.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.bucket_size, self.is_master = bucket_size, is_master
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> tuple[str, int] | None:
        """The address of the store, from the one that serves it."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list
    ) -> tuple[dict[str, list], dict[str, list]]:
        ranks = [0] + [-1] * (actor_wg_world_size - 1), list(range(1, rollout_world_size + 1))
        actor, rollout = (
            {
                "rank": side,
                "world_size": [rollout_world_size + 1] * len(side),
                "address": [metadata[0]] * len(side),
            }
            for side in ranks
        )
        return actor, rollout

    def init_process_group(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        if rank < 0:
            return
        if self._store is None:
            self._store = dist.TCPStore(*address, is_master=False, timeout=TIMEOUT)
        self._group = dist.ProcessGroupGloo(self._store, rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        self._group = self._store = None

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> None:
        if self._group is None:
            for _ in weights:  # each weight is gathered from all actor ranks
                pass
            return
        number = 0
        for number, bucket in enumerate(self._buckets(weights), start=1):
            flat = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])
            names = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in bucket]
            self._store.set(str(number), json.dumps(names))
            await asyncio.to_thread(self._broadcast, flat)
        self._store.set(str(number + 1), END)

    def _buckets(self, weights: Iterable[Named]) -> Iterator[list[Named]]:
        bucket: list[Named] = []
        size = 0
        for name, weight in weights:
            weight = weight.detach().cpu()
            if bucket and size + weight.nbytes > self.bucket_size:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, weight))
            size += weight.nbytes
        if bucket:
            yield bucket

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Named, None]:  # type: ignore[override]
        number = 1
        while (header := await asyncio.to_thread(self._store.get, str(number))) != END:
            parts = [(name, getattr(torch, dtype), shape) for name, dtype, shape in json.loads(header)]
            sizes = [dtype.itemsize * torch.Size(shape).numel() for _, dtype, shape in parts]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            await asyncio.to_thread(self._broadcast, flat)
            for (name, dtype, shape), piece in zip(parts, flat.split(sizes), strict=True):
                yield name, piece.clone().view(dtype).view(shape)
            number += 1

    def _broadcast(self, flat: torch.Tensor) -> None:
        self._group.broadcast(flat, 0).wait()
