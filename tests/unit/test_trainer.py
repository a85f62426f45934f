"""The trainer's choices about a batch, with the queue and the workers replaced; the real ones run in tests/e2e."""

from types import SimpleNamespace

import pytest
import torch
from transfer_queue import KVBatchMeta

from opd_recipes import trainer as module
from opd_recipes.recipe import Recipe
from opd_recipes.trainer import OpdTrainerSync
from opd_recipes.watch import RunStopped
from tests import harness

ROWS = 8


def batch():
    # Out of order, as rollouts arrive: the row number and the session are the end of the key.
    keys = [f"uid{i}_0_0" for i in (5, 2, 7, 0, 1, 6, 3, 4)]
    return KVBatchMeta(
        keys=keys,
        tags=[{"seq_len": 9, "prompt_len": 6, "response_len": 3} for key in keys],
        partition_id="train",
        extra_info={"temperature": 1.0},
    )


class Worker:
    """Records the rows of each update."""

    def __init__(self):
        self.updated = []

    def last_utilities(self):
        return [[float(key[3]) for key in self.updated[-1]]]


@pytest.fixture
def trainer(monkeypatch):
    def make(*overrides, dead=()):
        """A trainer whose row i has features i and utility i; rows in ``dead`` have no token that counts."""

        def get(keys, partition_id, select_fields):
            rows = [int(key[3]) for key in keys]
            features = [[0.0 if row in dead else float(row + 1)] * 6 for row in rows]
            return {
                module.FEATURE_COLUMN: [torch.tensor(row, dtype=torch.float64) for row in features],
                module.ROW_NUMBER: rows,
                "session_id": [0] * len(rows),
                module.TEACHER_TOKENS: [row + 1 for row in rows],
            }

        monkeypatch.setattr(module.tq, "kv_batch_get", get)
        made = object.__new__(OpdTrainerSync)
        cfg = harness.config(*overrides)
        made.config, made.recipe = cfg, Recipe.load(cfg.opd)
        made.global_steps, made.actor_rollout_wg = 3, Worker()
        made._balanced = lambda subset, metrics: subset

        def update(subset, metrics):
            made.actor_rollout_wg.updated.append(list(subset.keys))
            made.seen = subset
            metrics["actor/grad_norm"] = 1.0

        made._update = update
        return made

    return make


def test_a_budget_of_everything_leaves_the_batch_as_it_is(trainer):
    made, whole = trainer("opd/selection=learned", "opd.selection.budget=1"), batch()
    made._update_selected(whole, metrics := {})
    assert made.seen is whole and metrics["selection/share"] == 1


def test_the_choice_does_not_depend_on_the_order_of_arrival(trainer):
    made = trainer("opd/selection=random", "opd.selection.budget=0.5")
    made._update_selected(batch(), {})
    other = batch()
    other.reorder(list(reversed(range(ROWS))))
    made._update_selected(other, {})
    first, second = made.actor_rollout_wg.updated
    assert len(first) == 4 and set(first) == set(second)


def test_the_most_uncertain_are_taken_and_all_rows_come_back(trainer):
    made = trainer("opd/selection=entropy", "opd.selection.budget=0.25")
    back = made._update_selected(batch(), metrics := {})
    assert set(made.seen.keys) == {"uid7_0_0", "uid6_0_0"}
    assert set(back.keys) == set(batch().keys)
    assert metrics["selection/utility"] == 6.5
    assert metrics["selection/teacher_token_share"] == pytest.approx((8 + 7) / 36)


def test_nothing_chosen_is_no_update(trainer):
    made = trainer("opd/selection=entropy", "opd.selection.budget=0.1")
    back = made._update_selected(batch(), metrics := {})
    assert made.actor_rollout_wg.updated == [] and back.keys == batch().keys
    assert metrics["selection/share"] == 0 and "actor/grad_norm" not in metrics


def test_padding_and_empty_responses_are_no_candidates(trainer):
    made = trainer("opd/selection=entropy", "opd.selection.budget=0.5", dead=(7,))
    padded = batch()
    padded.tags[0]["is_padding"] = True  # row 5
    made._update_selected(padded, metrics := {})
    assert metrics["selection/share"] == 0.5 and set(made.seen.keys) == {"uid6_0_0", "uid4_0_0", "uid3_0_0"}


def test_a_skipped_update_teaches_the_selector_nothing(trainer):
    made = trainer("opd/selection=learned", "+opd.selection.warmup=2", "+opd.selection.minibatch=2")
    update = made._update

    def explode(subset, metrics):
        update(subset, metrics)
        metrics["actor/grad_norm"] = float("nan")

    made._update = explode
    made._update_selected(batch(), metrics := {})
    assert "selection/stored" not in metrics
    made._update = update
    made.global_steps += 1
    made._update_selected(batch(), metrics)
    assert metrics["selection/stored"] == 2 and metrics["selection/updates"] == 2


