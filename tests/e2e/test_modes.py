"""The asynchronous trainer modes, each on the real loop: rollouts of older weights, corrected and compared all the same."""

import pytest

from tests.e2e.runs import Run

pytestmark = pytest.mark.e2e


def learned(run):
    """What holds of every step, however the rollouts came."""
    assert sorted(run.steps) == [1, 2, 3]
    for metrics in run.steps.values():
        assert 0.01 < metrics["opd/divergence"] < 0.7 and metrics["actor/grad_norm"] > 0
        assert metrics["opd/failed_rollouts"] == 0 and metrics["opd/skipped_updates"] == 0


def test_colocated_rollouts_go_on_with_newer_weights(folder, data):
    run = Run(
        folder,
        "colocate",
        data,
        "trainer.v1.trainer_mode=opd_colocate_async",
        "opd.seeded_rollouts=false",
        "trainer.total_training_steps=3",
        "trainer.test_freq=3",
        # Weights that move visibly in a step: rollouts from before it must get other importance weights.
        "actor_rollout_ref.actor.optim.lr=5e-3",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    ).ok()
    learned(run)
    ages = run.series("training/off_policy/trajectory_staleness/max")
    assert ages[0] == 0 and max(ages) > 0
    for age, gap in zip(ages, run.series("opd/rollout_gap"), strict=True):
        assert (gap < 2e-3) == (
            age == 0
        )  # older weights sampled other probabilities, and the weights of the loss see it
    assert 0 <= run.steps[3]["val-core/toy@student/acc/mean@1"] <= 1


def test_separate_rollouts_get_the_weights_over_gloo(folder, data):
    """A batch is two mini-batches, each one update; the trainer waits for neither vLLM nor the other half."""
    run = Run(
        folder,
        "separate",
        data,
        "trainer.total_training_steps=3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "trainer.v1.separate_async.num_warmup_batches=0",
        overlay="[cpu,toy,cpu_separate]",
    ).ok()
    learned(run)
    assert run.steps[1]["opd/rollout_pearson"] >= 0.999
