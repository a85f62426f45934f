"""Engines of a LoRA run."""

import torch

from opd_recipes.lora import is_adapter
from opd_recipes.teacher import local
from tests import harness

LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"]


def config(*overrides):
    return harness.config(*LORA, *overrides, overlay="[cpu,toy,lora]")


def engines(*overrides, micro_tokens=4096):
    return harness.engines(config(*overrides), micro_tokens)


def adapters(engine):
    """The whole weights of the adapter that the module has now."""
    return {name: weight for name, weight in harness.full_weights(engine.module).items() if is_adapter(name)}


@torch.no_grad()
def scatter(engine):
    """Move the student's adapter away from the start, where B is 0; the same whole weights on any number of ranks."""
    whole = adapters(engine)
    for name, parameter in engine.module.named_parameters():
        if name in whole:
            generator = torch.Generator().manual_seed(len(name) + whole[name].numel())
            noise = torch.randn(whole[name].shape, generator=generator) * 0.05
            if hasattr(parameter, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                noise = local(distribute_tensor(noise, parameter.device_mesh, parameter.placements))
            local(parameter).add_(noise)
