"""One real ``vllm serve`` of the tiny model for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from opd_recipes.eval.server import serving
from tests.harness import BASE


@pytest.fixture(scope="package")
def url(tmp_path_factory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    # Sampled requests with a seed: vLLM's CPU runner stops on such a prompt where it is prefilled in parts.
    whole = ["--max-model-len", "4096", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"]
    with serving(Path(BASE), "tiny", log, whole, start_s=400) as server:
        yield server.url
