"""A run's page: its rollouts and pictures, that nothing on it can act and that anybody can read it."""

import base64
import hashlib
import io
import json
import math
import re

import numpy as np
import pytest
from PIL import Image

from opd_recipes.report.page import build, render
from opd_recipes.report.palette import DARK, HEAT, LIGHT, SERIES, heat_level
from opd_recipes.report.picture import pictures_of
from opd_recipes.report.traces import TOKENS, read_traces
from tests.report_run import metrics, token, trace, write_config, write_metrics, write_run, write_traces
from tests.unit.test_inspect import Page, contrast


def bare_run(folder, step=1, **changes):
    write_metrics(folder / "metrics.jsonl", {s: metrics(s, **changes) for s in range(1, step + 1)})
    return folder


def page(folder, **options):
    source = render(build(folder), **options)
    return Page(source), source


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return page(write_run(tmp_path_factory.mktemp("runs") / "run 1"))


# Rollouts


def test_before_is_the_first_look_and_after_the_last(tmp_path):
    rows = [
        trace("a", step, [token("x", nats)], score) for step, nats, score in ((15, 0.2, 0), (1, 0.4, 0), (30, 0.1, 1))
    ]
    write_traces(tmp_path, [*rows, trace("b", 15, [])], images=False)
    a, b = read_traces(tmp_path / "traces").rollouts
    assert (a.name, a.before.step, a.after.step, a.changed) == ("a", 1, 30, True)
    assert (a.before.mean, a.after.mean) == (0.4, 0.1)
    assert (b.before.step, b.after, b.changed) == (15, None, False)


def test_those_with_another_verdict_are_shown_first_where_not_all_are(tmp_path):
    scores = {"same": (1, 1), "better": (0, 1), "unscored": (None, None), "worse": (1, 0)}
    rows = [trace(name, step, [], pair[step - 1]) for name, pair in scores.items() for step in (1, 2)]
    write_traces(tmp_path, rows, images=False)
    traces = read_traces(tmp_path / "traces", most=3)
    assert [one.name for one in traces.rollouts] == ["better", "worse", "same"] and traces.total == 4
    assert [one.last.right for one in traces.rollouts] == [True, False, True]


def test_lines_that_are_no_rollout_are_counted_and_one_being_written_is_not(tmp_path):
    write_traces(tmp_path, [trace("a", 1, [])], images=False)
    with (tmp_path / "traces" / "step_000001.jsonl").open("a") as file:
        file.write('{"step": 1}\n[]\nnonsense\n{"step": 2, "id"')
    traces = read_traces(tmp_path / "traces")
    assert (traces.total, traces.odd_lines) == (1, 3)


def test_values_that_are_not_finite_or_of_another_kind_are_not_known(tmp_path):
    odd = token(
        "a", math.nan, student_logp=-math.inf, entropy=True, student_top=[["x", math.nan], "y", ["z", 0.5]], id="no"
    )
    write_traces(tmp_path, [trace("a", 1, [odd, {}, 3])], images=False)
    (look,) = [one.before for one in read_traces(tmp_path / "traces").rollouts]
    first, second = look.tokens
    assert first.divergence is None and first.heat == 0 and look.mean is None
    assert first.facts["students"] == [("z", 0.5)]
    assert (first.facts["student"], first.facts["entropy"], first.facts["id"]) == (None, None, None)
    assert second.text == "∅"


def test_a_long_response_is_cut_and_its_mean_is_not(tmp_path):
    write_traces(tmp_path, [trace("a", 1, [token("a", 0.0)] * TOKENS + [token("b", 1.0)] * TOKENS)], images=False)
    look = read_traces(tmp_path / "traces").rollouts[0].before
    assert (len(look.tokens), look.more_tokens, look.mean) == (TOKENS, TOKENS, 0.5)


def test_heat_begins_at_the_bounds_that_the_legend_names(whole):
    assert [heat_level(nats) for nats in (None, 0, 0.0099, *HEAT, 9)] == [0, 0, 0, 1, 2, 3, 4, 5, 5]
    classes = [
        attributes["class"] for attributes in whole[0].all("span") if attributes.get("class", "").startswith("t h")
    ]
    assert classes[:6] == [f"t h{level}" for level in range(6)]  # the legend


def test_tokens_have_probabilities_heat_and_numbers(whole):
    parsed, source = whole
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', source)[1])
    first, last = data["tokens"][0]
    assert first[-1]["divergence"] == 0.48 and last[-1]["divergence"] == 0.08  # 4 x 0.12, 4 x 0.02 nats
    assert (first[-1]["student"], last[-1]["student"], last[-1]["teacher"]) == (0.3, 0.8, 0.9)
    assert last[-1]["teachers"] == [["red", 0.9], ["green", 0.04]]
    options = [attributes for attributes in parsed.all("span") if attributes.get("role") == "option"]
    assert options[15]["class"] == "t h5" and options[15]["data-d"] == "0.48"
    assert options[15]["aria-label"] == "blue, divergence 0.48"
    assert options[4]["aria-label"].startswith("·the,") and ">⏎</span><br>" in source


