"""Every test runs as on the demo's machine: verl on its CPU platform, no hub."""

import os

os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_ENGINE_DEVICE="cuda",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    VLLM_NO_USAGE_STATS="1",
)
