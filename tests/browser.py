"""A headless Chromium, spoken to over two pipes by its own protocol: no driver, no port, no package.

The browser is the one of the machine (Debian's ``chromium``; another by the variable ``CHROMIUM``). Tests that need it are
skipped where there is none, but not in continuous integration (``CI=true``).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str:
    """The browser's path; skips the test where there is none, fails it in continuous integration."""
    if named := os.environ.get("CHROMIUM"):
        return named
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return found
    reason = "no Chromium on this machine; install one (apt-get install chromium) or name it in CHROMIUM"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


class Browser:
    """A page in a browser of its own, and all that it complained of or asked the network for.

    Args:
        profile: Folder for the browser's files.
    """

    def __init__(self, profile: Path):
        path = find()
        ours, theirs = os.pipe(), os.pipe()
        self._read, self._write = theirs[0], ours[1]
        command = [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_as_three_and_four(ours[0], theirs[1]),
            close_fds=False,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._count, self._buffer, self._session = 0, b"", None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """Call the protocol and wait for the answer; what the page reports meanwhile is kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self.until(lambda answer: answer.get("id") == message["id"], method).get("result", {})

    def until(self, wanted: Callable[[dict], bool], what: str) -> dict[str, Any]:
        """Read what the browser says until one message is ``wanted``; the others are kept where they complain or request."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            while b"\0" in self._buffer:
                raw, self._buffer = self._buffer.split(b"\0", 1)
                message = json.loads(raw)
                self._note(message)
                if wanted(message):
                    assert "error" not in message, f"{what}: {message['error']}"
                    return message
            assert time.monotonic() < end, f"{what}: no answer in {TIMEOUT_S:.0f} s"
            if select.select([self._read], [], [], 1.0)[0]:
                part = os.read(self._read, 1 << 20)
                assert part, f"{what}: the browser has ended (exit code {self._process.poll()})"
                self._buffer += part

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str([part.get("value") for part in params["args"]]))
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            address = params["request"]["url"]
            if not address.startswith("data:"):
                self.requests.append(address)

    def open(self, file: Path, dark: bool = False, width: int = 1200, height: int = 900) -> None:
        """Show a file in a window of that size, and forget what an earlier one has reported."""
        self.complaints, self.requests = [], []
        self("Emulation.setEmulatedMedia", features=[_media("prefers-color-scheme", "dark" if dark else "light")])
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self("Page.navigate", url=file.as_uri())
        self.until(lambda message: message.get("method") == "Page.loadEventFired", f"opening {file.name}")

    def evaluate(self, expression: str) -> Any:
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key where the focus is."""
        code = {"Tab": 9, "Home": 36, "End": 35, "ArrowRight": 39, "ArrowLeft": 37}.get(key, ord(key.upper()[0]))
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **typed)

    def move(self, x: float, y: float) -> None:
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tree(self) -> list[tuple[str, str]]:
        """(role, name) of every node that assistive technology meets."""
        nodes = self("Accessibility.getFullAXTree")["nodes"]
        return [(_value(node, "role"), _value(node, "name")) for node in nodes if not node.get("ignored")]

    def screenshot(self, file: Path, whole: bool = True) -> None:
        answer = self("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        os.close(self._write)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)


def _as_three_and_four(reading: int, writing: int) -> Callable[[], None]:
    """In the child: the descriptors at which Chromium expects its pipes. Duplicated first, lest one overwrites the other."""

    def place() -> None:
        a, b = os.dup(reading), os.dup(writing)
        os.dup2(a, 3)
        os.dup2(b, 4)

    return place


def _media(name: str, value: str) -> dict[str, str]:
    return {"name": name, "value": value}


def _value(node: dict[str, Any], key: str) -> str:
    return str(node.get(key, {}).get("value", ""))
