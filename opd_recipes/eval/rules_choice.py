"""Multiple choice: the rules, in their order."""

from __future__ import annotations

import re
from collections.abc import Iterator

from opd_recipes.eval.numerals import read_number
from opd_recipes.eval.option_text import NEGATION, Claim, Options
from opd_recipes.eval.reply_text import (
    EMPTY,
    MARKED,
    OPEN_BOX,
    REFUSAL,
    THINKING,
    UNDECIDED,
    Extracted,
    Rule,
    Text,
    sentence_around,
    sentences,
    show,
    strip_markup,
)
from opd_recipes.eval.rules_number import NUMBER_RULES
from opd_recipes.eval.statements import (
    CHOSEN,
    CONCLUSION,
    MATCHED,
    MAYBE,
    RETRACTED,
    Said,
    doubted,
    last_found,
    other_box,
    settle,
    tails,
)

# Statements

_VERDICT = re.compile(
    r"(?<![A-Za-z0-9_'-])[(\"]?(?P<letter>[A-Z])[)\"]? ?(?:"
    r"(?:is|must be|would be|seems|appears)(?: to be)?(?: clearly| definitely| the)?(?: most(?: likely)?| only)? "
    r"(?:correct|right|best|true|accurate|appropriate|answer)\b"
    r"(?! (?:in|about|only|for|of|but|if|side|next|behind|there|above|below|beside|here|where|after|before)\b)"
    r"|(?:is|would be) my (?:answer|choice)\b|(?:选项|项)?(?:是|为)?最?(?:正确|对的|符合题意)|是(?:正确)?答案)"
)


def _said(rule: str, level: int, claim: Claim, end: int) -> Said:
    return Said(rule, level, claim.letter, claim.why, end, claim.fault)


def _statements(text: str, options: Options) -> Iterator[Said]:
    for tail, end in tails(text, CHOSEN):
        claim = options.claim(tail)
        if claim:
            yield _said("statement", 2, claim, end)


def _conclusions(text: str, options: Options) -> Iterator[Said]:
    """After "so" or "it is" only what ends its clause counts: more may follow than an answer."""
    one = len(sentences(text)) == 1
    for tail, end in tails(text, CONCLUSION):
        claim = _closing(tail, options)
        pronoun = re.search(r"(?:'s| is| be) $", text[max(0, end - 8) : end], re.IGNORECASE)
        if claim and (one or not pronoun or not claim.by_text):  # "it is red" may speak of anything
            yield _said("conclusion", 1, claim, end)


def _closing(tail: str, options: Options) -> Claim | None:
    sentence = re.split(r"(?<=[!?。])|(?<=\.)(?=\s)|\n", tail, maxsplit=1)[0]
    short = re.split(r" (?:because|since|as|due to|based on)\b", sentence, maxsplit=1)[0]
    pieces = (tail.split("\n", 1)[0], sentence, short, short.split(",")[0])
    return next((claim for piece in pieces if (claim := options.full_claim(piece))), None)


def _matches(text: str, options: Options) -> Iterator[Said]:
    start = text.rfind(_last_sentence(text)[1])
    for tail, end in tails(text[start:], MATCHED):
        claim = None if NEGATION.search(text[start : start + end]) else _closing(tail, options)
        if claim:
            yield _said("conclusion", 1, claim, start + end)


def _verdicts(text: str, options: Options) -> Iterator[Said]:
    for found in last_found(_VERDICT, text):
        before, _ = sentence_around(text, found.start())
        if doubted(before) or NEGATION.search(before):
            continue
        also = re.search(r"([A-Z])\)? ?(?:和|或|与|、|,|/|and|or|&) ?(?:option )?\(?$", before)
        if also:
            yield Said("verdict", 1, None, f"{also.group(1)} and {found['letter']}", found.end(), "hedge")
        elif found["letter"] in options.texts:
            yield Said("verdict", 1, found["letter"], show(found.group()), found.end())


def _last_claims(text: str, options: Options) -> list[Said]:
    """The last claim of each level, strongest level first."""
    weak = [next(find(text, options), None) for find in (_conclusions, _matches, _verdicts)]
    found = [next(_statements(text, options), None)]
    found.append(max((said for said in weak if said), key=lambda said: said.end, default=None))
    return [said for said in found if said]


# Rules


