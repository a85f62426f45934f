"""The page of ``python -m data_prep inspect``: one HTML file that needs no network and no script.

Whatever comes from rows is text (escaped, control characters spelled out) or a thumbnail that was encoded here; nothing of it
becomes an address, an attribute or a style. The page's own policy forbids the browser to load or run anything.
"""

from __future__ import annotations

import base64
import html
import io
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from PIL import Image

Size = tuple[int, int]

#: Longest side of a thumbnail, in pixels; images smaller than ENLARGED are shown larger, pixel by pixel.
SIDE, ENLARGED = 320, 160
#: Most encoded bytes of all thumbnails of a row, and of one: 24 rows stay below 5 MB, whatever is on them.
ROW_BYTES, PICTURE_BYTES = 100_000, 26_000
#: Images shown of each view, messages of a row, characters of each text of a row and of each other text.
PICTURES, MESSAGES, CHARACTERS, WORDS = 4, 8, 2000, 400

#: Colours by role. Each text role has a contrast of at least 4.5 to each ground that it stands on (WCAG 2.2, 1.4.3).
LIGHT = {
    "paper": "#ffffff",
    "panel": "#f2f4f7",
    "error-panel": "#fdecec",
    "warning-panel": "#fff4d6",
    "ink": "#1b1d21",
    "soft": "#50565e",
    "error": "#9c1013",
    "warning": "#6f4400",
    "link": "#0b4f9c",
    "line": "#767c85",
}
DARK = {
    "paper": "#15171a",
    "panel": "#1f2328",
    "error-panel": "#3a1a1b",
    "warning-panel": "#362a10",
    "ink": "#eceef1",
    "soft": "#b4bac3",
    "error": "#ffa8a8",
    "warning": "#ffd479",
    "link": "#8fc1ff",
    "line": "#8b929c",
}


@dataclass(frozen=True)
class Picture:
    """An image of a row, or why there is none.

    Args:
        alt: What it is, for who cannot see it.
        image: The pixels; None where it cannot be drawn.
        fault: Why it cannot.
    """

    alt: str
    image: Image.Image | None = None
    fault: str = ""


@dataclass(frozen=True)
class ShownView:
    """One view of a row.

    Args:
        name: ``student``, ``teacher`` or ``negative``.
        pictures: One for each of the row's images.
        drawn, seen: Width and height of each image before and after the processor.
        tokens, image_tokens: Tokens of the prompt, and those of them that stand for pixels; None where they cannot be counted.
    """

    name: str
    pictures: list[Picture]
    drawn: list[Size] = field(default_factory=list)
    seen: list[Size] = field(default_factory=list)
    tokens: int | None = None
    image_tokens: int | None = None


@dataclass(frozen=True)
class Message:
    """Something to know about a row: an error stops training, a warning may be intended."""

    is_error: bool
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class ShownRow:
    """All that the page says of one row; texts are as they are in the row."""

    number: int
    texts: list[tuple[str, str]]
    original: list[Picture]
    views: list[ShownView]
    messages: list[Message]

    @property
    def errors(self) -> int:
        return sum(message.is_error for message in self.messages)


@dataclass(frozen=True)
class Sheet:
    """The whole page.

    Args:
        title: Of the page and its first heading.
        settings: Name and value of what the rows are looked at with.
        limit: ``data.max_prompt_length``.
        rows: In the order of the file.
    """

    title: str
    settings: list[tuple[str, str]]
    limit: int
    rows: list[ShownRow]


def text(value: object, limit: int = WORDS) -> str:
    """A value as HTML text: escaped, cut, and with invisible or reordering characters spelled out."""
    whole = str(value)
    shown = "".join(map(_visible, whole[:limit]))
    more = f" ... ({len(whole) - limit} more characters)" if len(whole) > limit else ""
    return html.escape(shown + more, quote=True)


def _visible(character: str) -> str:
    # Cc control, Cf formatting (among them what reverses the order of text), Cs half of a pair, Co and Cn unassigned.
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Cn"):
        return character
    return f"\\u{ord(character):04x}"


