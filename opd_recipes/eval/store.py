"""The folder of one benchmark's replies: ``settings.json``, ``replies.jsonl`` and, where some failed, ``failures.jsonl``.

A reply is appended when it comes and never asked for again. The settings are written before the first, and a run with others is
refused: replies of two models, prompts or limits never meet in one score.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.synthesize.driver import write_whole
from data_prep.synthesize.ledger import Ledger
from opd_recipes.registry import RecipeError


@dataclass(frozen=True)
class Recorded:
    """A reply as it stands in the file.

    Args:
        prompt, images: Hashes of what was asked (:mod:`opd_recipes.eval.asking`).
        at: Unix time at which it came.
        seconds: From sending the request to the last byte.
    """

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float
    prompt: str
    images: str
    at: float


class Store:
    """Replies of one model to one benchmark, in ``folder``."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.replies_file = folder / "replies.jsonl"
        self.settings_file = folder / "settings.json"
        self.failures_file = folder / "failures.jsonl"

    def settings(self) -> dict[str, Any] | None:
        """The fingerprint under which the replies were asked for; None where nothing was asked yet.

        Raises:
            RecipeError: There are replies without settings, or the file is damaged.
        """
        if not self.settings_file.exists():
            if self.replies_file.exists():
                raise RecipeError(f"{self.folder}: it has replies but no settings.json; {self._remedy()}")
            return None
        try:
            return json.loads(self.settings_file.read_text())
        except ValueError as error:
            raise RecipeError(f"{self.settings_file} is damaged ({error}); {self._remedy()}") from error

    def agree(self, fingerprint: Mapping[str, Any], keys: Iterable[str] | None = None) -> None:
        """Check the settings of a new run against those of the replies.

        Args:
            keys: Those that must agree; None: all.

        Raises:
            RecipeError: They differ.
        """
        past = self.settings()
        if past is None:
            return
        names = set(past) | set(fingerprint) if keys is None else set(keys)
        changed = [
            f"{name} was {_shown(past.get(name))} and is {_shown(fingerprint.get(name))}"
            for name in sorted(names)
            if past.get(name) != fingerprint.get(name)
        ]
        if changed:
            raise RecipeError(
                f"{self.folder}: its replies were asked with other settings: {'; '.join(changed)}. {self._remedy()}"
            )

    def begin(self, fingerprint: Mapping[str, Any]) -> None:
        """Write the settings, before anything is asked."""
        if not self.settings_file.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.settings_file, json.dumps(fingerprint, indent=1) + "\n")

    def ledger(self) -> Ledger:
        """The replies, to be added to; its key is the question's id."""
        return Ledger(self.replies_file)

    def recorded(self) -> dict[str, Recorded]:
        """The replies by question. An unfinished last line, which a kill leaves, is no reply.

        Raises:
            RecipeError: Another line is damaged.
        """
        if not self.replies_file.exists():
            return {}
        replies: dict[str, Recorded] = {}
        with self.replies_file.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    entry = json.loads(line)
                    replies[entry["key"]] = Recorded(**{name: entry[name] for name in Recorded.__annotations__})
                except (ValueError, KeyError, TypeError) as error:
                    raise RecipeError(
                        f"{self.replies_file}, line {number} is damaged; remove this line (its question is asked again)"
                    ) from error
        return replies

    def write_failures(self, failures: Mapping[str, str]) -> None:
        """The questions without a reply, with the reason; the next run asks them again."""
        if failures:
            lines = [json.dumps({"id": name, "reason": reason}) for name, reason in failures.items()]
            write_whole(self.failures_file, "\n".join(lines) + "\n")
        else:
            self.failures_file.unlink(missing_ok=True)

    def read_failures(self) -> dict[str, str]:
        if not self.failures_file.exists():
            return {}
        entries = map(json.loads, self.failures_file.read_text().splitlines())
        return {entry["id"]: entry["reason"] for entry in entries}

    def _remedy(self) -> str:
        return f"Name another --out, or remove {self.folder} to ask everything again"


def _shown(value: Any) -> str:
    return json.dumps(value)
