"""The page that shows rows: what is on it, that nothing on it can act, and that anybody can read it."""

import argparse
import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep import inspect, inspect_page
from data_prep.inspect_page import DARK, LIGHT, Message, Picture, Sheet, ShownRow, ShownView, page, text, thumbnail
from data_prep.rows import DataError
from tests import harness

VOID = {"meta", "img", "link", "br", "hr", "input"}


class Page(HTMLParser):
    """The elements of a page with their attributes and text; fails where elements are not nested."""

    def __init__(self, source: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.words: dict[str, list[str]] = {}
        self.declaration = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == [], self._open

    def handle_decl(self, decl):
        self.declaration = decl

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.words.setdefault(self._open[-1] if self._open else "", []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def said(self, *tags):
        return " ".join("".join(self.words.get(tag, [])) for tag in tags)


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def row(i=0, image=None, **changes):
    image = image or Image.new("RGB", (96, 64), (200, 10 * i % 255, 30))
    out = {
        "data_source": "test",
        "prompt": [{"role": "user", "content": "<image>What is in the red box?"}],
        "images": [{"bytes": encoded(image), "path": None}],
        "bbox": [10.0, 10.0, 30.0, 30.0],
        "reward_model": {"style": "rule", "ground_truth": "a cat"},
        "extra_info": {"index": i},
    }
    return {**out, **changes}


def look(tmp_path, rows, *options, name="rows.parquet"):
    """Run the command as the console does; the page, parsed, and its source."""
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / name, row_group_size=2)
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    out = tmp_path / "page.html"
    fixed = ["--overlay", "cpu,toy", "--model", harness.BASE, "--out", str(out)]
    inspect.run(parser.parse_args([str(tmp_path / name), *options, *fixed]))
    source = out.read_text(encoding="utf-8")
    return Page(source), source


def sheet(*rows, title="rows"):
    return Sheet(title, [("Recipe", "vision_opd")], 128, list(rows))


def shown(number=0, texts=(), original=(), views=(), messages=()):
    return ShownRow(number, list(texts), list(original), list(views), list(messages))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A page of three rows; the teacher has a second view and is told the answer."""
    rows = [row(0), row(1, reward_model={"style": "rule", "ground_truth": "a <b>dog</b>"}), row(2)]
    more = [
        "opd/weights=margin",
        "opd.views.student=[{kind: redbox, width: 5}]",
        "opd.views.teacher=[{kind: crop, zoom: 2.0}]",
        "opd.views.negative=[crop, mask_rectangle]",
        "opd.teacher_hint=' The answer is {answer}.'",
        "data.max_prompt_length=100",
    ]
    return look(tmp_path_factory.mktemp("three"), rows, *more)


def test_a_row_shows_its_views_texts_and_tokens(three):
    parsed, source = three
    alts = [attributes["alt"] for attributes in parsed.all("img")]
    # 20 x 20 of 96 x 64 pixels; the teacher's crop is enlarged twice.
    assert alts[0] == "Image of row 0, 96 by 64 pixels, evidence box from 10, 10 to 30, 30: 6.5% of the image"
    assert re.fullmatch(r"The student's view of row 0, 96 by 64 pixels, a prompt of \d+ tokens", alts[1])
    assert re.fullmatch(r"The teacher's view of row 0, 40 by 40 pixels, a prompt of \d+ tokens", alts[2])
    assert re.fullmatch(r"The negative's view of row 0, 40 by 40 pixels, a prompt of \d+ tokens", alts[3])
    assert len(alts) == 12
    words = parsed.said("dd", "td", "caption")
    assert "What is in the red box?" in words and "a cat" in words
    assert " The answer is a cat." in words
    assert "Prompt tokens of the 3 rows shown; 0 of them cannot be used" in words


def test_tokens_and_sizes_are_those_of_the_processor(three):
    """Counted here a second way: by the rollout worker, which makes the tokens that the model reads."""
    from opd_recipes.dataset import with_images
    from opd_recipes.views import View

    worker, image = harness.prompt_builder(), Image.new("RGB", (96, 64), (200, 0, 30))
    question = [
        {
            "role": "user",
            "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "What is in the red box?"}],
        }
    ]
    student = worker._prompt(with_images(question, [View("redbox")(image, (10, 10, 30, 30))]))
    _, high, wide = student.inputs["image_grid_thw"][0].tolist()
    patch, merge = worker.processor.image_processor.patch_size, worker.processor.image_processor.merge_size
    cells = [str(len(student.ids)), str(high * wide // merge**2), "96 x 64", f"{wide * patch} x {high * patch}"]
    line = re.search(r'Row 0: tokens and sizes.*?<th scope="row">student</th>(.*?)</tr>', three[1], re.DOTALL)
    assert re.findall("<td>(.*?)</td>", line[1]) == cells


def test_the_evidence_box_is_drawn_where_it_is():
    image, said = inspect._boxed(Image.new("RGB", (640, 320), "gray"), [64, 32, 128, 64])
    assert image.size == (320, 160)  # half: the box is 32, 16 to 64, 32
    red = np.argwhere((np.asarray(image) == (220, 0, 0)).all(axis=2))
    assert red.min(axis=0).tolist() == [15, 31] and red.max(axis=0).tolist() == [32, 64]  # y, x, one pixel outside
    assert said == ", evidence box from 64, 32 to 128, 64: 1.0% of the image"


def test_the_top_says_what_the_rows_are_looked_at_with(three):
    parsed, _ = three
    words = parsed.said("td")
    for part in (
        "vision_opd with overlay cpu,toy",
        "redbox (width 5)",
        "crop (zoom 2.0)",
        "mask_rectangle",
        "100 tokens",
        "3 rows",
        "jsd",
    ):
        assert part in words, part


def test_the_page_is_whole_and_needs_nothing_else(three):
    parsed, source = three
    assert parsed.declaration.lower() == "doctype html"
    assert parsed.all("html") == [{"lang": "en"}]
    assert parsed.all("script") == parsed.all("link") == parsed.all("iframe") == parsed.all("form") == []
    assert all(image["src"].startswith("data:image/") for image in parsed.all("img"))
    assert all(anchor["href"].startswith("#row-") for anchor in parsed.all("a"))
    assert "url(" not in source and "@import" not in source
    (policy,) = [meta["content"] for meta in parsed.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_it_can_be_read_by_a_screen_reader(three):
    parsed, _ = three
    assert [len(parsed.all(tag)) for tag in ("h1", "main", "title", "article", "h2")] == [1, 1, 1, 3, 3]
    assert all(image["alt"].strip() for image in parsed.all("img"))
    assert all(head["scope"] in ("row", "col") for head in parsed.all("th"))
    assert len(parsed.all("caption")) == len(parsed.all("table")) == 5  # settings, summary, three rows
    names = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(names) == len(set(names))
    for article in parsed.all("article"):
        assert article["aria-labelledby"] in names
    assert [anchor["href"][1:] for anchor in parsed.all("a")] == [article["id"] for article in parsed.all("article")]


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</td></table></main><h1>Forged</h1>",
    "<a href='javascript:alert(1)'>javascript:alert(1)</a>",
    "<style>*{display:none}</style><!--",
    "&lt;script&gt; &#60;",
    "]]><svg onload=alert(1)>",
]


@pytest.mark.parametrize("words", HOSTILE)
def test_text_from_rows_is_inert(words):
    """Wherever a row's text can stand; the page has the same elements as with harmless text."""

    def made(said):
        picture = Picture(said, Image.new("RGB", (8, 8)))
        one = shown(
            texts=[(said, said)],
            original=[picture, Picture(said, fault=said)],
            views=[ShownView(said, [picture], [(8, 8)], [(8, 8)], 5, 1)],
            messages=[Message(True, said, said)],
        )
        return Page(page(Sheet(said, [(said, said)], 128, [one])))

    hostile, harmless = made(words), made("harmless")
    assert [(tag, sorted(attributes)) for tag, attributes in hostile.elements] == [
        (tag, sorted(attributes)) for tag, attributes in harmless.elements
    ]
    assert words in hostile.said("dd") and words in hostile.said("dt")  # and it reads as it is in the row
    assert [image["alt"] for image in hostile.all("img")] == [words] * 2


def test_hostile_rows_from_the_file_to_the_page(tmp_path):
    words = "<script>alert(1)</script>"
    bad = row(
        0,
        prompt=[{"role": words, "content": "<image>" + words}],
        images=[{"bytes": b"nothing", "path": words}],
        reward_model={"style": "rule", "ground_truth": words},
        data_source=words,
    )
    parsed, _ = look(tmp_path, [bad])
    assert parsed.all("script") == [] and words in parsed.said("dd")
    assert len(parsed.all("img")) == 0


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("abc\u202egnp.exe", "abc\\u202egnp.exe"),  # text that reads backwards
        ("a\x00b\x1bc", "a\\u0000b\\u001bc"),
        ("a\u200bb\ufeff", "a\\u200bb\\ufeff"),
        ("\ud800", "\\ud800"),
        ("two\nlines\tand é 漢字 🙂", "two\nlines\tand é 漢字 🙂"),
        ("<b>&\"'", "&lt;b&gt;&amp;&quot;&#x27;"),
    ],
)
def test_invisible_characters_are_spelled_out(words, seen):
    assert text(words) == seen