def thumbnail(image: Image.Image, budget: int) -> tuple[bytes, str, Size]:
    """Encode a small copy in at most ``budget`` bytes; its bytes, their type, and the size at which to show them."""
    small = image.convert("RGB")
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    factor = max(1, ENLARGED // max(small.size))
    shown = (small.width * factor, small.height * factor)
    if small.size == image.size and len(data := _encode(small, "PNG")) <= budget:
        return data, "png", shown
    quality = 85
    while len(data := _encode(small, "JPEG", quality=quality, optimize=True)) > budget and max(small.size) > 16:
        if quality > 55:
            quality -= 15
        else:
            small = small.resize((max(1, small.width * 3 // 4), max(1, small.height * 3 // 4)))
    return data, "jpeg", shown


def _encode(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def page(sheet: Sheet) -> str:
    """The HTML of a sheet."""
    rows = "\n".join(_row(row) for row in sheet.rows)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(sheet.title)}</title>
<style>{_style()}</style>
</head>
<body>
<header>
<h1>{text(sheet.title)}</h1>
{_settings(sheet)}
{_summary(sheet)}
</header>
<nav aria-label="Rows"><ul>
{"".join(_entry(row) for row in sheet.rows)}
</ul></nav>
<main>
{rows}
</main>
</body>
</html>
"""


def _settings(sheet: Sheet) -> str:
    lines = "\n".join(
        f'<tr><th scope="row">{text(name)}</th><td>{text(value, CHARACTERS)}</td></tr>'
        for name, value in sheet.settings
    )
    return _table("Recipe and settings", "", lines)


def _summary(sheet: Sheet) -> str:
    names = dict.fromkeys(view.name for row in sheet.rows for view in row.views)
    lines = []
    for name in names:
        shown = [view for row in sheet.rows for view in row.views if view.name == name]
        counts = [view.tokens for view in shown if view.tokens is not None]
        numbers = [min(counts), round(sum(counts) / len(counts)), max(counts)] if counts else ["none"] * 3
        over = sum(count > sheet.limit for count in counts)
        cells = "".join(f"<td>{number}</td>" for number in (*numbers, over, len(shown) - len(counts)))
        lines.append(f'<tr><th scope="row">{text(name)}</th>{cells}</tr>')
    heads = ("View", "Least", "Mean", "Most", f"Above {sheet.limit}", "Not counted")
    bad = sum(row.errors > 0 for row in sheet.rows)
    said = f"Prompt tokens of the {len(sheet.rows)} rows shown; {bad} of them cannot be used"
    return _table(said, _heads(heads), "\n".join(lines))


def _entry(row: ShownRow) -> str:
    count = f" ({row.errors} error{'s' * (row.errors > 1)})" if row.errors else ""
    return f'<li><a href="#row-{row.number:d}">Row {row.number:d}{count}</a></li>'


def _row(row: ShownRow) -> str:
    texts = "".join(f'<dt>{text(name)}</dt><dd dir="auto">{text(value, CHARACTERS)}</dd>' for name, value in row.texts)
    groups = [("Original", row.original), *((view.name.capitalize(), view.pictures) for view in row.views)]
    count = sum(min(len(pictures), PICTURES) for _, pictures in groups)
    budget = min(PICTURE_BYTES, ROW_BYTES // max(1, count))
    figures = "\n".join(_figure(row.number, name, pictures, budget) for name, pictures in groups if pictures)
    return f"""<article id="row-{row.number:d}" aria-labelledby="title-{row.number:d}">
<h2 id="title-{row.number:d}">Row {row.number:d}</h2>
{_messages(row.messages)}
<dl>{texts}</dl>
<div class="figures">
{figures}
</div>
{_sizes(row)}
</article>"""


def _messages(messages: Sequence[Message]) -> str:
    lines = [_message(message) for message in sorted(messages, key=lambda message: not message.is_error)[:MESSAGES]]
    if len(messages) > MESSAGES:
        lines.append(f"<li>... and {len(messages) - MESSAGES} more</li>")
    return f'<ul class="messages">{"".join(lines)}</ul>' if lines else ""


def _message(message: Message) -> str:
    kind = "error" if message.is_error else "warning"
    remedy = f" To do: {text(message.remedy)}." if message.remedy else ""
    return f'<li class="{kind}"><strong>{kind.capitalize()}:</strong> {text(message.reason)}.{remedy}</li>'


def _figure(number: int, name: str, pictures: Sequence[Picture], budget: int) -> str:
    shown = "".join(_picture(picture, budget) for picture in pictures[:PICTURES])
    more = f" ({len(pictures) - PICTURES} more images are not shown)" if len(pictures) > PICTURES else ""
    return f"<figure>{shown}<figcaption>Row {number:d}: {text(name)}{more}</figcaption></figure>"


def _picture(picture: Picture, budget: int) -> str:
    if picture.image is None:
        return f'<p class="error missing"><strong>Refused:</strong> {text(picture.fault)}</p>'
    data, kind, (width, height) = thumbnail(picture.image, budget)
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f'<img src="{source}" width="{width}" height="{height}" alt="{text(picture.alt)}">'


def _sizes(row: ShownRow) -> str:
    if not row.views:
        return ""
    lines = []
    for view in row.views:
        counts = ["not counted" if count is None else str(count) for count in (view.tokens, view.image_tokens)]
        cells = "".join(f"<td>{cell}</td>" for cell in (*counts, _listed(view.drawn), _listed(view.seen)))
        lines.append(f'<tr><th scope="row">{text(view.name)}</th>{cells}</tr>')
    heads = ("View", "Prompt tokens", "Image tokens", "Pixels drawn", "Pixels after the processor")
    return _table(f"Row {row.number}: tokens and sizes", _heads(heads), "\n".join(lines))


def _listed(sizes: Sequence[Size]) -> str:
    shown = ", ".join(f"{width} x {height}" for width, height in sizes[:PICTURES])
    return shown + (", ..." if len(sizes) > PICTURES else "") or "none"


def _heads(names: Iterable[str]) -> str:
    return "<thead><tr>" + "".join(f'<th scope="col">{text(name)}</th>' for name in names) + "</tr></thead>"


def _table(caption: str, head: str, lines: str) -> str:
    named = text(caption)
    table = f"<table><caption>{named}</caption>{head}<tbody>\n{lines}\n</tbody></table>"
    # Wider than a narrow window, it scrolls by itself; the keyboard can do that only where it can go.
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{named}">{table}</div>'


def _style() -> str:
    def colours(roles: dict[str, str]) -> str:
        return ":root{" + "".join(f"--{role}:{value};" for role, value in roles.items()) + "}"

    return f"""
{colours(LIGHT)}
:root{{color-scheme:light dark}}
@media screen and (prefers-color-scheme:dark){{{colours(DARK)}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:90rem;padding:1rem;background:var(--paper);color:var(--ink);
font:1rem/1.5 system-ui,sans-serif;overflow-wrap:anywhere}}
h1{{font-size:1.5rem}} h2{{font-size:1.2rem;margin:0 0 .5rem}}
a{{color:var(--link)}}
nav ul{{display:flex;flex-wrap:wrap;gap:.25rem 1rem;padding:0;list-style:none}}
.scroll{{overflow-x:auto;margin:.75rem 0}}
:focus-visible{{outline:3px solid var(--link);outline-offset:2px}}
table{{border-collapse:collapse}}
caption{{text-align:start;font-weight:600;padding:.25rem 0}}
th,td{{border:1px solid var(--line);padding:.25rem .6rem;text-align:start;vertical-align:top;white-space:pre-wrap}}
th,td{{overflow-wrap:break-word}} header td{{overflow-wrap:anywhere;min-width:3.5rem}}
th{{background:var(--panel)}}
article{{border-block-start:2px solid var(--line);padding-block:1rem}}
dl{{display:grid;grid-template-columns:minmax(6rem,max-content) 1fr;gap:.25rem 1rem;margin:0}}
dt{{color:var(--soft)}} dd{{margin:0;white-space:pre-wrap}}
.figures{{display:flex;flex-wrap:wrap;gap:1rem;margin-block:.75rem;align-items:flex-start}}
figure{{margin:0;padding:.5rem;background:var(--panel);max-width:100%}}
figcaption{{color:var(--soft);font-size:.9rem}}
img{{display:block;max-width:{SIDE}px;height:auto;margin-block-end:.25rem;image-rendering:auto}}
.messages{{list-style:none;margin:0 0 .5rem;padding:0}}
.messages li,.missing{{padding:.4rem .6rem;margin:0 0 .25rem;border-inline-start:4px solid}}
.error{{background:var(--error-panel);color:var(--error)}}
.warning{{background:var(--warning-panel);color:var(--warning)}}
.missing{{max-width:{SIDE}px}}
@media (max-width:40rem){{th,td{{padding:.2rem .35rem;font-size:.92rem}}}}
@media print{{nav{{display:none}} body{{max-width:none;padding:0}} figure,tr,h2{{break-inside:avoid}} h2{{break-after:avoid}}}}
"""
