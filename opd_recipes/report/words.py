"""Numbers and texts as a person reads them."""

from __future__ import annotations

import math
import unicodedata

#: What stands in the place of white space that a reader should see; a line break is kept behind its mark.
SPACES = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽", "\u3000": "□"}


def number(value: float | None, digits: int = 3) -> str:
    """To three significant digits, without an exponent where it can be avoided."""
    if value is None or not math.isfinite(value):
        return "not finite" if value is not None else "none"
    if value == 0:
        return "0"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    size = math.floor(math.log10(abs(value)))
    if -4 <= size < 6:
        return f"{value:,.{max(0, digits - 1 - size)}f}"
    return f"{value:.{digits - 1}e}"


def percent(share: float) -> str:
    """A fraction as percent, with a decimal near 0 and near 100."""
    value = round(100 * share, 6)  # sums of fractions end in 0.0000000001
    return f"{value:.0f}%" if 10 <= abs(value) <= 90 or value == round(value) else f"{value:.1f}%"


def points(difference: float) -> str:
    """A difference of fractions in percentage points, signed."""
    return f"{100 * difference:+.1f} points"


def printable(text: object, limit: int | None = None) -> str:
    """Text with invisible and reordering characters spelled out (not white space), cut behind ``limit`` characters."""
    whole = str(text)
    shown = whole if limit is None else whole[:limit]
    more = "" if len(shown) == len(whole) else f" ... ({len(whole) - len(shown)} more characters)"
    return "".join(map(_spelled, shown)) + more


def _spelled(character: str) -> str:
    # Cc control, Cf formatting (among them what reverses the order of text), Cs half of a pair, Co and Cn unassigned.
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn"):
        return character
    return f"\\u{ord(character):04x}"


def token(text: object) -> str:
    """A token with its white space visible; an empty one has a mark, too."""
    return "".join(SPACES.get(c) or _spelled(c) for c in str(text)) or "∅"
