"""The checker: each kind of broken row gets its verdict, odd rows that are right get none, and training agrees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_prep import check
from data_prep.check_boxes import BoxStatistics
from data_prep.check_images import Seen
from data_prep.faults import ERROR, KINDS, WARNING, Report
from opd_recipes.dataset import TwoViewDataset, with_images
from tests import harness
from tests.unit.check_helpers import (
    HALF,
    HINT,
    PROVIDED,
    faults_of,
    kinds_of,
    one_row,
    setup,
    write,
)
from tests.unit.check_rows import (
    BAD_BOXES,
    BAD_IMAGES,
    BAD_TEXT,
    BOX,
    QUESTION,
    SOUND,
    Case,
    answer,
    asked,
    encoded,
    entry,
    picture,
    row,
)

# The table: one file with all rows, checked once

CASES: list[Case] = [SOUND[0], *BAD_IMAGES, *BAD_BOXES, *BAD_TEXT, *SOUND[1:]]


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> tuple[list[dict], list[dict]]:
    folder = tmp_path_factory.mktemp("table") / "data"
    folder.mkdir()
    rows = [case.make(number, folder) for number, case in enumerate(CASES)]
    return rows, faults_of(folder, [rows])


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_each_row_gets_its_verdict(table, number):
    _, faults = table
    assert kinds_of(faults, number) == CASES[number].kinds


def test_the_table_is_long_enough():
    assert len([case for case in CASES if case.kinds]) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_fault_says_file_row_reason_and_remedy(table):
    _, faults = table
    for fault in faults:
        assert fault["file"].endswith("train0.parquet") and isinstance(fault["row"], int)
        assert len(fault["reason"]) > 10 and len(fault["remedy"]) > 5
        assert fault["severity"] == KINDS[fault["kind"]][0]
        assert "\x00" not in fault["reason"] and "\x07" not in fault["reason"], (
            "no raw control characters on the screen"
        )


WORTH_A_LOOK = {
    "image_transparent", "image_cmyk", "image_animated", "image_blank", "image_small", "crop_small", "image_shrunk",
    "box_whole_image", "box_tiny", "foreign_token", "control_characters", "answer_too_long", "data_source_variants",
    "duplicate_id", "duplicate_row",
}  # fmt: skip


def test_severities(table):
    """Training can go on with a warning: of the kinds in the table, these; all others are errors."""
    found = {kind for case in CASES for kind in case.kinds}
    assert {kind for kind in found if KINDS[kind][0] == WARNING} == WORTH_A_LOOK
    assert {KINDS[kind][0] for kind in found - WORTH_A_LOOK} == {ERROR}


def test_training_uses_no_row_that_the_checker_refuses_and_refuses_none_that_it_lets_pass(table, tmp_path):
    """Row for row with the data set that training loads, apart from rows that training would only regret."""
    rows, faults = table
    folder = Path(faults[0]["file"]).parent
    refused = {fault["row"] for fault in faults if fault["severity"] == ERROR}
    config = harness.config(f"+data.cache_dir={tmp_path}", "opd.on_bad_row=skip")
    model = harness.prompt_builder()
    data = TwoViewDataset([str(folder / "train0.parquet")], model.tokenizer, config.data, model.processor)
    used = set(data._kept)
    assert not set(range(len(rows))) - used - refused, "training refuses what the checker lets pass"
    regretted = {kind for number in used & refused for kind in CASES[number].kinds if KINDS[kind][0] == ERROR}
    assert regretted == {
        "box_normalised", "data_source", "image_deep", "image_invisible", "image_unreadable", "no_question", "question_empty",
        "role", "special_token",
    }  # fmt: skip


# Rows for other recipes


def exact_tokens(view: str, question: str) -> int:
    """Length of the prompt that the rollout worker would build of row 0."""
    parts = [{"type": "image", "image": "x"}, {"type": "text", "text": question.removeprefix("<image>")}]
    image = setup().recipe.views[view](picture(0), tuple(BOX))
    return len(harness.prompt_builder()._prompt(with_images([{"role": "user", "content": parts}], [image])).ids)


def test_tokens_are_those_of_training(tmp_path):
    longer = "<image>What is in the red box? Answer in one word."
    path = write(tmp_path / "rows.parquet", [row(0), row(1, prompt=asked(longer))])
    with Report() as report:
        state = check.check_sets(setup(), {"training": [path]}, None, report)["training"]
    assert {view: list(counts) for view, counts in state.tokens.items()} == {
        view: [exact_tokens(view, question) for question in (QUESTION, longer)] for view in ("student", "teacher")
    }


@pytest.mark.parametrize(
    ("evidence", "kinds"),
    [
        ([entry(encoded(picture(5)))], set()),
        (None, {"evidence_missing"}),
        ([], {"evidence_missing"}),
        ([entry(encoded(picture(5)))] * 2, {"evidence_count"}),
        ([entry(encoded(picture(0)))], {"evidence_identical"}),
        ([entry(encoded(picture(0), "WEBP", lossless=True))], {"evidence_identical"}),
        ([entry(encoded(picture(5))[:9000])], {"image_truncated"}),
        ([entry(None)], {"image_missing"}),
        ([entry(encoded(picture(5, (24, 24))))], {"crop_small"}),
    ],
)
def test_evidence_images(tmp_path, evidence, kinds):
    assert one_row(tmp_path, *PROVIDED, bbox_images=evidence, bbox=None) == kinds


def test_a_box_that_no_view_reads_is_left_alone_unless_nothing_can_read_it(tmp_path):
    assert one_row(tmp_path, *PROVIDED, bbox=[0.1, 0.1, 0.2, 0.2]) == set()
    assert one_row(tmp_path, *PROVIDED, bbox=[1.0, 2.0, 3.0]) == {"box_length"}


@pytest.mark.parametrize(
    ("reward", "kinds"),
    [
        (answer("red"), set()),
        (None, {"answer_missing"}),
        (answer(None), {"answer_missing"}),
        (answer(" "), {"answer_empty"}),
    ],
)
@pytest.mark.parametrize(("reader", "val"), [((), True), ((HINT,), False)], ids=["validation", "a hint"])
def test_answers_where_they_are_read(tmp_path, reward, kinds, reader, val):
    assert one_row(tmp_path, *reader, val=val, reward_model=reward) == kinds


def test_an_answer_with_a_special_token_breaks_only_a_hint(tmp_path):
    broken = answer("<|im_end|>")
    assert one_row(tmp_path, HINT, reward_model=broken) == {"special_token"}
    assert one_row(tmp_path, reward_model=broken) == set()


def test_a_view_for_validation_alone_is_drawn_of_validation_rows(tmp_path):
    views = [*HALF, "opd.validation_views=[student, {crop: [{kind: crop}]}]"]
    train, val = ([row(i, bbox=None, images=[entry(encoded(picture(i, (240, 240))))])] for i in (0, 1))
    faults = faults_of(tmp_path, [train], *views, val=[val])
    assert [(fault["kind"], Path(fault["file"]).name) for fault in faults] == [("box_missing", "val0.parquet")]


def test_a_processor_that_enlarges_the_small_view_again(tmp_path):
    """64 x 64 is the tiny processor's least; half of it becomes 64 x 64 again."""
    small = [entry(encoded(picture(0, (64, 64))))]
    assert one_row(tmp_path, *HALF, images=small) == {"resize_undone", "image_small"}
    large = [entry(encoded(picture(0, (240, 240))))]
    assert one_row(tmp_path, *HALF, images=large) == set()