def test_long_text_is_cut_and_says_so():
    assert text("x" * 2003, 2000) == "x" * 2000 + " ... (3 more characters)"


FAULTS = [
    ({"images": [{"bytes": b"no image", "path": None}]}, "cannot be read as an image"),
    ({"images": [{"bytes": None, "path": "../secret.png"}]}, "outside"),
    ({"images": []}, "1 <image> in the prompt for 0 images"),
    ({"bbox": [30.0, 10.0, 10.0, 20.0]}, "is empty"),
    ({"bbox": None}, "no evidence box"),
    ({"prompt": [{"role": "user", "content": "What?"}]}, "0 <image> in the prompt for 1 images"),
]


def test_what_is_wrong_stands_in_the_place_of_the_picture(tmp_path):
    """All faults on one page, with two sound rows between which they stand."""
    rows = [row(0), *(row(i, **change) for i, (change, _) in enumerate(FAULTS, start=1)), row(9)]
    parsed, source = look(tmp_path, rows)
    articles = re.split(r"<article ", source)[1:]
    assert len(articles) == len(rows)
    for article, (change, reason) in zip(articles[1:-1], FAULTS, strict=True):
        one = Page("<article " + article.split("</article>")[0] + "</article>")
        # "missing" stands where a picture would; the list above says it with the remedy
        assert reason in one.said("p"), change
        assert any(item.get("class") == "error" for item in one.all("li")), change
    for article in (articles[0], articles[-1]):
        assert "Refused:" not in article and article.count("<img ") == 3
    assert f"{len(FAULTS)} of them cannot be used" in parsed.said("caption")
    assert [word for word in parsed.words["a"] if "error" not in word] == ["Row 0", "Row 7"]


