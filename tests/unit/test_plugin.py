"""What installing the package adds to verl, in processes of their own."""

import os
import subprocess
import sys

COMMON = "import sys, verl, opd_recipes.plugin\n"


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code],
        capture_output=True,
        text=True,
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_trainer_mode_and_estimator_are_there_once_verls_trainers_are():
    run(
        "assert 'opd_recipes.verl_registration' not in sys.modules\n"
        "from verl.trainer.ppo.v1 import PPOTrainer, get_trainer_cls\n"
        "from verl.trainer.ppo.core_algos import get_adv_estimator_fn\n"
        "assert issubclass(get_trainer_cls('opd_sync'), PPOTrainer)\n"
        "assert get_adv_estimator_fn('opd_topk').__module__ == 'opd_recipes.advantage'\n"
        "assert 'opd_recipes.trainer' not in sys.modules, 'only the process that trains should import it'\n"
    )


def test_a_process_that_does_not_train_stays_light():
    run("assert not {'opd_recipes.trainer', 'opd_recipes.advantage', 'verl.trainer.ppo.v1'} & set(sys.modules)")
