"""A chat-completions server for the tests: it knows three squares, counts what it is asked, and misbehaves by script."""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from data_prep import synthesize

#: Name -> box in pixels of the 200 x 100 picture. In thousandths, x is five times and y ten times as much.
SQUARES = {"red square": (20, 20, 50, 40), "green square": (90, 10, 120, 40), "blue square": (150, 60, 180, 90)}
#: A phrase that only the prompt of one stage has.
STAGE_PHRASES = {
    "lists": "List the objects",
    "boxes": "Find this object",
    "questions": "different questions about this detail",
    "validated": "Judge the question strictly",
    "choices": "wrong answers to this question",
}


@dataclass
class Say:
    """An action of the script: what the server does with one call."""

    text: str = ""
    finish: str | None = "stop"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    content_type: str = "application/json"
    wait: float = 0.0
    reset: bool = False
    usage: dict[str, int] | None = field(default_factory=lambda: {"prompt_tokens": 100, "completion_tokens": 10})


Script = Callable[[str, str, int], Say | None]


class FakeServer:
    """Use as a context manager.

    Attributes:
        script: ``(stage, prompt, number of the call in its stage, from 0)`` -> what to do; None: answer well.
        requests: Digest of a request -> how often it came.
        bodies: The requests, in order.
        headers: Their headers.
    """

    def __init__(self, script: Script | None = None, delay: float = 0.0):
        self.script = script or (lambda stage, prompt, number: None)
        self.delay = delay
        self.requests: Counter[str] = Counter()
        self.stages: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self._lock = threading.Lock()

    def __enter__(self) -> FakeServer:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = 65536

            def do_POST(self):
                outer.handle(self)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):  # a client that was killed is no news
                pass

        self._http = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    @property
    def calls(self) -> int:
        return sum(self.requests.values())

    def handle(self, http: BaseHTTPRequestHandler) -> None:
        data = http.rfile.read(int(http.headers["Content-Length"]))
        body = json.loads(data)
        prompt = prompt_of(body)
        stage = stage_of(prompt, body["model"])
        with self._lock:
            number = self.stages[stage]
            self.stages[stage] += 1
            self.requests[hashlib.sha256(data).hexdigest()] += 1
            self.bodies.append(body)
            self.headers.append(dict(http.headers.items()))
            self.times.append(time.monotonic())
        said = self.script(stage, prompt, number) or Say(good_answer(stage, prompt))
        time.sleep(said.wait or self.delay)
        try:
            send(http, said)
        except OSError:  # the client has gone
            http.close_connection = True


def send(http: BaseHTTPRequestHandler, said: Say) -> None:
    if said.reset:
        http.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        http.connection.close()
        http.close_connection = True
        return
    message = {"role": "assistant", "content": said.text}
    content: dict[str, Any] = {"choices": [{"index": 0, "message": message, "finish_reason": said.finish}]}
    if said.usage is not None:
        content["usage"] = said.usage
    data = json.dumps(content).encode() if said.raw is None else said.raw
    http.send_response(said.status)
    for name, value in {"Content-Type": said.content_type, "Content-Length": str(len(data)), **said.headers}.items():
        http.send_header(name, value)
    http.end_headers()
    http.wfile.write(data)


def prompt_of(body: dict[str, Any]) -> str:
    return body["messages"][0]["content"][-1]["text"]


def images_of(body: dict[str, Any]) -> list[Image.Image]:
    urls = [part["image_url"]["url"] for part in body["messages"][0]["content"][:-1]]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2]))) for url in urls]


def stage_of(prompt: str, model: str = "big") -> str:
    for stage, phrase in STAGE_PHRASES.items():
        if phrase in prompt:
            return stage
    return "hard" if model == "small" else "agreed"


def good_answer(stage: str, prompt: str) -> str:
    name = next((name for name in SQUARES if name in prompt), "red square")
    x0, y0, x1, y1 = SQUARES[name]
    color = name.split()[0]
    return {
        "lists": json.dumps(list(SQUARES)),
        "boxes": json.dumps([{"bbox_2d": [5 * x0, 10 * y0, 5 * x1, 10 * y1], "label": name}]),
        "questions": json.dumps(
            [f"What is the colour of the {name}?", f"Which hue has it, the {name}?", f"What tint is the {name}?"]
        ),
        "validated": json.dumps(dict.fromkeys(("answerable", "unique", "consistent", "clear"), True)),
        "choices": json.dumps(["black", "white", "grey"]),
        "agreed": json.dumps({"answer": color}),
        "hard": json.dumps({"answer": "pink"}),
    }[stage]


def draw_image(path: Path, tint: int = 0) -> Path:
    """A 200 x 100 picture of the squares; with another tint every crop has other pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (200, 100), (255, 255, 255 - tint))
    for name, (x0, y0, x1, y1) in SQUARES.items():
        ImageDraw.Draw(image).rectangle((x0, y0, x1 - 1, y1 - 1), fill=name.split()[0])
        ImageDraw.Draw(image).point((x0, y0), fill=(tint, tint, tint))
    image.save(path, format="JPEG" if path.suffix == ".jpg" else "PNG")
    return path


def arguments(server_url: str, images: Path, out: Path, *options: str) -> list[str]:
    needed = {"--images": images, "--out": out, "--url": server_url, "--model": "big", "--box-convention": "qwen1000"}
    return [*(str(part) for pair in needed.items() for part in pair), *options]


def run(server_url: str, images: Path, out: Path, *options: str) -> None:
    parser = argparse.ArgumentParser()
    synthesize.add_arguments(parser)
    synthesize.run(parser.parse_args(arguments(server_url, images, out, *options)))
