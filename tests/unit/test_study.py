"""The study: what it would run, what it remembers, and what it makes of finished runs."""

import json
import sys

import pytest
from hydra import compose, initialize_config_module
from PIL import Image

from opd_recipes import study as study_module
from opd_recipes.check import check_run
from opd_recipes.recipe import Recipe
from opd_recipes.study import Study, run_study
from opd_recipes.study_report import by_variant, publish, spread, table
from opd_recipes.study_variants import VARIANTS, Files, commands, named, shown

RECIPES = [variant for variant in VARIANTS if variant.recipe not in ("grpo", "sft")]


def composed(command, tmp_path):
    """The configuration that a command of the study has, with files that exist."""
    arguments = command[command.index("opd_recipes") + 1 :] if "opd_recipes" in command else command[4:]
    name = arguments[1] if arguments[0] == "--config-name" else command[3]
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("hydra.")]
    with initialize_config_module("opd_recipes.config", version_base=None):
        return compose(name, overrides=overrides)


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("train", "val"):
        (folder / f"{name}.parquet").touch()
    return Files(folder)


@pytest.mark.parametrize("variant", RECIPES, ids=lambda variant: variant.name)
def test_every_recipe_of_the_study_can_be_run_and_is_measured_on_the_same_views(variant, files, tmp_path):
    (command,) = commands(variant, 3, 40, tmp_path, files)
    config = composed(command, tmp_path)
    recipe = check_run(config)
    assert {name: view.kinds for name, view in recipe.validation_views.items()} == {
        "full": ["redbox"],
        "crop": ["redbox", "crop"],
    }
    assert (config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (32, 2)
    assert config.data.seed == config.actor_rollout_ref.rollout.seed == 3
    assert config.trainer.total_training_steps == config.trainer.test_freq == 40
    assert not config.trainer.val_before_train
    optim = config.actor_rollout_ref.actor.optim
    assert (optim.lr, optim.lr_scheduler_type, optim.min_lr_ratio or 0) == (2.5e-4, "cosine", 0)


def test_the_variants_differ_in_what_they_are_named_for(files, tmp_path):
    def load(name):
        (variant,) = named([name])
        return Recipe.load(composed(commands(variant, 0, 40, tmp_path, files)[0], tmp_path).opd)

    whole, crop = ["redbox"], ["redbox", "crop"]
    views = {
        "vision_opd": (whole, crop),
        "rp_opsd": (["redbox", "resize"], whole),
        "opsd": (whole, whole),
        "view_same": (whole, whole),
        "view_noise": (whole, [*crop, "noise"]),
    }
    for name, (student, teacher) in views.items():
        recipe = load(name)
        assert (recipe.student_view.kinds, recipe.teacher_view.kinds) == (student, teacher), name
    assert load("opd_v").negative_view.kinds == [*crop, "mask_rectangle"]
    assert load("opsd").teacher_hint
    for name in ("current", "frozen", "trust_region"):
        assert load(f"teacher_{name}").teacher.rule.func.__name__ == name
    assert load("learned_10").selection.budget == 0.1 and load("entropy_50").selection.budget == 0.5


def test_comparators_see_as_many_answers_and_the_same_rate(files, tmp_path):
    grpo, sft = named(["grpo", "sft"])
    (command,) = commands(grpo, 3, 40, tmp_path, files)
    config = composed(command, tmp_path)
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 64
    assert config.trainer.v1.trainer_mode == "sync" and "opd" not in config
    training, measuring = commands(sft, 3, 40, tmp_path, files)
    trained = composed(training, tmp_path)
    assert (trained.data.train_batch_size, trained.data.seed, trained.trainer.total_training_steps) == (32, 3, 40)
    for optim in (config.actor_rollout_ref.actor.optim, trained.optim):
        assert (optim.lr, optim.lr_scheduler_type, optim.lr_warmup_steps) == (2.5e-4, "cosine", 5)
    measured = composed(measuring, tmp_path)
    assert measured.actor_rollout_ref.model.path == f"{tmp_path}/checkpoints/global_step_40/huggingface"
    assert measured.trainer.val_only and measured.trainer.val_before_train
    assert measured.data.val_files == config.data.val_files


def test_names(capsys, tmp_path):
    assert [variant.name for variant in named(["sft", "vision_opd"])] == ["vision_opd", "sft"]
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS) == len(named([])) == 26
    assert run_study(tmp_path, only=["grpo", "gpro"]) == 2
    assert "unknown variant gpro; known: vision_opd" in capsys.readouterr().err