def test_padding_rows_that_the_subset_gained_come_back_to_be_cleared(trainer):
    made = trainer("opd/selection=entropy", "opd.selection.budget=0.25")

    def pad(subset, metrics):
        return KVBatchMeta(keys=[*subset.keys, "pad0"], tags=[*subset.tags, {"is_padding": True}], partition_id="train")

    made._balanced = pad
    made.actor_rollout_wg.last_utilities = lambda: [[1.0, 2.0], [0.0]]
    back = made._update_selected(batch(), metrics := {})
    assert set(back.keys) == {*batch().keys, "pad0"} and metrics["selection/utility"] == 1.5


def test_the_columns_of_an_update(trainer):
    made = trainer()
    made.single_update = True
    assert "negative_input_ids" not in made._update_columns() and "teacher_input_ids" in made._update_columns()
    made.recipe = Recipe.load(harness.config("opd/weights=margin", "opd.views.negative=[{kind: noise}]").opd)
    assert "negative_input_ids" in made._update_columns()
    made.config = harness.config(overlay="[cpu,toy,advantage]")
    made.recipe = Recipe.load(made.config.opd)
    columns = made._update_columns()
    assert "advantages" in columns and not [name for name in columns if name.startswith("teacher")]


def test_without_the_selectors_file_a_learned_run_does_not_resume(trainer, monkeypatch, tmp_path):
    made = trainer("opd/selection=learned", f"trainer.default_local_dir={tmp_path}")
    stock = SimpleNamespace(_load_checkpoint=lambda: None)
    monkeypatch.setattr(module, "super", lambda: stock, raising=False)
    with pytest.raises(FileNotFoundError, match="without opd.selection.kind=learned"):
        made._load_checkpoint()
    folder = tmp_path / "global_step_3"
    folder.mkdir()
    torch.save(made.recipe.selection.state_dict(), folder / module.SELECTOR_FILE)
    made._load_checkpoint()
    made.recipe = Recipe.load(harness.config("opd/selection=random").opd)
    with pytest.raises(ValueError, match="holds a selector"):
        made._load_checkpoint()


def test_a_checkpoint_is_not_begun_on_a_disk_that_cannot_hold_it(trainer, tmp_path, monkeypatch):
    made = trainer(f"trainer.default_local_dir={tmp_path}/checkpoints")
    made.actor_rollout_wg.checkpoint_bytes = lambda: [6_000_000_000, 5_000_000_000]
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10_999_999_999))
    with pytest.raises(RuntimeError, match=r"step 3 needs 11.0 GB, but .*checkpoints has 11.0 GB left"):
        made._save_checkpoint()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=11_000_000_000))
    made._check_space()


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_touches_no_other(trainer, tmp_path, monkeypatch):
    made = trainer(f"trainer.default_local_dir={tmp_path}", "trainer.max_actor_ckpt_to_keep=2")
    made.actor_rollout_wg.checkpoint_bytes = lambda: [0]
    for step in (1, 2):
        (tmp_path / f"global_step_{step}").mkdir()
    (tmp_path / "global_step_3").mkdir()
    (tmp_path / "global_step_3" / "stale").touch()

    def full(self):
        assert not (tmp_path / "global_step_3").exists(), "what was there is of another run"
        (tmp_path / "global_step_3").mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.PPOTrainerSync, "_save_checkpoint", full)
    with pytest.raises(RunStopped, match=r"step 3 could not be written to .*No space left on device"):
        made._save_checkpoint()
    assert {folder.name for folder in tmp_path.iterdir()} == {"global_step_1", "global_step_2", "global_step_3"}
    monkeypatch.setattr(module.PPOTrainerSync, "_save_checkpoint", lambda self: (tmp_path / "global_step_3").mkdir())
    made._save_checkpoint()
    assert {folder.name for folder in tmp_path.iterdir()} == {"global_step_2", "global_step_3"}


def ranked(seq_lens):
    """Rows of two prompts in turn, four on each of two ranks, as verl has balanced them."""
    keys = [f"uid{i % 2}_{i}_0" for i in range(8)]
    tags = [{"seq_len": length} for length in seq_lens]
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train")


def test_rows_of_a_prompt_come_to_one_rank():
    together = module._with_prompts_together(ranked([100] * 8), 2, metrics := {})
    assert [{key.split("_")[0] for key in together.keys[r : r + 4]} for r in (0, 4)] == [{"uid0"}, {"uid1"}]
    assert metrics["global_seqlen/balanced_max"] == metrics["global_seqlen/balanced_min"] == 400


def test_ranks_stay_as_balanced_as_verl_leaves_them_but_for_a_little():
    """One prompt's rows are twice as long: whole on a rank they would make it twice as busy."""
    batch = ranked([2000, 1000] * 4)
    before = [tag["seq_len"] for tag in batch.tags]
    together = module._with_prompts_together(batch, 2, {})
    after = [tag["seq_len"] for tag in together.tags]
    for lengths in (before, after):
        assert sum(lengths[:4]) == sum(lengths[4:]) == 6000