def test_a_prompt_that_is_too_long_is_shown_and_said(tmp_path):
    parsed, _ = look(tmp_path, [row(0)], "data.max_prompt_length=10", "actor_rollout_ref.rollout.max_model_len=512")
    assert len(parsed.all("img")) == 3
    assert "data.max_prompt_length is 10" in parsed.said("li")


def test_text_that_is_not_utf8_is_said_for_its_row_alone(tmp_path):
    content = pa.array([b"<image>caf\xe9", b"<image>What?"]).view(pa.string())
    rows = pa.Table.from_pylist([row(0), row(1)])
    roles = pa.array(["user", "user"])
    prompts = pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), pa.StructArray.from_arrays([roles, content], ["role", "content"])
    )
    table = rows.set_column(rows.column_names.index("prompt"), "prompt", prompts)
    pq.write_table(table, tmp_path / "a.parquet")
    (first, second) = inspect.pick(tmp_path / "a.parquet", [0, 1])
    assert first[0] == 0 and "not UTF-8" in first[1]
    assert second[0] == 1 and second[1]["prompt"][0]["content"] == "<image>What?"


def test_rows_are_chosen_by_seed_or_by_number(tmp_path):
    assert inspect.choose(1000, None, 24, 0) == inspect.choose(1000, None, 24, 0) != inspect.choose(1000, None, 24, 1)
    assert len(set(inspect.choose(1000, None, 24, 0))) == 24 and max(inspect.choose(1000, None, 24, 0)) < 1000
    assert inspect.choose(3, None, 24, 0) == [0, 1, 2]
    assert inspect.choose(9, [7, 2, 7], 24, 0) == [2, 7]
    for named in ([9], [-1]):
        with pytest.raises(DataError, match=rf"--row {named[0]}: the file's rows are 0 to 8"):
            inspect.choose(9, named, 24, 0)
    with pytest.raises(DataError, match="501 rows: a page has at most 500"):
        inspect.choose(9, None, 501, 0)


def test_rows_are_picked_across_row_groups(tmp_path):
    rows = pa.table({"index": list(range(100))})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=33)
    for chosen in ([0, 32, 33, 65, 66, 98, 99], [50], list(range(100)), [40, 41, 64]):
        assert list(inspect.pick(tmp_path / "a.parquet", chosen)) == [(i, {"index": i}) for i in chosen]


def test_groups_without_a_chosen_row_are_not_read(tmp_path):
    """The middle group is damaged, which only its readers notice."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"{i}" * 50 for i in range(30)]}), path, row_group_size=10, use_dictionary=False)
    data = bytearray(path.read_bytes())
    at = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    data[at : at + 40] = b"\xff" * 40
    path.write_bytes(data)
    assert [number for number, _ in inspect.pick(path, [3, 25])] == [3, 25]
    with pytest.raises(DataError, match="cannot be read as parquet"):
        list(inspect.pick(path, [15]))


def luminance(colour):
    """Relative luminance by WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_of_known_colours():
    assert contrast("#ffffff", "#000000") == pytest.approx(21) and contrast("#777777", "#ffffff") < 4.5


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_contrast(colours):
    text_on = [("ink", "paper"), ("ink", "panel"), ("soft", "paper"), ("soft", "panel"), ("link", "paper")]
    text_on += [("error", "error-panel"), ("warning", "warning-panel")]
    for ink, ground in text_on:
        assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    for ground in ("paper", "panel"):
        assert contrast(colours["line"], colours[ground]) >= 3  # lines of tables (WCAG 2.2, 1.4.11)