def test_a_shown_command_has_no_path_of_this_machine(files, tmp_path):
    (command,) = commands(named(["reverse_kl"])[0], 1, 40, tmp_path / "runs", files)
    text = shown(command, tmp_path)
    assert text.startswith("python -m opd_recipes --config-name vision_opd '+overlay=[cpu,toy,slim,study]'")
    assert "data.train_files=runs/study/data/train.parquet" in text and "opd/divergence=reverse_kl" in text
    assert "model.path=data_prep/toy/base" in text and str(tmp_path) not in text
    (command,) = commands(named(["grpo"])[0], 1, 40, tmp_path / "runs", files)
    assert shown(command, tmp_path).startswith("opd_recipes grpo '+overlay=")


SCRIPT = """
import json, os, sys
accuracy = {f"val-core/toy@{view}/acc/mean@1": float(value) for view, value in zip(("full", "crop"), sys.argv[2:4])}
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in (1, 2, 3):
        data = {"timing_s/update_actor": 10.0 if step == 1 else step, "opd/teacher_tokens": 100.0}
        print(json.dumps({"step": step, "data": data | (accuracy if step == 3 else {})}), file=file)
with open(sys.argv[1], "a") as file:
    print(os.environ["OPD_RUN_ID"], file=file)
sys.exit(int(sys.argv[4]))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Commands that write metrics at once in the place of training; returns a function that reads which ones have run."""
    calls, outcome = tmp_path / "calls", {"reverse_kl": (0.7, 0.9, 0), "grpo": (0.6, 0.9, 0), "base": (0.5, 0.9, 0)}

    def fake_commands(variant, seed, steps, folder, files, extra=()):
        full, crop, code = outcome[variant.name]
        command = [sys.executable, "-c", SCRIPT, str(calls), str(full + seed / 100), str(crop), str(code)]
        return [command, command] if variant.name == "grpo" else [command]

    monkeypatch.setattr(study_module, "commands", fake_commands)
    monkeypatch.setattr(study_module, "make_files", lambda out: None)
    monkeypatch.setattr(study_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(study_module, "publish", lambda rows, planned, folder: published.append((rows, planned)))
    published = fake_commands.published = []

    def ran():
        lines = calls.read_text().split() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return sorted(line.split("-", 1)[1] for line in lines)

    return ran, outcome, published


def test_runs_every_variant_with_every_seed_once_and_measures_the_base_model_once(fake, tmp_path):
    ran, _, published = fake
    out = tmp_path / "out"
    assert run_study(out, [0, 1], ["reverse_kl", "grpo"], jobs=2) == 0
    # GRPO stands for runs of two commands here.
    assert ran() == ["base", "grpo-0", "grpo-0", "grpo-1", "grpo-1", "reverse_kl-0", "reverse_kl-1"]
    rows, planned = published[-1]
    assert planned == len(rows) == 4
    row = next(row for row in rows if (row["variant"], row["seed"]) == ("reverse_kl", 1))
    assert row["full_before"] == 0.5 and row["full_after"] == pytest.approx(0.71)
    assert row["gap_closed"] == pytest.approx(0.21 / 0.4)
    # Steps 2 and 3: the first one, in which everything is set up, does not count.
    assert row["update_seconds"] == 2.5 and row["teacher_tokens"] == 100
    assert row["group"] == "divergence" and row["recipe"] == "vision_opd"

    assert run_study(out, [0, 1], ["reverse_kl", "grpo"]) == 0
    assert ran() == []


def test_another_machine_goes_on_from_what_is_published(fake, tmp_path):
    ran, _, published = fake
    run_study(tmp_path / "here", [0], ["reverse_kl", "grpo"])
    ran()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "study.json").write_text(json.dumps(published[-1][0]))
    assert run_study(tmp_path / "there", [0, 1], ["reverse_kl", "grpo"], publish_to=tmp_path / "results") == 0
    assert ran() == ["grpo-1", "grpo-1", "reverse_kl-1"]
    assert [row for row in published[-1][0] if row["seed"] == 0] == published[0][0]


