"""Weights between processes without NCCL: one sender, several servers, every dtype and shape, bucket by bucket."""

import asyncio
import threading

import pytest
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry

from opd_recipes.backends.gloo_weights import GlooCheckpointEngine


def weights():
    generator = torch.Generator().manual_seed(0)
    made = {
        "matrix": torch.randn(37, 5, generator=generator),
        "vector": torch.randn(3, generator=generator),
        "scalar": torch.tensor(2.5),
        "bf16": torch.randn(8, 8, generator=generator).bfloat16(),
        "whole": torch.arange(7),
        "strided": torch.randn(4, 6, generator=generator).T,
        "empty": torch.empty(0, 3),
    }
    return made


def sync(bucket_size, actors, servers, sent):
    """One sync of verl's CheckpointEngineManager: prepare, topology, groups, weights, finalize."""
    engines = [GlooCheckpointEngine(bucket_size, is_master=i == 0) for i in range(actors)]
    engines += [GlooCheckpointEngine(bucket_size) for _ in range(servers)]
    for _ in range(2):  # the next sync builds a new group
        metadata = [engine.prepare() for engine in engines]
        sides = GlooCheckpointEngine.build_topology(actors, servers, metadata)
        arguments = [
            {key: values[i] for key, values in side.items()} for side in sides for i in range(len(side["rank"]))
        ]
        got = [None] * len(engines)

        def work(i, arguments=arguments, got=got):
            engines[i].init_process_group(**arguments[i])
            if i < actors:
                walked = []
                asyncio.run(engines[i].send_weights((walked.append(name), (name, w))[1] for name, w in sent.items()))
                got[i] = walked
            else:

                async def receive():
                    return {name: tensor async for name, tensor in engines[i].receive_weights()}

                got[i] = asyncio.run(receive())
            engines[i].finalize()

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(engines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a sync hangs"
        yield got


@pytest.mark.parametrize("bucket_size", [1, 200, 1 << 20])
@pytest.mark.parametrize(("actors", "servers"), [(1, 1), (2, 3)])
def test_every_server_gets_every_weight(bucket_size, actors, servers):
    sent = weights()
    for got in sync(bucket_size, actors, servers, sent):
        assert got[:actors] == [list(sent)] * actors  # all actor ranks gather every weight
        for received in got[actors:]:
            assert list(received) == list(sent)
            for name, tensor in sent.items():
                assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)


def test_verl_finds_it_by_its_name():
    assert CheckpointEngineRegistry.get("gloo") is GlooCheckpointEngine