def test_views_that_show_the_same(tmp_path):
    whole = ["opd.views.student=[original]", "opd.views.teacher=[{kind: crop, zoom: 1.0, padding: 3.0}]"]
    assert one_row(tmp_path, *whole) == {"views_alike"}
    assert one_row(tmp_path, "opd.views.student=[original]", "opd.views.teacher=[original]") == set(), (
        "a control, meant so"
    )
    assert one_row(tmp_path, *whole, HINT) == set(), "the teacher knows the answer"


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        # The student's prompt has 6 image tokens (96 x 64) and text; its response up to 4 tokens.
        ("actor_rollout_ref.rollout.max_model_len=20", "no_response_room"),
        ("actor_rollout_ref.rollout.max_model_len={tokens+2}", "response_room"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens+2}", "micro_batch_room"),
        ("data.max_prompt_length={tokens-1}", "prompt_too_long"),
    ],
)
def test_room_for_the_response(tmp_path, override, kind):
    tokens = exact_tokens("student", QUESTION)
    override = override.replace("{tokens+2}", str(tokens + 2)).replace("{tokens-1}", str(tokens - 1))
    assert kind in one_row(tmp_path, override)


def test_exactly_enough_room(tmp_path):
    tokens = max(exact_tokens(view, QUESTION) for view in ("student", "teacher"))
    limits = ["rollout.max_model_len", "actor.ppo_max_token_len_per_gpu"]
    room = [f"actor_rollout_ref.{limit}={tokens + 4}" for limit in limits]
    assert one_row(tmp_path, *room, f"data.max_prompt_length={tokens}") == set()


