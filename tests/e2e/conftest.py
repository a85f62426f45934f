"""What the toy runs share."""

import pytest

from data_prep.__main__ import main as data_prep
from tests.e2e.runs import EQUAL_LENGTHS, Run


def toy_data(folder):
    data_prep(["toy", "--out", str(folder / "data"), "--train", "96", "--val", "24"])
    return folder / "data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def data(folder):
    return toy_data(folder)


@pytest.fixture(scope="session")
def first(tmp_path_factory):
    """Three steps with equal lengths; after the second and the third a validation, a trace and a checkpoint."""
    home = tmp_path_factory.mktemp("first")
    run = home / "first"
    run.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TENSORBOARD_DIR", str(run / "tensorboard"))
        patch.setenv("WANDB_DIR", str(run))
        patch.setenv("WANDB_MODE", "offline")
        return train_first(home, run)


#: A run in which every part has a state to keep, the selection's too, and whose rollouts are the same bit for bit: with one
#: request at a time, vLLM's last bits do not depend on what else it has to do.
WHOLE_STATE = (
    *("+opd.selection.warmup=8", "+opd.selection.minibatch=8", "opd.oracle_every=2"),
    *("trainer.total_training_steps=3", "actor_rollout_ref.rollout.max_num_seqs=1"),
)


@pytest.fixture(scope="session")
def bas_opd(tmp_path_factory):
    """Three steps of BAS-OPD, and a checkpoint after the third."""
    home = tmp_path_factory.mktemp("bas_opd")
    return Run(home, "run", toy_data(home), *WHOLE_STATE, "trainer.save_freq=3", recipe="bas_opd").ok()


def train_first(home, run):
    return Run(
        home,
        run.name,
        toy_data(home),
        EQUAL_LENGTHS,
        "trainer.logger=[console,file,tensorboard,wandb]",
        "trainer.total_training_steps=3",
        "trainer.save_freq=2",
        "trainer.test_freq=2",
        f"opd.trace={{rows: 5, folder: {run}/traces}}",
    ).ok()
