"""Loader of one's own questions: JSON lines, JSON, parquet or separated values, and the rows that this product trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opd_recipes.eval.layouts import image_of, union
from opd_recipes.eval.prompt_options import labelled, letter_of, parse_options
from opd_recipes.eval.question import KINDS, Kind, Question
from opd_recipes.eval.tables import Row, find_files, read_rows
from opd_recipes.registry import RecipeError

_ENDINGS = (".parquet", ".jsonl", ".json", ".tsv", ".csv")
_IMAGES = ("images", "image")
_BINARY = (*_IMAGES, "bbox_images")


def custom(root: Path, split: str | None, images: bool) -> Iterator[Question]:
    """Your own rows. Columns; only the first two must be there:

    - ``question`` (or ``text``, ``prompt``): sent as it is; with ``options``, these are listed behind it;
      verl's ``prompt`` (one user turn, ``<image>`` taken out) does as well;
    - ``answer`` (or ``reward_model.ground_truth``): one, or a list of accepted ones; for a choice the letter or the text;
    - ``images`` (or ``image``): paths beside the file, bytes, base64, or verl's ``{"bytes": ..., "path": ...}``;
    - ``id``: else the file's name and the row's number;
    - ``options``: a list, or letter to text;
    - ``kind``: choice, yes_no, number or short; else options make a choice, and the answer's form tells the others apart;
    - ``category``: a name, or a mapping of names; else verl's ``data_source``;
    - ``group``: rows that are resampled together; ``bbox``: x0, y0, x1, y1 in pixels; ``tolerance``: relative, for numbers.
    """
    files = _files(root)
    binary = files[0].suffix == ".parquet"
    for row in read_rows(files, drop=_BINARY if binary and not images else ()):
        options = _options(row)
        answers = _answers(row)
        kind = _kind(row, answers, options)
        yield Question(
            id=str(_or(row.find("id"), f"{row.file.name}:{row.number}")),
            images=tuple(image_of(image, row, (row.file.parent,)) for image in _list(row.find(*_IMAGES)))
            if images
            else (),
            text=_text(row, options),
            kind=kind,
            answer=tuple(_accepted(answer, kind, options, row) for answer in answers),
            options=options if kind == "choice" else None,
            category=_category(row),
            group=str(_or(row.find("group"), "")),
            bbox=union(row.find("bbox"), row),
            tolerance=float(row.find("tolerance") or 0.0),
        )


def _files(root: Path) -> list[Path]:
    files = find_files(root, *(f"*{ending}" for ending in _ENDINGS))
    kinds = {file.suffix for file in root.glob("*") if file.suffix in _ENDINGS} if root.is_dir() else set()
    if len(kinds) > 1:
        raise RecipeError(f"{root}: it has files of several kinds ({', '.join(sorted(kinds))}); name the file to use")
    return files


def _category(row: Row) -> dict[str, str]:
    value = row.find("category", "data_source")
    names = value if isinstance(value, Mapping) else {"category": value}
    if "extra" in names:
        raise RecipeError(f"{row}: 'extra' cannot be the name of a kind of category, since other scores are called so")
    return {str(kind): str(name) for kind, name in names.items() if name is not None}


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else () if value is None else (value,)


def _text(row: Row, options: Mapping[str, str] | None) -> str:
    value = row.get("question", "text", "prompt")
    text = _turn(value, row) if isinstance(value, list) else str(value)
    text = text.replace("<image>", "").strip()
    if options and row.find("options") is not None:
        text += "\n" + "\n".join(f"({letter}) {option}" for letter, option in options.items())
    return text


def _turn(turns: Sequence[Any], row: Row) -> str:
    if len(turns) != 1 or not isinstance(turns[0], Mapping) or turns[0].get("role") != "user":
        roles = [turn.get("role") if isinstance(turn, Mapping) else turn for turn in turns]
        raise RecipeError(f"{row}: expected a prompt of one user turn, got turns of {roles!r:.120}")
    content = turns[0].get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    if not isinstance(content, str):
        raise RecipeError(f"{row}: expected the user's turn as text, got {content!r:.80}")
    return content


def _options(row: Row) -> dict[str, str] | None:
    value = row.find("options", "choices")
    if isinstance(value, Mapping):
        return {str(k).upper(): str(v) for k, v in value.items() if v is not None}
    if value is not None:
        return labelled(_list(value))
    given = row.find("question", "text", "prompt")
    found = parse_options(_turn(given, row) if isinstance(given, list) else str(given or ""))
    return found if found and all(letter_of(answer) in found for answer in _answers(row)) else None


def _answers(row: Row) -> tuple[str, ...]:
    value = row.find("answer", "answers")
    if value is None and isinstance(reward := row.find("reward_model"), Mapping):
        value = reward.get("ground_truth")
    answers = tuple(str(answer).strip() for answer in _list(value) if answer is not None and str(answer).strip())
    if not answers:
        raise RecipeError(f"{row}: looked for the answer in 'answer' and 'reward_model.ground_truth', found none")
    return answers


def _kind(row: Row, answers: Sequence[str], options: Mapping[str, str] | None) -> Kind:
    kind = row.find("kind")
    if kind is not None:
        if kind not in KINDS:
            raise RecipeError(f"{row}: unknown kind {kind!r}; known: {', '.join(KINDS)}")
        if kind == "choice" and not options:
            raise RecipeError(f"{row}: kind is choice, but there are no options: add the column 'options'")
        return kind
    if options:
        return "choice"
    if all(answer.lower() in ("yes", "no") for answer in answers):
        return "yes_no"
    return "number" if all(_is_number(answer) for answer in answers) else "short"


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "").rstrip("%"))
    except ValueError:
        return False
    return True


def _accepted(answer: str, kind: Kind, options: Mapping[str, str] | None, row: Row) -> str:
    """The answer in the form in which answers of its kind are compared: a letter, ``yes`` or ``no``, or as it is."""
    if kind != "choice":
        return answer.lower() if kind == "yes_no" else answer
    options = options or {}
    same = [letter for letter, text in options.items() if text.casefold() == answer.casefold()]
    if len(same) == 1 and answer.upper() not in options:
        return same[0]
    letter = letter_of(answer)
    if letter not in options:
        raise RecipeError(
            f"{row}: the answer {answer!r} is none of the options {', '.join(options)}, nor the text of one"
        )
    return letter
