"""The vLLM side of the CPU backend, imported only inside vLLM's worker process."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class WorkerExtension(vLLMColocateWorkerExtension):
    """verl's weight receiver, on CPU (``rollout.engine_kwargs.vllm.worker_extension_cls``)."""

    def __new__(cls, *args, **kwargs):
        # With oneDNN vLLM repacks every Linear after loading and drops its weight, so no weight could be updated later.
        import vllm._custom_ops as ops

        ops._supports_onednn = False
        return super().__new__(cls, *args, **kwargs)

    def _update_weights(self, weights, peft_config=None, base_sync_done=False):
        # Tensor.to("cpu") does not copy: the received tensors would keep the shared-memory segment open.
        return super()._update_weights([(name, t.clone()) for name, t in weights], peft_config, base_sync_done)
