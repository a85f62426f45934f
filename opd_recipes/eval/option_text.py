"""The options of a question, and where a reply names one of them: by its letter or by its text."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from opd_recipes.eval.reply_text import show, spell, strip_markup
from opd_recipes.registry import RecipeError

NEGATION = re.compile(r"\b(?:not|no|never|neither|nor|without|none|cannot)\b|n't\b|不|没|非|未|无", re.IGNORECASE)
#: What may stand between "the answer is" and the answer.
_PREFIX = re.compile(
    r"(?:(?:clearly|definitely|probably|most likely|likely|therefore|thus|simply|indeed|just|still|actually|either|both|"
    r"i think|i believe|i'd say|it is|it's|that|the|option|choice|letter|answer|correct|one)(?![A-Za-z])[ ,:]*"
    r"|(?:选项|选择|选|是|为)[ ,:]*){0,6}",
    re.IGNORECASE,
)
_NOT_FIRST = re.compile(r"(?:not|n't|neither|never|no longer|none|isn't)\b|不|非", re.IGNORECASE)
_LETTER = re.compile(
    r"(?P<open>[\"'(\[<{ ]{0,3})(?P<letter>[A-Za-z])(?![A-Za-z0-9_+#&]|'[A-Za-z]|-\w|\.[A-Za-z]\b) ?(?P<close>[\])>}\"']{0,3})"
)
_AND = re.compile(
    r"[.)]? ?(?P<and>,? ?\bor\b|,? ?\band\b|,|/|&|\+|、|或者?|和|与|还是|以及|及) ?"
    r"(?:(?:maybe|possibly|perhaps|even|option|选项|也许|可能|either|both) ?)?",
    re.IGNORECASE,
)
_LIST_ENDS = re.compile(r"(?: ?[.,;!?)/&、。]|,? ?(?:or|and)\b| ?(?:或|和|与|都)|$)", re.IGNORECASE)
_OR = re.compile(r"(?:\bor|或者?|还是) ?(?:option |选项)?", re.IGNORECASE)
_RATHER = re.compile(r"\b(?:rather|not|instead|over|unlike|than)\b|n't\b|不", re.IGNORECASE)
#: Words that follow the letter A, and never the article.
_AFTER_LETTER = re.compile(
    r"(?:because|since|as|and|or|for|is|was|due|based|given|with|from|according|which|but|not|although|though|where|rather|"
    r"instead|by|in|on|at|to|if|that|would|seems|appears|matches|here|correctly|best)\b"
)
_CUTS = (
    re.compile(r"[.!?](?=\s|$)|[。!?;]"),
    re.compile(r",|;| - | \(|:|、"),
    re.compile(
        r" (?:because|since|as|so|due to|based on|which|given|in th(?:e|is) (?:image|picture|photo|scene))\b", re.I
    ),
)
_ARTICLE = re.compile(r"(?:the|an?) (?=\S)")
_EDGE = " .,:;!?\"'()[]{}<>*。、"


def normalise_option(text: str) -> str:
    """Lower case, without markup, an article in front, or punctuation at the ends (unless there is nothing else)."""
    plain = strip_markup(spell(text)).replace("\n", " ").casefold()
    bare = plain.strip(_EDGE)
    return _ARTICLE.sub("", bare, count=1) if _ARTICLE.match(bare) else bare or plain


class Claim(NamedTuple):
    """What a piece of a reply says.

    Attributes:
        letter: The option; None where the piece is undecided.
        fault: Why it is: ``hedge``, ``disagree`` or ``no such option``; empty otherwise.
        why: The words.
        bare: It is a letter and nothing else.
        by_text: It is the text of an option, without its letter.
    """

    letter: str | None
    fault: str
    why: str
    bare: bool = False
    by_text: bool = False


class Named(NamedTuple):
    """A letter in a reply: which, where it ends, and whether brackets or punctuation set it apart."""

    letter: str
    end: int
    apart: bool


@dataclass(frozen=True)
class Options:
    """Letters and texts.

    Raises:
        RecipeError: There are none, or a letter is no capital from A to Z.
    """

    texts: Mapping[str, str]

    def __post_init__(self) -> None:
        wrong = [
            key for key in self.texts if not (isinstance(key, str) and len(key) == 1 and key in string.ascii_uppercase)
        ]
        if wrong or not self.texts:
            raise RecipeError(f"options: {wrong or 'there are none'}; name each by one letter from A to Z")

    @cached_property
    def by_text(self) -> dict[str, str]:
        """Normalised text -> letter, of texts that only one option has; no text of one letter, which would be a letter."""
        found: dict[str, list[str]] = {}
        for letter, text in self.texts.items():
            found.setdefault(normalise_option(text), []).append(letter)
        return {
            text: letters[0]
            for text, letters in found.items()
            if len(letters) == 1 and text and not (len(text) == 1 and text.isascii() and text.isalpha())
        }

    def named_by_text(self, piece: str) -> str | None:
        """The option whose text is the whole piece, or the piece up to the end of its sentence or clause."""
        line = piece.split("\n", 1)[0][:2000]
        for cut in (None, *_CUTS):
            found = cut.search(line) if cut else None
            if cut and not found:
                continue
            letter = self.by_text.get(normalise_option(line[: found.start()] if found else line))
            if letter:
                return letter
        return None

    def named(self, piece: str, position: int = 0) -> Named | None:
        """The letter at a position, whether or not it is an option's; None where it is a word, an article or a pronoun."""
        found = _LETTER.match(piece, position)
        if not found:
            return None
        letter, rest = found["letter"], piece[found.end() : found.end() + 40]
        apart = (
            not rest.strip()
            or bool(re.match(r"[.,:;!?)\n]| - |[。、/]", rest))
            or bool(re.match(r" ?[^\x00-\x7f]", rest))
        )
        bracketed = bool(found["open"].strip()) and bool(found["close"])
        apart = apart or bracketed or bool(found["close"])
        if letter.islower():
            ends = not rest.strip() or bool(re.match(r"[.:;!?](?:\s|$)", rest))
            return (
                Named(letter.upper(), found.end(), apart)
                if bracketed or found["close"] or ends and letter != "i"
                else None
            )
        if letter == "I" and (
            "I" not in self.texts or not (bracketed or found["close"] or re.match(r"\s*$|[.:;!?](?:\s|$)|[。\n]", rest))
        ):
            return None
        if letter == "A" and not apart and not _AFTER_LETTER.match(rest.lstrip()):
            return None
        return Named(letter.upper(), found.end(), apart)

    def claim(self, piece: str) -> Claim | None:
        """What stands after "the answer is": a letter, a text, or both. None where it is neither."""
        text = self.named_by_text(piece)
        start = 0
        if not text:
            prefix = _PREFIX.match(piece)
            start = prefix.end() if prefix else 0
            if _NOT_FIRST.match(piece, start):
                return None
            named = self.named(piece, start)
            if named:
                return self._claim_of_letter(piece, named)
            text = self.named_by_text(piece[start:])
        later = self._letter_behind(piece)
        if later and text and later != text:
            return Claim(None, "disagree", f"{show(piece)}: text of {text}, letter {later}")
        letter = text or later
        return Claim(letter, "", show(piece), by_text=not later) if letter else None

    def _claim_of_letter(self, piece: str, named: Named) -> Claim | None:
        both = self._hedged_with(piece, named)
        if both and named.letter in self.texts:
            return Claim(None, "hedge", f"{show(piece)}: {named.letter} and {both}")
        rest = re.sub(r"^(?:选项|项)?[ .):,\-=>]*", "", piece[named.end :].split("\n", 1)[0])
        if re.match(r"不|错|是错", rest):
            return None
        if named.letter not in self.texts:
            return (
                Claim(None, "no such option", f"{show(piece)}: there is no option {named.letter}")
                if named.apart
                else None
            )
        again = self._or_another(rest, named.letter)
        if again:
            return Claim(None, "hedge", f"{show(piece)}: {named.letter} or {again}")
        other = self.named_by_text(rest) if rest else None
        if other and other != named.letter and self._other_text(rest, named.letter):
            return Claim(None, "disagree", f"{show(piece)}: letter {named.letter}, text of {other}")
        return Claim(named.letter, "", show(piece), bare=not rest.strip(_EDGE))

    def _or_another(self, rest: str, letter: str) -> str | None:
        """The letter of "(A) red or (B) blue", and of "A: B"."""
        bare = self.named(rest) if len(rest.strip(_EDGE)) == 1 else None
        if bare and bare.letter in self.texts and bare.letter != letter:
            return bare.letter
        stop = _CUTS[0].search(rest)
        sentence = rest[: min(stop.start() if stop else len(rest), 300)]
        for found in _OR.finditer(sentence):
            second = self.named(sentence, found.end())
            refused = _RATHER.search(sentence, 0, found.start())
            if second and second.apart and second.letter in self.texts and second.letter != letter and not refused:
                return second.letter
        return None

    def _other_text(self, rest: str, letter: str) -> bool:
        own = normalise_option(self.texts[letter])
        return not (own and normalise_option(rest[: len(self.texts[letter]) + 20]).startswith(own))

    def _hedged_with(self, piece: str, named: Named) -> str | None:
        conjunction = _AND.match(piece, named.end)
        if not conjunction:
            return None
        second = self.named(piece, conjunction.end())
        if not second or second.letter == named.letter or second.letter not in self.texts:
            return None
        either = conjunction["and"].strip(" ,").lower() in ("or", "/", "或", "或者", "还是")
        return second.letter if either or _LIST_ENDS.match(piece, second.end) else None

    def _letter_behind(self, piece: str) -> str | None:
        """The letter of "the red one (C)", if only one is named so in the sentence."""
        stop = _CUTS[0].search(piece)
        sentence = piece[: min(stop.start() if stop else len(piece), 300)]
        found = set(re.findall(r"[(\[]([A-Z])[)\]]|\b(?:option|choice) \(?([A-Z])\b", sentence))
        letters = {a or b for a, b in found}
        return letters.pop() if len(letters) == 1 and letters <= set(self.texts) else None

    def full_claim(self, piece: str) -> Claim | None:
        """What a piece says that is an answer and nothing else: "C", "(c)", "Option C.", "C. red", "red", "A or B"."""
        text = self.by_text.get(normalise_option(piece))
        if text:
            return Claim(text, "", show(piece), by_text=True)
        start = re.match(
            r"(?:(?:the )?(?:option|choice|letter|选项|选)|(?:it's|it is|either|both|probably|most likely|likely) )? ?",
            piece,
            re.IGNORECASE,
        )
        named = self.named(piece, start.end() if start else 0)
        if not named:
            return None
        claim = self._claim_of_letter(piece, named)
        if not claim or claim.fault == "hedge" and (len(piece) > 60 or "?" in piece[:-1]):
            return None
        if claim.letter and not (claim.bare or self._only(piece, named)):
            return None
        return None if claim.fault == "no such option" and piece[named.end :].strip(_EDGE) else claim

    def _only(self, piece: str, named: Named) -> bool:
        rest = re.sub(r"^(?:选项|项)?[ .):,\-=>]*", "", piece[named.end :])
        return normalise_option(rest) in (normalise_option(self.texts[named.letter]), "")