# Pictures


def rollout_with(folder, image, name="a_student.png", **changes):
    write_traces(
        folder, [trace("a", 1, [], teacher_image=None, student_image=f"images/{name}", **changes)], images=False
    )
    if image is not None:
        image.save(folder / "traces" / "images" / name)
    traces = read_traces(folder / "traces")
    return pictures_of(traces.rollouts[0], traces)[0]


def pixels(picture):
    return Image.open(io.BytesIO(base64.b64decode(picture.source.split(",")[1])))


def noise(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8))


def test_pictures_are_small_and_encoded_anew(tmp_path):
    picture = rollout_with(tmp_path, noise(1600, 1200), original_size=[1600, 1200])
    assert (picture.width, picture.height) == (640, 480) == pixels(picture).size
    assert len(picture.source) < 90_000 * 4 / 3 + 100
    # 640 / 1600 = 0.4 of the box's [160, 120, 240, 200].
    assert picture.box == (64, 48, 32, 32)
    assert "1600 by 1200 pixels, evidence box at 160, 120, 240, 200" in picture.alt


def test_the_box_is_drawn_on_a_smaller_view_and_not_on_a_crop(tmp_path):
    assert rollout_with(tmp_path, Image.new("RGB", (400, 300))).box == (80, 60, 40, 40)
    crop = rollout_with(tmp_path / "crop", Image.new("RGB", (300, 300)))
    assert crop.source and crop.box is None
    outside = rollout_with(tmp_path / "outside", Image.new("RGB", (400, 300)), bbox=[700, 0, 900, 100])
    assert outside.source and outside.box is None


def test_small_pictures_are_enlarged(tmp_path):
    picture = rollout_with(tmp_path, Image.new("RGB", (64, 48)))
    assert (picture.width, picture.shown) == (64, 192)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("../../secret.png", "outside"),
        ("missing.png", "no such file"),
        ("/etc/passwd", "outside"),
        ("no.png", "cannot be read"),
    ],
)
def test_what_is_no_picture_of_the_traces_is_not_shown(tmp_path, name, reason):
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    (tmp_path / "traces" / "images").mkdir(parents=True)
    (tmp_path / "traces" / "images" / "no.png").write_text("no picture")
    if name.startswith("/"):
        write_traces(tmp_path, [trace("a", 1, [], student_image=name, teacher_image=None)], images=False)
        traces = read_traces(tmp_path / "traces")
        picture = pictures_of(traces.rollouts[0], traces)[0]
    else:
        picture = rollout_with(tmp_path, None, name)
    assert picture.source == "" and reason in picture.fault
    assert str(tmp_path) not in picture.fault or ".." in name  # what lies outside of the run's folder is named in full


# The page


def test_the_page_loads_nothing_and_runs_only_its_own_script(whole):
    parsed, source = whole
    policy = parsed.all("meta")[1]["content"]
    script = re.search(r"<script>(.*?)</script>", source, re.DOTALL)[1]
    style = re.search(r"<style>(.*?)</style>", source, re.DOTALL)[1]
    for kind, text in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy and "http:" not in source and "https:" not in source
    assert not parsed.all("link") and len(parsed.all("script")) == 2
    assert all("style" not in attributes for _, attributes in parsed.elements)  # the policy would forbid them
    assert all(attributes["src"].startswith("data:image/") for attributes in parsed.all("img"))


def test_it_can_be_read_by_a_screen_reader(whole):
    parsed, source = whole
    assert parsed.declaration == "DOCTYPE html" and parsed.all("html")[0]["lang"] == "en"
    assert [len(parsed.all(tag)) for tag in ("main", "header", "nav", "footer", "h1")] == [1, 1, 1, 1, 1]
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    assert all(attributes["alt"] for attributes in parsed.all("img")) and parsed.all("img")
    assert source.count("<table") == source.count("<caption>") > 10
    charts = [svg for svg in parsed.all("svg") if svg.get("role") == "img"]
    assert len(charts) == source.count("<desc ") == source.count('<figure class="chart') > 10
    names = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(names) == len(set(names))
    for _, attributes in parsed.elements:
        assert set(attributes.get("aria-labelledby", "").split()) <= set(names)
        assert attributes.get("href", "#main")[1:] in names


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_have_contrast(colours):
    text_on = [(ink, ground) for ink in ("ink", "soft", "link") for ground in ("paper", "panel")]
    text_on += [(kind, f"{kind}-panel") for kind in ("problem", "notice", "good")]
    text_on += [("ink", ground) for ground in ("problem-panel", "notice-panel", *(f"heat-{i}" for i in range(1, 6)))]
    text_on += [("paper", "ink")]  # a button that is pressed
    text_on += [(f"series-{i}", ground) for i in range(1, SERIES + 1) for ground in ("panel", "paper")]
    for ink, ground in text_on:
        assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    for ground in ("paper", "panel"):
        assert contrast(colours["line"], colours[ground]) >= 3  # WCAG 2.2, 1.4.11
    assert contrast(colours["box"], colours["halo"]) >= 4.5  # the halo lies under the box, whatever the picture is


