"""An estimate of what training on these rows needs of each device's memory."""

from __future__ import annotations

from typing import Any

#: fp32 weights, gradients, two moments of Adam, and the teacher: 4 + 4 + 8 + 4 bytes for each parameter.
BYTES_PER_PARAMETER = 20
#: fp32 tensors of head chunk x vocabulary at the peak: logits and log-probabilities of both models, two of the backward pass.
HEAD_TENSORS = 6


def estimate_memory(config: Any, model_config: Any, longest: int) -> dict[str, Any]:
    """Bytes on each device, before vLLM's own share.

    ``state + activations + head``, with

    - ``state = 20 x parameters / devices``: fp32 weights, gradients and Adam's moments of the student, and the teacher's
      weights, all sharded by FSDP2 (offloading is not subtracted);
    - ``activations = T x (layers x D + 8 D + 3 F) x b`` with gradient checkpointing (each layer's input, and one layer's
      inside), else ``T x layers x (8 D + 3 F) x b``; ``T`` is the longest micro-batch in tokens (the longest prompt with a
      full response, or ``ppo_max_token_len_per_gpu`` where micro-batches are filled up to it), ``D`` the hidden size, ``F``
      the feed-forward size (of a mixture: of the experts that a token uses), ``b`` 2 bytes, or 4 in fp32. Attention is taken
      to be memory-efficient, and the vision tower to be small;
    - ``head = 6 x opd.head_chunk x vocabulary x 4``.

    It is an estimate: allocator, communication buffers and the vision tower come on top; take a quarter more.

    Args:
        config: The composed configuration.
        model_config: Of the model, from Hugging Face.
        longest: Longest prompt in tokens, of any view.
    """
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    text = model_config.get_text_config()
    devices = config.trainer.nnodes * config.trainer.n_gpus_per_node
    sequence = longest + config.data.max_response_length
    tokens = max(sequence, actor.ppo_max_token_len_per_gpu) if actor.use_dynamic_bsz else sequence
    parameters = count_parameters(model_config)
    precision = (actor.fsdp_config.get("mixed_precision") or {}).get("param_dtype", "bf16")
    width = 4 if precision in ("fp32", "float32") else 2
    inside = 8 * text.hidden_size + 3 * _feed_forward(text)
    layers = text.num_hidden_layers
    if model.enable_gradient_checkpointing:
        activations = tokens * (layers * text.hidden_size + inside) * width
    else:
        activations = tokens * layers * inside * width
    head = HEAD_TENSORS * config.opd.head_chunk * text.vocab_size * 4
    state = None if parameters is None else BYTES_PER_PARAMETER * parameters // devices
    return {
        "parameters": parameters,
        "devices": devices,
        "micro_batch_tokens": tokens,
        "state_bytes": state,
        "activation_bytes": activations,
        "head_bytes": head,
        "total_bytes": None if state is None else state + activations + head,
    }


def _feed_forward(text: Any) -> int:
    experts = getattr(text, "num_experts_per_tok", None)
    expert_size = getattr(text, "moe_intermediate_size", None)
    if experts and expert_size:
        return experts * expert_size + (getattr(text, "shared_expert_intermediate_size", None) or 0)
    return text.intermediate_size


def count_parameters(model_config: Any) -> int | None:
    """Parameters of the model that the configuration describes, built without memory; None where it cannot be built."""
    import torch
    from transformers import AutoModelForImageTextToText

    try:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(model_config)
    except Exception as error:  # the model's own code; the estimate alone depends on it
        print(f"data_prep: the model's parameters cannot be counted, so the memory is not estimated: {error}")
        return None
    return sum(parameter.numel() for parameter in model.parameters())
