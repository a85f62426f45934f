"""What is wrong with the text of a row: its messages and its answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from data_prep.faults import Finding
from data_prep.rows import PLACEHOLDER, RESERVED, show

ROLES = ("system", "user", "assistant", "tool")

#: Placeholders of verl for what recipes draw no views of.
OTHER_MEDIA = re.compile("<video>|<audio>")

#: Control characters (tab, line feed and carriage return are text), the mark of failed decoding, a byte order mark.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd\ufeff]")


class SpecialTokens:
    """The special tokens of a tokenizer, found in text.

    Args:
        tokens: As they are written.
    """

    def __init__(self, tokens: Iterable[str]):
        longest_first = sorted({token for token in tokens if token and token != PLACEHOLDER}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def findings(self, text: str, where: str) -> list[Finding]:
        """This model's special tokens, other models', and characters that are no text."""
        found = []
        text = text.replace(PLACEHOLDER, "\n")
        if own := self._pattern.search(text):
            found.append(Finding("special_token", f"{where} contains {own[0]}, a special token of the model"))
        foreign = [token for token in RESERVED.findall(text) if token.startswith("<|")]
        foreign = [token for token in foreign if not self._pattern.fullmatch(token)]
        if foreign:
            found.append(Finding("foreign_token", f"{where} contains {foreign[0]}"))
        if control := CONTROL.search(text):
            around = text[max(0, control.start() - 10) : control.end() + 10]
            found.append(Finding("control_characters", f"{where} contains U+{ord(control[0]):04X}: {show(around)}"))
        return found


def prompt_findings(prompt: Any, images: int, special: SpecialTokens) -> list[Finding]:
    """Check a row's messages.

    Args:
        prompt: A list of ``{"role": ..., "content": text}``.
        images: Number of images that need a placeholder.
        special: Of the model.
    """
    if not isinstance(prompt, list) or not prompt:
        return [Finding("prompt_missing", f"the prompt is {show(prompt)}")]
    found: list[Finding] = []
    for number, message in enumerate(prompt):
        found += _message_findings(message, f"message {number}", special)
    if any(finding.kind in ("content_missing", "content_type") for finding in found):
        return found
    found += _order_findings([message["role"] for message in prompt])
    contents = [message["content"] for message in prompt]
    asked = [message["content"] for message in prompt if message["role"] != "system"]
    if not any(OTHER_MEDIA.sub("", text).replace(PLACEHOLDER, "").strip() for text in asked):
        found.append(Finding("question_empty", f"the messages {show(contents)} have no question"))
    if media := next((hit for text in contents if (hit := OTHER_MEDIA.search(text))), None):
        found.append(Finding("other_media", f"the prompt contains {media[0]}"))
    placeholders = sum(text.count(PLACEHOLDER) for text in contents)
    if placeholders != images:
        found.append(Finding("placeholders", f"{placeholders} {PLACEHOLDER} in the prompt for {images} images"))
    return found


def _message_findings(message: Any, where: str, special: SpecialTokens) -> list[Finding]:
    if not isinstance(message, dict):
        return [Finding("content_type", f"{where} is {show(message)}, not a role with its content")]
    role, content = message.get("role"), message.get("content")
    found = []
    if role not in ROLES:
        found.append(Finding("role", f"{where} has the role {show(role)}"))
    if content is None:
        return [*found, Finding("content_missing", f"{where} has no content")]
    if not isinstance(content, str):
        return [*found, Finding("content_type", f"{where} has the content {show(content)}")]
    return found + special.findings(content, where)


def _order_findings(roles: Sequence[Any]) -> list[Finding]:
    if "user" not in roles:
        return [Finding("no_question", "no message is the user's")]
    if roles[-1] == "assistant":
        return [
            Finding("no_question", "the last message is the assistant's: the model would be asked to answer itself")
        ]
    return []


def answer_findings(reward: Any, needed_by: str | None, special: SpecialTokens | None) -> list[Finding]:
    """Check a row's ``reward_model.ground_truth``.

    Args:
        reward: The ``reward_model`` column.
        needed_by: Who reads the answer, for the message; None where nobody does.
        special: Of the model, where the answer becomes part of a prompt.
    """
    answer = reward.get("ground_truth") if isinstance(reward, dict) else None
    if answer is None:
        return [Finding("answer_missing", f"the row has no reward_model.ground_truth, which {needed_by} needs")][
            : needed_by is not None
        ]
    if not isinstance(answer, str):
        return []  # its type is the column's, and reported once
    if not answer.strip():
        return [Finding("answer_empty", f"reward_model.ground_truth is {show(answer)}, and {needed_by} needs it")][
            : needed_by is not None
        ]
    if special is not None:
        return special.findings(answer, "the answer")
    return [finding for finding in SpecialTokens(()).findings(answer, "the answer") if finding.kind != "foreign_token"]