def marked(text: Text, options: Options) -> Extracted | None:
    """The last box or answer tag, unless a later statement says otherwise."""
    mark = text.mark
    if not mark:
        return None
    content = strip_markup(mark.content)
    claim = options.full_claim(content) or options.claim(content)
    said = _said(mark.rule, 3, claim, 0) if claim else None
    if not said and mark.rule == "tag":
        said = next((said._replace(rule="tag", end=0) for said in _last_claims(content, options)), None)
    if not said:
        return None
    before = other_box(text) if mark.rule == "box" else None
    other = options.full_claim(strip_markup(before)) if before else None
    if other and other.letter != said.value:
        return Extracted(None, "hedge", f"two boxes, {other.letter} or {said.value}")
    rest = strip_markup(text.raw[mark.end :])
    return settle([said, *_last_claims(rest, options)], rest)


def whole(text: Text, options: Options) -> Extracted | None:
    if len(text.lines) > 2:
        return None
    reply = " ".join(text.lines)
    claim = options.full_claim(reply)
    if claim:
        return _said("whole reply", 1, claim, 0).extracted()
    if re.match(r"(?:it's |it is |it )?(?:not|isn't|不是|不选) ?(?:option )?\(?[A-Z]\)?[.。!]?$", reply, re.IGNORECASE):
        return Extracted(None, "negation", f"{show(reply)} says only what the answer is not")
    return None


def stated(text: Text, options: Options) -> Extracted | None:
    claims = _last_claims(text.plain, options)
    if not claims:
        return None
    said, first = claims[0], leading_claim(text, options)
    differs = said.level == 1 and first and first.letter and first.letter != said.value
    if first and differs and not RETRACTED.search(text.plain, 0, said.end):
        return Extracted(None, "contradiction", f"{first.why}, later {said.why}")
    return settle(claims, text.plain)


def leading_claim(text: Text, options: Options) -> Claim | None:
    line = text.lines[0] if text.lines else ""
    named = options.named(line)
    if not named or not named.apart or named.letter not in options.texts:
        return None
    return options.claim(line)


def leading(text: Text, options: Options) -> Extracted | None:
    claim = leading_claim(text, options)
    if not claim:
        return None
    if claim.fault:
        return _said("first", 1, claim, 0).extracted()
    if {letter for letter in _listed(text.plain) if letter in options.texts} - {claim.letter}:
        return None  # the options are gone through
    end = options.full_claim(text.lines[-1]) if len(text.lines) > 1 else None
    if end and end.bare and end.letter != claim.letter:
        return Extracted(None, "several", f"{claim.why} first, {end.why} last")
    first = " ".join(sentences(text.lines[0])[:2])
    if re.search(r"\b(?:incorrect|wrong|not correct|false|no)\b|不对|错误|不正确", first, re.IGNORECASE):
        return Extracted(None, "negation", f"{show(first)} speaks against {claim.letter}")
    taken_back = RETRACTED.search(text.plain)
    if taken_back:
        return Extracted(None, "taken back", f"{claim.why}, then {taken_back.group()!r} and no statement")
    return _said("first", 1, claim, 0).extracted()


def _listed(text: str) -> set[str]:
    """Letters in the form of an option: "A.", "(A)", "A:"."""
    return set(re.findall(r"(?:^|(?<=[\s;,(\[]))\(?([A-Z])(?:[.:)]|\s-\s)", text))


def last(text: Text, options: Options) -> Extracted | None:
    if not text.lines:
        return None
    *before, line = text.lines
    claim = options.full_claim(line)
    if not claim or not before:
        before, line = _last_sentence(text.plain)
        claim = options.full_claim(line) if before else None
        claim = claim if claim and claim.bare and line[:1] in "([\"'" + "".join(options.texts) else None
    if not claim:
        return None
    if claim.fault:
        return _said("last", 1, claim, 0).extracted()
    others = {
        said.letter
        for piece in before[-_LINES:]
        if (said := options.full_claim(piece)) and (said.bare or not claim.bare)
    }
    if others - {claim.letter}:
        return Extracted(None, "several", f"{show(line)} is the last of several, none of them a conclusion")
    return _said("last", 1, claim, 0).extracted()


def _last_sentence(text: str) -> tuple[list[str], str]:
    found = sentences(text)
    return found[:-1], found[-1] if found else ""


# The text of an option

