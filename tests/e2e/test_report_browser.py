"""The report and the page of ``data_prep inspect`` in a real browser: what only a browser can tell."""

import pytest
from PIL import Image

from data_prep.inspect_page import DARK as INSPECT_DARK
from data_prep.inspect_page import Message, Picture, ShownView
from data_prep.inspect_page import page as inspect_page
from opd_recipes.report.page import build, render, write
from opd_recipes.report.palette import DARK, LIGHT
from tests.browser import Browser
from tests.report_run import write_run
from tests.unit.test_inspect import sheet, shown

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("runs") / "run 1", opd__student_mass=0.8)
    write(build(folder), folder / "report.html")
    return folder / "report.html"


def focus(browser, selector):
    browser.evaluate(f"document.querySelector({selector!r}).focus()")


def focused(browser):
    return browser.evaluate("document.activeElement.textContent")


def visible(browser):
    """The headings of the rollouts that are shown."""
    shown = "[...document.querySelectorAll('.rollout')].filter(one => one.offsetHeight)"
    return browser.evaluate(f"{shown}.map(one => one.querySelector('h3').textContent)")


def middle(browser, element):
    """Where an element is, once it is in sight."""
    browser.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
    box = browser.evaluate(f"{element}.getBoundingClientRect().toJSON()")
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def colour(browser, selector="body", kind="backgroundColor"):
    """A computed colour as #rrggbb."""
    said = browser.evaluate(f"getComputedStyle(document.querySelector({selector!r})).{kind}")
    return "#" + "".join(f"{int(part):02x}" for part in said.removeprefix("rgb(").removesuffix(")").split(","))


def test_it_opens_without_a_complaint_or_a_request(browser, file):
    browser.open(file)
    assert browser.complaints == []
    assert browser.requests == [file.as_uri()]  # the file itself
    assert browser.evaluate("document.documentElement.classList.contains('js')")  # its script is what the policy admits
    assert browser.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")


def test_the_policy_stops_what_is_not_the_pages_own(browser, file, tmp_path):
    changed = tmp_path / "changed.html"
    changed.write_text(
        file.read_text().replace(
            "<h1>", "<script>document.title = 'taken'</script><img src='https://x.invalid/a.png'><h1>"
        )
    )
    browser.open(changed)
    assert browser.evaluate("document.title") == "run 1, step 30"
    assert any("Content Security Policy" in said for said in browser.complaints)


def test_assistive_technology_meets_every_section(browser, file):
    browser.open(file)
    tree = browser.tree()
    for role in ("main", "banner", "navigation", "contentinfo"):
        assert [node for node in tree if node[0] == role], role
    regions = [name for role, name in tree if role == "region"]
    for name in ("In numbers", "Warnings", "Curves", "Settings that differ from the paper's", "Rollouts"):
        assert name in regions and ("heading", name) in tree
    assert ("image", "Accuracy") in tree
    assert ("slider", "Accuracy: step to read") in tree
    assert ("listbox", "Tokens of the response at step 30") in tree
    assert ("option", "blue, divergence 0.48") in tree
    assert all(
        name for role, name in tree if role in ("image", "button", "link", "slider", "listbox", "combobox", "checkbox")
    )


def test_keys_go_from_rollout_to_rollout(browser, file):
    browser.open(file)
    assert visible(browser) == ["Rollout 1: row-7"]
    browser.press("j", "j")
    assert visible(browser) == ["Rollout 1: row-7"]  # outside the section its letters are nobody's
    focus(browser, "#next")
    browser.press("j", "j")
    assert visible(browser) == ["Rollout 2: row-8"] and focused(browser).strip().startswith("Rollout 2")
    browser.press("j", "j")
    browser.press("j", "j")
    assert visible(browser) == ["Rollout 3: row-9"]
    assert browser.evaluate("document.querySelector('#place').textContent") == "3 of 3"
    browser.press("k", "k")
    assert visible(browser) == ["Rollout 2: row-8"]
    assert browser.evaluate("location.hash") == "#rollout-2"
    browser.open(file.with_name("report.html"))  # without the address' end: the first again
    assert visible(browser) == ["Rollout 1: row-7"]


def test_a_response_is_one_stop_and_its_tokens_are_read_by_arrows_or_the_pointer(browser, file):
    browser.open(file)
    assert browser.evaluate("document.querySelectorAll('#rollout-1 .tokens .t[tabindex=\"0\"]').length") == 2
    # The hottest token of the last response is chosen at first.
    panel = "document.querySelector('#detail-1').innerText"
    assert "Token 16: red (After: step 30)" in browser.evaluate(panel)
    focus(browser, "#rollout-1 .tokens .t")
    browser.press("ArrowRight")
    assert focused(browser) == "·square"
    browser.press("End")
    assert focused(browser) == "blue"
    said = browser.evaluate(panel)
    assert "Token 16: blue (Before: step 1)" in said and "divergence 0.48 nats" in said
    assert "30.0%" in said and "green" in said  # the student's probability, and the teacher's second choice
    described = "document.getElementById(document.activeElement.getAttribute('aria-describedby')).id"
    assert browser.evaluate(described) == "detail-1"
    browser.move(*middle(browser, "document.querySelectorAll('#rollout-1 .tokens')[1].children[1]"))
    assert "Token 2: ·square (After: step 30)" in browser.evaluate(panel)