def test_both_modes_and_print_use_these_colours_alone(three):
    style = three[0].said("style")
    assert set(re.findall(r"#[0-9a-fA-F]{3,8}\b", style)) == {*LIGHT.values(), *DARK.values()}
    assert set(LIGHT) == set(DARK) == set(re.findall(r"var\(--([\w-]+)\)", style))
    assert "@media screen and (prefers-color-scheme:dark)" in style  # so that paper stays white
    assert "@media print" in style and "color-scheme:light dark" in style


def noise(size, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8))


@pytest.mark.parametrize("size", [(4000, 3000), (1000, 1000), (320, 320), (100, 90), (3000, 4), (1, 1), (1, 900)])
def test_thumbnails_are_small_whatever_the_picture(size):
    data, kind, shown_as = thumbnail(noise(size), 26_000)
    image = Image.open(io.BytesIO(data))
    assert len(data) <= 26_000 and image.format.lower() == kind and max(image.size) <= 320
    assert max(shown_as) >= min(160, max(size))  # a small one is enlarged
    assert shown_as[0] * size[1] == pytest.approx(shown_as[1] * size[0], rel=0.1) or min(shown_as) <= 4


def test_small_pictures_keep_their_very_pixels():
    image = noise((48, 40))
    data, kind, _ = thumbnail(image, 26_000)
    assert kind == "png" and Image.open(io.BytesIO(data)).tobytes() == image.tobytes()


def test_a_page_of_24_rows_is_below_5_mb(monkeypatch):
    """The worst case: noise everywhere, several images a row, long texts that grow when they are escaped."""
    picture = Picture("x" * 100, noise((320, 320)))
    views = [ShownView(name, [picture] * 6, [(320, 320)] * 6, [(320, 320)] * 6, 100, 90) for name in ("a", "b", "c")]
    words = [("Prompt", '"' * 5000), ("Answer", "&" * 5000), ("Hint", "<" * 5000)]
    messages = [Message(True, "'" * 5000, "remedy")] * 30
    monkeypatch.setattr(inspect_page, "thumbnail", cached(inspect_page.thumbnail))
    source = page(sheet(*(shown(i, words, [picture] * 6, views, messages) for i in range(24))))
    assert len(source.encode()) < 5_000_000
    assert "2 more images are not shown" in source and "... and 22 more" in source


def cached(function):
    made = {}

    def call(image, budget):
        if (id(image), budget) not in made:
            made[id(image), budget] = function(image, budget)
        return made[id(image), budget]

    return call


def test_the_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    out = tmp_path / "page.html"
    out.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(inspect.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        inspect.write(sheet(shown()), tmp_path / "a.parquet", out)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"] and out.read_text() == "old"


def test_the_rows_are_never_written_over(tmp_path):
    with pytest.raises(DataError, match="the file that is inspected"):
        inspect.write(sheet(shown()), tmp_path / "a.parquet", tmp_path / "x" / ".." / "a.parquet")


def test_one_file_is_named_among_overrides():
    path, overrides = inspect.file_and_overrides(["rows.parquet", "data.max_prompt_length=64", "opd/teacher=frozen"])
    assert (path.name, overrides) == ("rows.parquet", ["data.max_prompt_length=64", "opd/teacher=frozen"])
    for inputs in (["a=b"], ["a.parquet", "b.parquet"]):
        with pytest.raises(DataError, match="name one parquet file"):
            inspect.file_and_overrides(inputs)


@pytest.mark.parametrize(("content", "reason"), [(b"text", "cannot be read as parquet"), (None, "cannot be read")])
def test_a_file_that_is_none(tmp_path, content, reason):
    if content:
        (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(DataError, match=rf"a.parquet {reason}"):
        inspect.row_count(tmp_path / "a.parquet")
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="it has no rows"):
        inspect.row_count(tmp_path / "b.parquet")


def test_the_picture_in_the_page_is_the_view(three):
    """The teacher's crop of a plain image is plain; the student's view has red on it."""
    parsed, _ = three
    pictures = [
        Image.open(io.BytesIO(base64.b64decode(image["src"].split(",", 1)[1]))).convert("RGB")
        for image in parsed.all("img")[:3]
    ]
    assert pictures[2].getcolors() == [(40 * 40, (200, 0, 30))]
    assert (255, 0, 0) in [colour for _, colour in pictures[1].getcolors()]