_BEFORE = re.compile(
    r"(?:^|[:,;\"'(]|\b(?:is|are|was|were|be|being|the|an?|in|on|at|of|to|by|has|have|shows?|looks?|seems?|appears?|called|named|as|"
    r"with|says?|reads?|wearing|holding|from|it's|that's|there's|clearly|mostly|predominantly|only|actually|but)|"
    r"[是为在有呈成选叫的])\s?[\"'(]?(?:(?:the|an?) )?$",
    re.IGNORECASE,
)
_AFTER = re.compile(
    r"\s?(?:[.,;:!?\"')。、]|$|\n|(?:in|on|at|of|as|because|since|is|and|or|but|with|which|that|based|due|from|to)\b|的)",
    re.IGNORECASE,
)
#: So many lines before the last are compared with it.
_LINES = 200
#: Up to so many words a reply is an answer; of a longer one only the last sentence is.
_SHORT, _LONGEST = 60, 1000


def by_text(text: Text, options: Options) -> Extracted | None:
    if not options.by_text or not text.plain:
        return None
    short = len(text.plain) < _LONGEST and len(text.plain.split()) <= _SHORT
    plain = text.plain if short else _last_sentence(text.plain)[1]
    if len(plain) > _LONGEST:
        return None
    mentions = list(_mentions(plain, options))
    letters = {letter for letter, _, _ in mentions}
    plainly = [(letter, words) for letter, words, plainly in mentions if plainly]
    if plainly and len(letters) == 1:
        return Extracted(plainly[0][0], "option text", f"{show(plainly[0][1])} names no other option")
    if len(letters) > 1:
        return Extracted(None, "several", f"the reply names {', '.join(sorted(letters))}, concludes nothing")
    return None


def _mentions(plain: str, options: Options) -> Iterator[tuple[str, str, bool]]:
    """Option, sentence, and whether the words around let the text be an answer ("is red", not "light red" or "red car").

    What is denied, doubted or asked is no mention.
    """
    texts = sorted(options.by_text, key=len, reverse=True)
    pattern = re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(map(re.escape, texts))})(?![A-Za-z0-9_])")
    for sentence in sentences(plain):
        if MAYBE.search(sentence) or sentence.endswith("?") or doubted(sentence):
            continue
        low = sentence.casefold()
        for found in pattern.finditer(low):
            before = re.split(r"[,;]|\bbut\b", low[: found.start()])[-1]
            after = re.split(r"[,;]|\bbut\b", low[found.end() :])[0]
            plainly = _BEFORE.search(low[max(0, found.start() - 40) : found.start()]) and _AFTER.match(low, found.end())
            if not NEGATION.search(before) and not NEGATION.search(after):
                yield options.by_text[found.group()], sentence, bool(plainly)


def by_number(text: Text, options: Options) -> Extracted | None:
    """Where every option is a number, the number that the reply gives."""
    values = {letter: read_number(option) for letter, option in options.texts.items()}
    if any(value is None for value in values.values()):
        return None
    for rule in NUMBER_RULES:
        said = rule.find(text, None)
        if said:
            found = [
                letter
                for letter, value in values.items()
                if said.value is not None and read_number(said.value) == value
            ]
            return Extracted(found[0], "number", said.why) if len(found) == 1 else None
    return None


def nothing(text: Text, options: Options) -> Extracted:
    plain = text.plain[:20_000]
    named = (_listed(plain) | set(re.findall(r"(?<![A-Za-z0-9_'])([B-HJ-Z])(?![A-Za-z0-9_'])", plain))) & set(
        options.texts
    )
    if len(named) > 1:
        return Extracted(None, "several", f"the reply names {', '.join(sorted(named))}, concludes nothing")
    return Extracted(None, "nothing", "no rule finds an answer")


CHOICE_RULES: tuple[Rule[Options], ...] = (
    EMPTY,
    THINKING,
    Rule("box / tag", MARKED, marked),
    OPEN_BOX,
    Rule("whole reply", 'nothing but an answer: "C", "(c)", "Option C", "C. green", "green", "选C"', whole),
    Rule(
        "statement / conclusion / verdict",
        'the last of "the answer is C", "Answer: green", "I choose C", "答案是C"; else of "so option C", "it is C", '
        '"matches option C", "C is correct"',
        stated,
    ),
    Rule(
        "first",
        'begins with a letter set apart: "C. Because ...", "C" on a line; no other option is gone through',
        leading,
    ),
    Rule("last", "the last line is an answer and nothing else, or the last sentence a letter", last),
    REFUSAL,
    Rule(
        "option text",
        'a short reply, or the last sentence of a longer one, names one option by its text ("the car is green"); part of a '
        'longer name is none ("dark green", "green car")',
        by_text,
    ),
    Rule("number", "every option is a number, and the reply gives one of them by the rules for numbers", by_number),
    Rule("nothing", UNDECIDED["nothing"], nothing),
)