def test_only_what_changed_is_run_again(fake, tmp_path):
    ran, outcome, published = fake
    run_study(tmp_path / "out", [0], ["reverse_kl", "grpo"])
    ran()
    outcome["reverse_kl"] = (0.8, 0.9, 0)
    run_study(tmp_path / "out", [0], ["reverse_kl", "grpo"])
    assert ran() == ["reverse_kl-0"]
    assert {row["variant"]: row["full_after"] for row in published[-1][0]} == {"reverse_kl": 0.8, "grpo": 0.6}


def test_a_failed_run_does_not_stop_the_others_and_is_tried_again(fake, tmp_path, capsys):
    ran, outcome, published = fake
    outcome["reverse_kl"] = (0.8, 0.9, 3)
    assert run_study(tmp_path / "out", [0], ["reverse_kl", "grpo"]) == 1
    assert "failed: reverse_kl seed 0 (exit code 3); the log is in" in capsys.readouterr().err
    rows, planned = published[-1]
    assert [row["variant"] for row in rows] == ["grpo"] and planned == 2
    ran()
    outcome["reverse_kl"] = (0.8, 0.9, 0)
    assert run_study(tmp_path / "out", [0], ["reverse_kl", "grpo"]) == 0
    assert ran() == ["reverse_kl-0"]


def test_a_run_that_hangs_is_ended(fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study_module, "LIMIT_MINUTES", 0.02)
    monkeypatch.setattr(study_module, "commands", lambda *args: [[sys.executable, "-c", "import time; time.sleep(60)"]])
    assert run_study(tmp_path / "out", [0], ["grpo"], jobs=2) == 1
    assert "grpo seed 0 (ended after 0.02 minutes)" in capsys.readouterr().err


def test_time_left_is_the_mean_of_finished_runs(tmp_path):
    study = Study.plan(tmp_path, [0, 1], ["grpo", "sft"], 40, jobs=2)
    assert study.progress([]).startswith("0 of 5 runs;")
    study.base.result, study.runs[0].result = {"minutes": 2.0}, {"minutes": 4.0}
    # Three left at 3 minutes each, two at a time; of one that is under way half is left.
    assert study.progress([]).startswith("2 of 5 runs, about 4 min left;")
    assert study.progress([study.runs[1]]) == "2 of 5 runs, about 4 min left; sft seed 0 starting"
    assert [run.name for run in study.runs] == ["grpo seed 0", "sft seed 0", "grpo seed 1", "sft seed 1"]


def row(variant, seed, full, group="methods", **more):
    return {
        **{
            "variant": variant,
            "group": group,
            "recipe": variant,
            "seed": seed,
            "steps": 40,
            "date": f"2026-01-0{seed + 1}",
        },
        **{"full_before": 0.5, "full_after": full, "crop_before": 0.9, "crop_after": 0.8},
        **{"gap_closed": (full - 0.5) / 0.4, "minutes": 4.0, "command": "python"},
        **{"teacher_tokens": 3712.0, "update_seconds": 1.25, "step_seconds": 3.0, **more},
    }


ROWS = [
    row("vision_opd", 0, 0.70),
    row("random_25", 0, 0.60, group="selection", teacher_tokens=None),
    row("vision_opd", 1, 0.74),
    row("vision_opd", 2, 0.72),
]


def test_spread_by_hand():
    assert spread([70.0, 74.0, 72.0]) == "72.0 ± 2.0"
    assert spread([70.0]) == "70.0"


def test_the_table_says_how_much_is_finished():
    text = table(ROWS, planned=78)
    assert "4 of 78 runs are finished. Training steps: 40; dates: 2026-01-01 to 2026-01-03." in text
    assert "reads 50.0% of the full images and 90.0% of the crops" in text
    assert "| `vision_opd` | 72.0 ± 2.0 | 80.0 ± 0.0 | 55.0 ± 5.0 | 3 | 3712 | 1.25 | 3.00 |" in text
    assert "| `random_25` | 60.0 | 80.0 | 25.0 | 1 |  | 1.25 | 3.00 |" in text
    assert (
        text.index("**methods**") < text.index("vision_opd`") < text.index("**selection**") < text.index("random_25`")
    )


def test_publishes_file_table_and_picture(tmp_path):
    publish(ROWS, 78, tmp_path / "results")
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["study.json", "study.md", "study.png"]
    assert json.loads((tmp_path / "results" / "study.json").read_text()) == ROWS
    assert list(by_variant(ROWS)) == ["vision_opd", "random_25"]
    with Image.open(tmp_path / "results" / "study.png") as image:
        assert image.width > 800 and len(image.convert("RGB").getcolors(1 << 24)) > 20
