"""Question synthesis against a real ``vllm serve``: the protocol only, the tiny model has nothing to say about photographs."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import pytest

from data_prep import synthesize
from data_prep.synthesize.client import CallRefused, Server, ServerError
from data_prep.synthesize.images import read_picture
from data_prep.synthesize.replies import Reply
from tests.unit.synthesize_server import draw_image

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number in range(2):
        draw_image(folder / f"{number}.png", tint=number)
    return folder


def ask(url: str, shown: list[str], text: str, model: str = "tiny", **sampling) -> Reply:
    async def call() -> Reply:
        async with Server(url, model) as server:
            content: list[dict] = [{"type": "image_url", "image_url": {"url": one}} for one in shown]
            content.append({"type": "text", "text": text})
            settings = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 8, "seed": 0, **sampling}
            return await server.chat({"messages": [{"role": "user", "content": content}], **settings})

    return asyncio.run(call())


def test_the_server_takes_two_images_and_counts_their_tokens(url, images):
    picture = read_picture(images, "0.png")
    whole, crop = picture.whole(1536).data_url(), picture.evidence((20, 20, 50, 40), 2.0, 1536).data_url()
    plain, one, two = (ask(url, shown, "What is it?").prompt_tokens for shown in ([], [whole], [crop, whole]))
    assert plain < one < two


def test_the_same_seed_gives_the_same_sample_and_another_seed_another_one(url):
    # Hot: the tiny model is sure of itself.
    sampled = [ask(url, [], "Name it.", temperature=2.0, seed=seed, max_tokens=32).text for seed in (1, 1, 2, 3)]
    assert sampled[0] == sampled[1] and len(set(sampled)) > 1


def test_a_reply_that_reaches_max_tokens_says_so(url):
    replies = [ask(url, [], "Tell everything.", max_tokens=1, seed=seed, temperature=1.0) for seed in range(8)]
    assert "length" in {reply.finish_reason for reply in replies} and {r.completion_tokens for r in replies} == {1}


def test_a_prompt_that_is_too_long_is_refused_and_an_unknown_model_stops_the_run(url):
    with pytest.raises(CallRefused, match="status 400"):
        ask(url, [], "long " * 5000)
    with pytest.raises(ServerError, match="404"):
        ask(url, [], "hello", model="no-such-model")


def test_a_run_talks_to_it_rejects_its_nonsense_with_reasons_and_pays_once(url, images, tmp_path):
    """The tiny model answers no list of objects: each image is rejected, none is unfinished."""

    def run() -> dict:
        parser = argparse.ArgumentParser()
        synthesize.add_arguments(parser)
        options = {"--images": images, "--out": tmp_path, "--url": url, "--model": "tiny", "--max-tokens": 32}
        command = [str(part) for pair in options.items() for part in pair]
        with pytest.raises(SystemExit, match="no question is kept"):
            synthesize.run(parser.parse_args([*command, "--box-convention", "qwen1000"]))
        return json.loads((tmp_path / "report.json").read_text())

    first, again = run(), run()
    assert first["stages"]["lists"] == {"in": 2, "out": 0, "rejected": 2, "unfinished": 0}
    assert (first["total"]["asked"], first["total"]["uncounted"], first["total"]["refused"]) == (2, 0, 0)
    assert first["total"]["prompt_tokens"] > 0 and first["total"]["completion_tokens"] > 0
    assert (again["total"]["asked"], again["total"]["recorded"]) == (0, 2)
