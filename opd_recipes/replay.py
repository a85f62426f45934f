"""verl's replay buffer with the interval of its looks at the queue as a setting (``trainer.v1.sampler.custom_sampler``)."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class QuickReplayBuffer(ReplayBuffer):
    """For steps shorter than verl's two seconds: ``trainer.v1.sampler.sampler_kwargs.poll_interval``, in seconds."""

    def __init__(self, *args: Any, sampler_kwargs: Any, **kwargs: Any):
        super().__init__(*args, sampler_kwargs=sampler_kwargs, poll_interval=sampler_kwargs["poll_interval"], **kwargs)