def test_rollouts_are_filtered_by_verdict(browser, file):
    browser.open(file)

    def chosen(value):
        filter_ = "document.querySelector('#filter')"
        browser.evaluate(f"{filter_}.value = {value!r}; {filter_}.dispatchEvent(new Event('change'))")
        return visible(browser), browser.evaluate("document.querySelector('#place').textContent")

    assert chosen("changed") == (["Rollout 1: row-7"], "1 of 1")
    assert chosen("right") == (["Rollout 1: row-7"], "1 of 2")
    assert chosen("wrong") == (["Rollout 3: row-9"], "1 of 1")


def test_a_chart_is_read_by_pointer_and_by_keys(browser, file):
    browser.open(file)
    chart = "document.querySelector('.chart')"
    values = f"{chart}.querySelector('.values').innerText.replace(/\\s+/g, ' ')"
    assert "step 30" in browser.evaluate(values) and "80%" in browser.evaluate(values)
    focus(browser, ".scrub")
    browser.press("Home")
    # 55% + 25% x 10 / 30, to the percent.
    assert "step 10" in browser.evaluate(values) and "63%" in browser.evaluate(values)
    assert "63%" in browser.evaluate(f"{chart}.querySelector('.scrub').getAttribute('aria-valuetext')")
    # Step 20 of the run's 1 to 30 lies at 62 + (480 - 14 - 62) x 19 / 29 of the 480 units.
    box = browser.evaluate(
        f"(() => {{ const b = {chart}.querySelector('svg').getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; }})()"
    )
    browser.move(box[0] + box[2] * (62 + 404 * 19 / 29) / 480, box[1] + box[3] / 2)
    assert "step 20" in browser.evaluate(values) and "72%" in browser.evaluate(values)


def test_dark_mode_applies(browser, file):
    browser.open(file)
    assert (colour(browser), colour(browser, "body", "color")) == (LIGHT["paper"], LIGHT["ink"])
    browser.open(file, dark=True)
    assert (colour(browser), colour(browser, "body", "color")) == (DARK["paper"], DARK["ink"])
    assert colour(browser, "#rollout-1 .tokens .h5") == DARK["heat-5"]


@pytest.mark.parametrize("width", [320, 1200])
def test_nothing_sticks_out_of_a_window(browser, file, width):
    browser.open(file, width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_on_paper_all_rollouts_are_there_and_nothing_to_press(browser, file):
    browser.open(file, dark=True)
    browser("Emulation.setEmulatedMedia", media="print")
    assert len(visible(browser)) == 3
    assert browser.evaluate("document.querySelector('#next').offsetHeight") == 0
    assert colour(browser) == LIGHT["paper"]
    browser("Emulation.setEmulatedMedia", media="")


def test_without_its_script_the_page_still_says_everything(browser, file):
    browser("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(file)
    browser("Emulation.setScriptExecutionDisabled", value=False)
    assert len(visible(browser)) == 3
    assert browser.evaluate("document.querySelector('#next').offsetHeight") == 0


def test_a_watched_page_loads_itself_again_unless_somebody_reads_or_has_paused(browser, file, tmp_path):
    watched = tmp_path / "watched.html"
    watched.write_text(render(build(file.parent), refresh=30))
    # The page's clock stands still: the test says when its time has come.
    clock = "window.setInterval = (call, time) => { window.due = call; window.time = time; }"
    script = browser("Page.addScriptToEvaluateOnNewDocument", source=clock)["identifier"]
    browser.open(watched)
    assert browser.evaluate("window.time") == 30_000
    for reading in ("document.querySelector('#pause').click()", "document.querySelector('#next').focus()"):
        browser.open(watched)
        browser.evaluate(f"{reading}; window.mark = 1; window.due()")
        browser.evaluate("new Promise(done => setTimeout(done, 200))")
        assert browser.evaluate("window.mark") == 1
    browser.open(watched)
    browser.evaluate("window.mark = 1; window.due()")
    browser.until(lambda message: message.get("method") == "Page.loadEventFired", "loading itself again")
    assert browser.evaluate("window.mark") is None
    browser("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


WORDS = """[...document.querySelectorAll('article table')].flatMap(table => {
  const found = [], walker = document.createTreeWalker(table, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) for (const word of walker.currentNode.data.matchAll(/\\S+/g)) {
    const range = document.createRange();
    range.setStart(walker.currentNode, word.index);
    range.setEnd(walker.currentNode, word.index + word[0].length);
    found.push([word[0], range.getClientRects().length]);
  }
  return found;
})"""


def test_the_page_of_inspect(browser, tmp_path):
    image = Image.new("RGB", (96, 64), (200, 30, 30))
    view = ShownView("student", [Picture("The student's view of row 0", image)], [image.size], [(96, 64)], 12345, 6)
    row = shown(
        0, [("Answer", "a cat " + "x" * 300)], [Picture("Image of row 0", image)], [view], [Message(True, "no box")]
    )
    file = tmp_path / "inspect.html"
    file.write_text(inspect_page(sheet(row)))
    browser.open(file, dark=True, width=320)
    assert browser.complaints == [] and browser.requests == [file.as_uri()]
    assert colour(browser) == INSPECT_DARK["paper"]
    assert browser.evaluate("document.documentElement.scrollWidth") <= 320
    tree = browser.tree()
    assert ("article", "Row 0") in tree and ("image", "The student's view of row 0") in tree
    assert ("region", "Row 0: tokens and sizes") in tree
    # No word of the tables is broken, however narrow the window.
    words = browser.evaluate(WORDS)
    assert ["12345", 1] in words and {lines for _, lines in words} == {1}