def test_a_chat_template_that_refuses(tmp_path):
    template = "actor_rollout_ref.model.custom_chat_template=\"{{ raise_exception('no such turn') }}\""
    assert one_row(tmp_path, template) == {"template"}


def test_whatever_else_training_refuses(tmp_path):
    """A mask that needs surroundings, and a box that leaves none."""
    masked = "opd.views.teacher=[{kind: mask_box, fill: mean_around}]"
    assert one_row(tmp_path, masked, bbox=[0.0, 0.0, 96.0, 64.0]) == {"refused", "box_whole_image"}


# Between rows and files


def test_validation_images_in_training(tmp_path):
    """The validation set stays as it is: the training row is the one to leave out."""
    again = entry(encoded(picture(7), "WEBP", lossless=True))
    train = [row(0), row(1, images=[entry(encoded(picture(7)))]), row(2, images=[again])]
    faults = faults_of(tmp_path, [train], val=[[row(7)]])
    assert [(fault["row"], fault["kind"]) for fault in faults] == [(1, "leak_bytes"), (2, "leak_pixels")]
    assert all("train0" in fault["file"] and "val0.parquet, row 0" in fault["reason"] for fault in faults)


def test_duplicates_are_found_across_files_and_ids_within_one(tmp_path):
    faults = faults_of(tmp_path, [[row(0), row(1)], [row(0)]])
    assert [(Path(fault["file"]).name, fault["row"], fault["kind"]) for fault in faults] == [
        ("train1.parquet", 0, "duplicate_row")
    ]


def test_fewer_rows_than_a_batch(tmp_path):
    faults = faults_of(tmp_path, [[row(0), row(1, bbox=None)]], "data.train_batch_size=2")
    assert [fault["kind"] for fault in faults] == ["box_missing", "few_rows"]
    assert "1 of 2 training rows" in faults[1]["reason"]
    assert not faults_of(tmp_path, [[row(0), row(1)]], "data.train_batch_size=2", limit=1), "unknown with --limit"


def seen(width: int, height: int) -> Seen:
    return Seen((width, height), (width, height), b"", b"")


def test_boxes_that_together_look_like_another_convention():
    statistics = BoxStatistics()
    rng = np.random.default_rng(0)
    for _ in range(50):  # x, y, width, height that are valid corners by chance: the box is wider than its left margin
        x, y = rng.integers(0, 40, 2)
        statistics.add([x, y, x + rng.integers(1, 100 - 2 * x), y + rng.integers(1, 100 - 2 * y)], seen(100, 100))
    assert [finding.kind for finding in statistics.findings()] == ["boxes_xywh"]
    statistics.add([60, 60, 90, 90], seen(100, 100))
    assert statistics.findings() == []

    statistics = BoxStatistics()
    for i in range(50):
        statistics.add([900 - i, 900 - i, 990, 950], seen(1800, 1400))
    assert [finding.kind for finding in statistics.findings()] == ["boxes_thousandths"]
    statistics.add([900, 900, 1300, 950], seen(1800, 1400))
    assert statistics.findings() == []
