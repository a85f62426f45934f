"""Options of a multiple-choice question out of its prompt, a list, or a label."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: A., (A), A) or A: where no letter or number stands in front of it.
_MARKER = re.compile(r"(?<![A-Za-z0-9'])(?:[(（]([A-Za-z])[)）]|([A-Za-z])[.):：、．])[^\S\n]*")


def parse_options(text: str) -> dict[str, str]:
    """Letter (upper case) to text, of the longest run A, B, C, ... in the text; empty where there is none.

    Of several as long as each other the one whose letters begin lines, and of these the last: options follow the question.
    An option ends at the next one, the last at the end of its line: an instruction on a line of its own is no part of it.
    Options on one line may be separated by commas or semicolons.
    """
    markers = [(marker, _letter(marker)) for marker in _MARKER.finditer(text)]
    runs = [_run(markers[start:]) for start, (_, letter) in enumerate(markers) if letter == "A"]
    best = max(runs, key=lambda run: (len(run), sum(_starts_line(text, m) for m in run), run[0].start()), default=[])
    if len(best) < 2:
        return {}
    return {chr(ord("A") + i): _option(text, best, i) for i in range(len(best))}


def _starts_line(text: str, marker: re.Match[str]) -> bool:
    return not text[: marker.start()].rpartition("\n")[2].strip()


def _letter(marker: re.Match[str]) -> str:
    return (marker[1] or marker[2]).upper()


def _run(markers: Sequence[tuple[re.Match[str], str]]) -> list[re.Match[str]]:
    """The markers of A, B, C, ... in the style of the first, whatever stands between them."""
    run: list[re.Match[str]] = []
    for marker, letter in markers:
        if run and (marker[1] is None) != (run[0][1] is None):
            continue
        if run and letter == "A":
            break
        if letter == chr(ord("A") + len(run)):
            run.append(marker)
    return run


def _option(text: str, run: Sequence[re.Match[str]], i: int) -> str:
    if i + 1 < len(run):
        return text[run[i].end() : run[i + 1].start()].strip().rstrip(",;，；").strip()
    return text[run[i].end() :].partition("\n")[0].strip()


def labelled(options: Sequence[str]) -> dict[str, str]:
    """Options of a list: by their own labels where all have one, like ``(A) red``, else by A, B, C, ... in order."""
    texts = [str(option).strip() for option in options]
    markers = [marker for text in texts if (marker := _MARKER.match(text))]
    own = [_letter(marker) for marker in markers]
    in_order = [chr(ord("A") + i) for i in range(len(texts))]
    if texts and sorted(own) == in_order:
        bare = {letter: text[m.end() :].strip() for letter, text, m in zip(own, texts, markers, strict=True)}
        return dict(sorted(bare.items()))
    return dict(zip(in_order, texts, strict=True))


def letter_of(answer: str) -> str:
    """``A`` of ``A``, ``(a)``, ``A.`` or ``(A) red``; the text itself, in upper case, where it is none of these."""
    text = answer.strip()
    marker = _MARKER.match(text)
    return _letter(marker) if marker else text.upper()
