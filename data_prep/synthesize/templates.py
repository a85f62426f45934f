"""The prompts: text files with ``{fields}``, built in or copied and edited by the user.

Fields are replaced by plain text in one pass: braces elsewhere mean nothing, and a value that looks like a field stays so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from data_prep.rows import DataError

BUILT_IN = Path(__file__).parent / "prompts"
#: Prompt -> the fields that it may have; those in REQUIRED it must have.
FIELDS = {
    "objects": ("max_objects",),
    "box": ("object", "box_format"),
    "questions": ("object", "count", "language"),
    "validate": ("object", "question"),
    "answer": ("question",),
    "choices": ("question", "answer", "count", "language"),
    "hard": ("question",),
}
REQUIRED = {"box": {"object"}, "validate": {"question"}, "answer": {"question"}, "hard": {"question"}}
REQUIRED["choices"] = {"question", "answer"}


class Templates:
    """The prompts of a run.

    Args:
        folder: Has ``NAME.txt`` for each of ``names``.
        names: Keys of :data:`FIELDS`.

    Raises:
        DataError: A file is missing, empty or not UTF-8, or lacks a field that it needs.
    """

    def __init__(self, folder: Path = BUILT_IN, names: Sequence[str] = tuple(FIELDS)):
        self._texts = {name: _load(folder / f"{name}.txt", name) for name in names}

    def fill(self, name: str, **values: object) -> str:
        """The prompt ``name`` with its fields replaced."""
        known = FIELDS[name]
        pattern = re.compile("|".join(re.escape("{" + field + "}") for field in known))
        return pattern.sub(lambda match: str(values[match[0][1:-1]]), self._texts[name])


def _load(path: Path, name: str) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: the prompt cannot be read ({error}); --write-prompts DIR writes all of them, to be edited"
        ) from error
    missing = [field for field in REQUIRED.get(name, ()) if "{" + field + "}" not in text]
    if missing or not text:
        wanted = ", ".join("{" + field + "}" for field in missing) or "a prompt"
        raise DataError(f"{path}: it lacks {wanted}; compare with {BUILT_IN / path.name}")
    return text


def write_prompts(folder: Path) -> list[Path]:
    """Copy the built-in prompts into ``folder``.

    Raises:
        DataError: One is there already: it may have been edited.
    """
    targets = [folder / f"{name}.txt" for name in FIELDS]
    for target in targets:
        if target.exists():
            raise DataError(f"{target}: it exists already and may have been edited; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for target in targets:
        target.write_text((BUILT_IN / target.name).read_text(encoding="utf-8"), encoding="utf-8")
    return targets
