"""vLLM's server with the entropy of each response, which selection needs before any model has read the rollout again.

verl asks vLLM for the log-prob of the sampled token only. This server asks for the most likely ones too, makes one number of
them, and hands it on in the response's ``extra_fields``; the log-probs themselves do not travel.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from opd_recipes.rollout import MEAN_ENTROPY

#: Most likely tokens that are asked for; vLLM's own default limit (``max_logprobs``).
TOP = 20


def mean_entropy(log_probs: Sequence[Mapping[int, Any]]) -> float:
    """Mean over tokens of the entropy of the listed ids, with all others as one bin (so at most the true entropy), in nats.

    Args:
        log_probs: vLLM's, for each token a mapping from id to an object with ``logprob``.
    """
    total = 0.0
    for listed in log_probs:
        probabilities = [math.exp(entry.logprob) for entry in listed.values()]
        rest = max(0.0, 1.0 - sum(probabilities))
        total -= sum(p * math.log(p) for p in (*probabilities, rest) if p > 0)
    return total / max(len(log_probs), 1)


class _EntropyTap:
    """vLLM's engine; of each finished request it keeps the entropy until that is asked for."""

    def __init__(self, engine: Any):
        self._engine = engine
        self.entropies: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *, sampling_params: Any, request_id: str, **others: Any) -> AsyncIterator[Any]:
        if sampling_params.logprobs is not None:
            sampling_params.logprobs = TOP
        last = None
        async for last in self._engine.generate(sampling_params=sampling_params, request_id=request_id, **others):
            yield last
        if last is not None and last.outputs and last.outputs[0].logprobs is not None:
            self.entropies[request_id] = mean_entropy(last.outputs[0].logprobs)


class EntropyServer(vLLMHttpServer):
    """verl's server around such an engine."""

    @property
    def engine(self) -> Any:
        return self._tap

    @engine.setter
    def engine(self, engine: Any) -> None:
        self._tap = _EntropyTap(engine)

    async def generate(self, prompt_ids, sampling_params, request_id, *args, **kwargs):
        output = await super().generate(prompt_ids, sampling_params, request_id, *args, **kwargs)
        entropy = self._tap.entropies.pop(request_id, None)
        if entropy is not None:
            output.extra_fields[MEAN_ENTROPY] = entropy
        return output


class EntropyReplica(vLLMReplica):
    """verl's replica with this server."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(EntropyServer)


def install() -> None:
    """Let ``rollout.name=vllm`` mean this server in this process, where the trainer starts its servers."""
    RolloutReplicaRegistry.register("vllm", lambda: EntropyReplica)
