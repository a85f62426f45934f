"""Numbers in text: digits with separators of any country, percent, powers of ten, English and Chinese words."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

from opd_recipes.eval.reply_text import spell


class Number(NamedTuple):
    """A number and whether it is a percentage (45% is 45 with ``percent``)."""

    value: Decimal
    percent: bool = False

    def __str__(self) -> str:
        text = format(self.value, "f")
        text = text.rstrip("0").rstrip(".") if "." in text else text
        return ("0" if text in ("-0", "") else text) + ("%" if self.percent else "")


class Found(NamedTuple):
    """A number in a text. ``number`` is None for digits that are no one number (1.2.3), or are too long to be one."""

    number: Number | None
    start: int
    end: int


_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "k": 3}
_SCALES |= {"百": 2, "千": 3, "万": 4, "亿": 8}
_DIGITS = re.compile(
    r"(?:(?P<sign>[-+])|(?P<minus>\bminus |\bnegative |负))?(?P<currency>[€£¥] ?)?(?P<digits>\d(?:[\d.,]*\d)?|\.\d+)"
    r"(?P<power>e[+-]?\d{1,3}(?!\w)| ?[×x*] ?10 ?\^ ?\{?[+-]?\d{1,3}\}?)?(?P<over> ?/ ?\d{1,9}(?![\d/]))?"
    r"(?P<scale> (?:hundred|thousand|million|billion|trillion)\b|k\b| ?(?:百(?!分)|千(?![克米瓦卡])|万|亿))?"
    r"(?P<percent> ?%| ?per ?cent(?:age points?)?\b|个?百分点)?",
    re.IGNORECASE,
)
_UNITS = re.compile(
    r"(?:mm|cm|dm|m|km|nm|in|ft|yd|mi|g|kg|mg|t|lb|lbs|oz|l|ml|s|sec|secs|min|mins|h|hr|hrs|ms|px|mph|kmh|km/h|m/s|w|kw|v|a|"
    r"hz|khz|mhz|ghz|mb|gb|kb|tb|usd|eur|c|f|am|pm|°c|°f|x|years?|degrees?|j|n|pa|mol)(?:[²³23](?!\d))?(?![A-Za-z])",
    re.IGNORECASE,
)
_GROUPS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d?(?:,\d{2})+,\d{3}")
_DOT_GROUPS = re.compile(r"[1-9]\d{0,2}(?:\.\d{3}){2,}")
_LONGEST = 40


def _digits(text: str) -> Decimal | None:
    """The number that digits with separators mean; None where they mean none or several.

    Both kinds: the last one is the decimal mark. Commas alone: groups of three (or of two, as in India) are thousands, one
    other comma is a decimal comma. One dot is always a decimal point.
    """
    commas, dots = text.count(","), text.count(".")
    if len(text) > _LONGEST:
        return None
    if commas and dots:
        mark = max(",.", key=text.rfind)
        whole, _, part = text.rpartition(mark)
        other = "." if mark == "," else ","
        grouped = re.fullmatch(r"\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}", whole.replace(other, ","))
        return Decimal(f"{whole.replace(other, '')}.{part}") if grouped and mark not in whole else None
    if commas:
        if _GROUPS.fullmatch(text):
            return Decimal(text.replace(",", ""))
        return Decimal(text.replace(",", ".")) if commas == 1 else None
    if dots > 1:
        return Decimal(text.replace(".", "")) if _DOT_GROUPS.fullmatch(text) else None
    return Decimal(text)


def _from_digits(text: str, found: re.Match[str]) -> Found | None:
    before = text[found.start() - 1] if found.start() else " "
    signed = bool(found["sign"] or found["minus"])
    if before.isascii() and (before.isalpha() or before == "_") and not signed:
        return None
    after = text[found.end() : found.end() + 12]
    if re.match(r"[A-Za-z_]", after) and not _UNITS.match(after) or re.match(r"点[半钟\d一二三四五]", after):
        return None
    value = _digits(found["digits"])
    if value is None:
        return Found(None, found.start(), found.end())
    negative = bool(found["minus"]) or (found["sign"] == "-" and not (before.isalnum() or before in ")%"))
    if found["over"]:
        below = Decimal(found["over"].strip(" /"))
        if not below:
            return Found(None, found.start(), found.end())
        value = value / below
    if found["power"]:
        value = value.scaleb(int(re.findall(r"[+-]?\d+", found["power"])[-1]))
    if found["scale"]:
        value = value.scaleb(_SCALES[found["scale"].strip().lower()])
    return Found(Number(-value if negative else value, bool(found["percent"])), found.start(), found.end())


# English words

_ONES = "zero one two three four five six seven eight nine ten eleven twelve"
_TEENS = "thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SMALL = {word: value for value, word in enumerate(f"{_ONES} {_TEENS}".split())}
_SMALL |= {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
_LARGE = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_WORD = "|".join([*sorted(_SMALL, key=len, reverse=True), *_LARGE])
_WORDS = re.compile(
    rf"(?<![\w-])(?:(?P<minus>minus|negative) )?(?:a (?=hundred|thousand|million))?"
    rf"(?P<words>(?:{_WORD})(?:(?: and |[ -])(?:{_WORD}))*)"
    r"(?![\w'])(?P<percent> ?%| per ?cent\b)?",
    re.IGNORECASE,
)
#: "One" as a pronoun: the red one, one of them, no one, one can see.
_PRONOUN_BEFORE = re.compile(
    r"\b(?:the|this|that|which|each|no|any|another|every|some|other|last|first|\w+(?<!ly)(?<!s))\s$", re.I
)
_COUNT_BEFORE = re.compile(
    r"(?:^|[:=,;.!?(]\s?|\b(?:is|are|only|exactly|just|has|have|see|count|contains?|shows?|total of|of|about|answer)\s)$",
    re.I,
)
_PRONOUN_AFTER = re.compile(r" (?:of|on|that|which|who|is|can|might|in the|at|more|another|with)\b", re.IGNORECASE)


def _from_words(text: str, found: re.Match[str]) -> Found | None:
    words = [word for word in re.split(r"[ -]", found["words"].lower()) if word != "and"]
    if words == ["one"] and len(text) > found.end() - found.start() + 2:
        before = text[: found.start()][-30:]
        if not _COUNT_BEFORE.search(before) or _PRONOUN_AFTER.match(text, found.end()):
            return None
    total = part = 0
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "hundred":
            part = (part or 1) * 100
        elif word in _LARGE:
            total, part = total + (part or 1) * _LARGE[word], 0
        else:
            if following in _SMALL and not (_SMALL[word] >= 20 and 0 < _SMALL[following] < 10):
                return Found(None, found.start(), found.end())  # "two three": no one number
            part += _SMALL[word]
    value = Decimal(total + part)
    return Found(Number(-value if found["minus"] else value, bool(found["percent"])), found.start(), found.end())


# Chinese words

_HAN_DIGITS = {character: value for value, character in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "俩": 2}
_HAN_UNITS = {"十": 10, "百": 100, "千": 1000}
_HAN = re.compile(
    r"(?<![第统唯同另之其\d])(?P<minus>负)?(?P<percent>百分之)?(?P<number>(?![百千万亿])[零〇一二两三四五六七八九十百千万亿]{1,20})(?:点(?P<part>[零一二三四五六七八九]{1,20}))?"
    r"(?=[个只辆条张位名人把本座棵朵匹头架艘台件根块颗双幅扇家种次米厘公斤克度岁元层排行瓶杯盏面栋支枝盘碗片顶间处种艘串群对到至或和、~.,。!?;:)\s]|千[克米]|$)"
)


def _from_han(found: re.Match[str]) -> Found:
    total = section = digit = 0
    characters = found["number"]
    if len(characters) > 1 and all(c in _HAN_DIGITS for c in characters):  # 二〇二四, read digit by digit
        if len(characters) == 2 and not set(characters) & set("零〇"):
            return Found(None, found.start(), found.end())  # 两三个: two or three
        value = Decimal("".join(str(_HAN_DIGITS[character]) for character in characters))
    else:
        for character in characters:
            if character in _HAN_DIGITS:
                digit = _HAN_DIGITS[character]
            elif character in _HAN_UNITS:
                section, digit = section + (digit or 1) * _HAN_UNITS[character], 0
            else:
                base = 10**4 if character == "万" else 10**8
                total, section, digit = (total + section + digit or 1) * base, 0, 0
        value = Decimal(total + section + digit)
    if found["part"]:
        value += Decimal("0." + "".join(str(_HAN_DIGITS[character]) for character in found["part"]))
    return Found(Number(-value if found["minus"] else value, bool(found["percent"])), found.start(), found.end())


def find_numbers(text: str) -> list[Found]:
    """The numbers of a text that :func:`~opd_recipes.eval.reply_text.spell` has read, in order.

    Left out: digits inside of words (A12, 5th, 3D), "one" as a pronoun, Chinese numerals inside of words (一些, 第一).
    """
    found = [_from_digits(text, match) for match in _DIGITS.finditer(text)]
    found += [_from_words(text, match) for match in _WORDS.finditer(text)]
    found += [_from_han(match) for match in _HAN.finditer(text)]
    ordered = sorted((number for number in found if number), key=lambda number: number.start)
    return [n for i, n in enumerate(ordered) if not i or n.start >= ordered[i - 1].end]


def read_number(text: str) -> Number | None:
    """The one number of a text that has one and little else ("12", "1,234 kg", "five cars"); None otherwise."""
    found = find_numbers(" ".join(spell(text).replace("$", "").split()))
    if len(found) != 1 or found[0].number is None:
        return None
    return found[0].number