def test_both_modes_and_print_use_these_colours_alone(whole):
    style = whole[0].said("style")
    assert set(re.findall(r"#[0-9a-fA-F]{3,8}\b", style)) == {*LIGHT.values(), *DARK.values()}
    used = set(re.findall(r"var\(--([\w-]+)\)", style))
    assert set(LIGHT) == set(DARK) == used
    assert "@media screen and (prefers-color-scheme:dark)" in style  # so that paper stays white
    assert "@media print" in style and "color-scheme:light dark" in style


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&<!--\u202e"


def test_whatever_comes_from_a_run_is_text(tmp_path):
    folder = tmp_path / "<script>alert(1)<"
    tokens = [token(HOSTILE, 0.2, student_top=[[HOSTILE, 0.5]], teacher_top=[[HOSTILE, 0.5]])]
    texts = dict.fromkeys(("question", "reference", "response", "student_image", "teacher_image"), HOSTILE)
    write_traces(folder, [trace(HOSTILE, step, tokens, **texts) for step in (1, 2)], images=False)
    entries = {
        1: {
            **metrics(1),
            f"val-core/{HOSTILE}@{HOSTILE}/acc/mean@1": 0.5,
            f"timing_s/{HOSTILE}": 3.0,
            "timing_s/step": 9.0,
        }
    }
    write_metrics(folder / "metrics.jsonl", entries)
    write_config(folder, "vision_opd", "+opd.validation_views=['<script>alert(1)</script>']")
    parsed, source = page(folder)
    assert len(parsed.all("script")) == 2 and not parsed.all("img")
    assert "alert(1)</script>" not in source and "<!--" not in source and "\u202e" not in source
    assert source.count("&lt;script&gt;alert(1)") > 5
    assert not [a for _, a in parsed.elements if any(name.startswith("on") for name in a)]
    data = json.loads(re.search(r'id="data">(.*?)</script>', source)[1])
    assert data["tokens"][0][0][0]["students"][0][0].startswith("</script>")


def test_a_run_without_traces_says_how_to_have_them(tmp_path):
    parsed, source = page(bare_run(tmp_path))
    assert "opd.trace.rows=8" in parsed.said("code") and 'class="rollout"' not in source


def test_an_empty_folder_of_traces_is_none(tmp_path):
    (tmp_path / "traces").mkdir()
    assert "opd.trace.rows=8" in page(bare_run(tmp_path))[1]


def test_the_top_says_what_when_and_how_far(whole):
    parsed, source = whole
    assert parsed.said("h1") == "run 1"
    facts = re.sub(r"<[^>]+>", "", re.search(r'<dl class="facts">(.*?)</dl>', source, re.DOTALL)[1])
    # 55% + 25% x step / 30 at steps 10 and 30.
    assert "63% → 80%" in facts and "+16.7 points since step 10" in facts
    assert "94% → 92%" in facts and "30.7 → 12.0 points" in facts
    assert "<strong>30</strong> of 30" in source.replace("step <strong>", "<strong>")
    assert re.search(r'<time datetime="20\d\d-\d\d-\d\dT[\d:]+\+00:00">20.* UTC</time>', source)


def test_a_page_of_24_long_rollouts_is_below_12_mb(tmp_path):
    """Measured on two of three rollouts with the worst pictures (noise) and the longest responses, each traced twice."""
    long = [token(" word", 0.123456)] * 1000
    write_traces(tmp_path, [trace(name, step, long) for name in "abc" for step in (1, 9)], images=False)
    for name in "abc":
        for view in ("student", "teacher"):
            noise(640, 480).save(tmp_path / "traces" / "images" / f"{name}_{view}.png")
    source = render(build(bare_run(tmp_path), rollouts=2))
    assert source.count('class="rollout"') == 2 and "2 of 3 traced rollouts" in source
    assert source.count(f"{1000 - TOKENS} more tokens are not shown") == 4
    assert len(source) * 24 / 2 < 12e6
