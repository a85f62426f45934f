"""One question as a request: its message, its images as data URLs, and the settings that a reply depends on."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from opd_recipes.eval.question import ImageSource, Question
from opd_recipes.images import decode

#: EXIF tag of the orientation; 1 is upright.
ORIENTATION = 0x0112
#: Default of ``--max-tokens`` with thinking, where a benchmark's own default would cut the thought off.
THINKING_TOKENS = 16384


@dataclass(frozen=True)
class Settings:
    """What every reply of a run depends on besides its question. Sampling is greedy.

    Args:
        model: The model's name, as the server knows it.
        max_tokens: Longest reply.
        thinking: Sent to the chat template as ``enable_thinking``.
        seed: Sent with each request.
        extra: Further fields of each request, instead of ours where the name is the same; None leaves a field out.
        weights: Digest of the checkpoint that is served; None where the server is not ours.
        view: What of each image is shown (:class:`opd_recipes.views.View`, its steps); None: the image as it is.
    """

    model: str
    max_tokens: int
    thinking: bool = False
    seed: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    view: list[dict[str, Any]] | None = None

    def request(self, question: Question) -> dict[str, Any]:
        """The fields of a chat completion, the model's name excepted. Reads and encodes the images.

        Raises:
            RecipeError, ViewError: An image cannot be read.
        """
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": data_url(image)}} for image in question.images
        ]
        content.append({"type": "text", "text": question.text})
        fields = {
            "messages": [{"role": "user", "content": content}],
            "temperature": 0.0,
            "top_p": 1.0,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "chat_template_kwargs": {"enable_thinking": self.thinking},
            **self.extra,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def fingerprint(self, benchmark: str, split: str | None) -> dict[str, Any]:
        """What a later run must agree in to use the replies of this one."""
        return {
            "benchmark": benchmark,
            "split": split,
            "model": self.model,
            "weights": self.weights,
            "view": self.view,
            "thinking": self.thinking,
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "seed": self.seed,
            "extra": dict(self.extra),
        }


def data_url(source: ImageSource) -> str:
    """An upright PNG or JPEG as the file it is, so that no pixel changes; everything else as PNG.

    Raises:
        RecipeError, ViewError: It cannot be read, or is no image.
    """
    data = source.read()
    kind = _plain_kind(data)
    if kind is None:
        buffer = io.BytesIO()
        decode({"bytes": data, "path": source.name}).save(buffer, format="PNG")
        data, kind = buffer.getvalue(), "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _plain_kind(data: bytes) -> str | None:
    """``png`` or ``jpeg`` where the file can be sent as it is: servers differ in whether they turn a picture upright."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            kind = {"PNG": "png", "JPEG": "jpeg"}.get(image.format or "")
            # A PNG without the chunk would be decoded as a whole to look for it.
            turned = "exif" in image.info and image.getexif().get(ORIENTATION, 1) != 1
    except Exception:  # a damaged file can raise nearly anything; decode() then says what is wrong
        return None
    return None if turned else kind


def prompt_hash(question: Question) -> str:
    """sha256 of the text that is sent."""
    return hashlib.sha256(question.text.encode("utf-8", "surrogatepass")).hexdigest()


def images_hash(question: Question) -> str:
    """sha256 over the digests of the image files, in order. Reads them."""
    digests = [hashlib.sha256(image.read()).hexdigest() for image in question.images]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()
