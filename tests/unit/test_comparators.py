"""What verl's own trainers need of this package: mended positions, a process group on CPU, variables, runs that do not meet."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from opd_recipes import comparators
from opd_recipes.comparators import set_environment


@pytest.fixture(scope="module")
def stock():
    """The import changes verl in this process: other tests get it back as it was."""
    import verl.workers.engine_workers  # noqa: F401  one of the modules that hold the functions

    names = ("maybe_fix_3d_position_ids", "initialize_global_process_group", "initialize_global_process_group_ray")
    loaded = [module for name, module in sys.modules.items() if name.startswith("verl")]
    before = [(module, name, getattr(module, name)) for module in loaded for name in names if hasattr(module, name)]
    from opd_recipes import stock

    yield stock
    for module, name, value in before:
        setattr(module, name, value)


def rows_of(*lengths):
    return [torch.arange(4 * n).reshape(4, n) + 100 * i for i, n in enumerate(lengths)]


def as_verl_stores_them(rows):
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    return list_of_dict_to_tensordict([{"position_ids": row} for row in rows])


@pytest.mark.parametrize("lengths", [(6, 6, 6, 6), (3, 5, 2, 4)])
def test_verls_workers_get_each_sequence_its_own_positions(stock, lengths):
    """By the way of an update: pickled, mended, cut into mini-batches, mended again, cut into micro-batches."""
    from verl.utils.tensordict_utils import index_select_tensor_dict

    rows = rows_of(*lengths)
    data = pickle.loads(pickle.dumps(as_verl_stores_them(rows)))
    stock.mend_positions(data)
    for indices in ([2, 0], [1, 3]):
        mini_batch = index_select_tensor_dict(data, indices)
        stock.mend_positions(mini_batch)
        micro_batch = index_select_tensor_dict(mini_batch, [1])
        # What verl's model inputs are made from: (planes, tokens of all sequences).
        assert torch.equal(micro_batch["position_ids"].values(), rows[indices[1]])
        assert torch.equal(mini_batch["position_ids"].values(), torch.cat([rows[i] for i in indices], dim=1))


def test_data_without_positions_or_with_flat_ones_is_left_alone(stock):
    flat = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    for data in (TensorDict({"x": torch.zeros(2)}, 2), TensorDict({"position_ids": flat}, 2)):
        before = dict(data.items())
        stock.mend_positions(data)
        assert all(data[key] is value for key, value in before.items())


def test_verls_workers_call_the_mends():
    """In a process of its own, as a worker is: the import that verl makes for model.external_lib is all."""
    code = """
import verl.workers.engine_workers as workers, verl.workers.engine.base as base, verl.utils.distributed as distributed
import opd_recipes.stock as stock
assert workers.maybe_fix_3d_position_ids is base.maybe_fix_3d_position_ids is stock.mend_positions
workers.initialize_global_process_group_ray()
import torch.distributed
assert torch.distributed.get_backend_config() == "cpu:gloo"
torch.distributed.destroy_process_group()
distributed.initialize_global_process_group()
assert torch.distributed.is_initialized()
"""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_configurations_name_the_mends():
    folder = Path(comparators.__file__).parent / "config"
    assert OmegaConf.load(folder / "grpo.yaml").actor_rollout_ref.model.external_lib == "opd_recipes.stock"
    assert OmegaConf.load(folder / "sft.yaml").model.external_lib == "opd_recipes.stock"


@pytest.mark.parametrize(
    "config",
    [
        {"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"OPD_TEST_VARIABLE": 1}}}}},
        {"environment": {"OPD_TEST_VARIABLE": "1"}},
    ],
)
def test_variables_of_the_configuration_are_set_before_verl_is_imported(config, monkeypatch):
    monkeypatch.setenv("OPD_TEST_VARIABLE", "0")
    set_environment(OmegaConf.create(config))
    assert os.environ["OPD_TEST_VARIABLE"] == "1"
    set_environment(OmegaConf.create({"trainer": {}}))


def test_sft_starts_a_process_for_each_device(monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command) or sys.exit(0))
    monkeypatch.setattr(sys, "argv", ["opd_recipes", "+overlay=[cpu_sft,toy_sft]"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(comparators, "set_environment", lambda config: None)
    with pytest.raises(SystemExit):
        comparators.sft(OmegaConf.create({"trainer": {"n_gpus_per_node": 4}}))
    ((_, *command),) = started
    assert command[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    assert command[4:] == ["-m", "opd_recipes.cli", "sft", "+overlay=[cpu_sft,toy_sft]"]


def test_runs_side_by_side_have_job_ids_of_their_own():
    """verl's weight socket is named after the job id, which every fresh local cluster counts from 1."""
    code = (
        "import ray; from ray.runtime_context import RuntimeContext; RuntimeContext.get_job_id = lambda self: '01000000';"
        "import opd_recipes.backends.side_by_side; print(RuntimeContext.get_job_id(None))"
    )

    def job_id(**variables):
        environment = {k: v for k, v in os.environ.items() if k != "OPD_RUN_ID"} | variables
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        ).stdout.strip()

    assert job_id(OPD_RUN_ID="7-a") == "01000000-7-a" and job_id(OPD_RUN_ID="7-b") == "01000000-7-b"
    assert job_id() == "01000000"


def test_the_weight_socket_is_still_named_after_the_job_id():
    """If this fails, verl names it otherwise: backends/side_by_side.py has to follow, or can go."""
    import inspect

    from verl.workers.rollout.vllm_rollout import vllm_async_server, vllm_rollout

    assert "get_runtime_context().get_job_id()" in inspect.getsource(vllm_rollout)
    assert 'os.environ["VERL_RAY_JOB_ID"] = ray.get_runtime_context().get_job_id()' in inspect.getsource(
        vllm_async_server
    )


def test_the_replay_buffer_looks_as_often_as_it_is_told():
    from opd_recipes.replay import QuickReplayBuffer

    buffer = QuickReplayBuffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=1,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({"poll_interval": 0.02}),
        refill_fn=None,
    )
    assert buffer.poll_interval == 0.02
