"""A job on a running Ray cluster: what Ray would refuse late, or never, is refused early."""

import copy
from functools import cache

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from opd_recipes import cluster
from opd_recipes.registry import RecipeError

HEAD = "10.0.0.1:6379"


@cache
def composed():
    with initialize_config_module("opd_recipes.config", version_base=None):
        return compose("vision_opd")


def config(*overrides):
    changed = copy.deepcopy(composed())
    OmegaConf.set_struct(changed, False)
    changed.merge_with_dotlist(list(overrides))
    return changed


def node(name, gpus, cpus, alive=True):
    return {"NodeManagerAddress": name, "Alive": alive, "Resources": {"GPU": float(gpus), "CPU": float(cpus)}}


@pytest.mark.parametrize(
    ("variable", "setting", "address"),
    [
        (None, None, None),
        ("", None, None),
        ("local", None, None),
        (HEAD, None, HEAD),
        ("auto", None, "auto"),
        (None, HEAD, HEAD),
        (HEAD, "local", None),
    ],
)
def test_the_cluster_is_the_one_that_ray_would_take(monkeypatch, variable, setting, address):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    overrides = [f"ray_kwargs.ray_init.address={setting}"] if setting else []
    assert cluster.address(config(*overrides)) == address


def test_results_with_a_whole_path_or_none_are_fine():
    cluster.check_settings(config("trainer.save_freq=-1"), HEAD)
    for folder in ("/shared/run", "hdfs://shared/run"):
        writes = ("trainer.save_freq=20", "opd.trace.rows=4")
        cluster.check_settings(config(f"trainer.default_local_dir={folder}", *writes), HEAD)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ray_kwargs.ray_init.num_cpus=16", "num_cpus=16 on the Ray cluster 10.0.0.1:6379.*num_cpus=null"),
        ("ray_kwargs.ray_init.num_gpus=0", "num_gpus=0 on .*num_gpus=null"),
        ("trainer.save_freq=20", "trainer.default_local_dir=checkpoints/.* on .*that all nodes see"),
        ("opd.trace.rows=4", "opd.trace.folder=checkpoints/.*/traces on .*that all nodes see"),
    ],
)
def test_what_a_running_cluster_cannot_use_is_refused(override, message):
    with pytest.raises(RecipeError, match=message):
        cluster.check_settings(config(override), HEAD)


def test_the_default_queue_and_two_nodes_of_eight_need_58_cpus():
    """3 for each of 16 GPUs, 8 units of storage, the controller, and one to start the rest."""
    settings = config("trainer.nnodes=2", "trainer.n_gpus_per_node=8")
    cluster.check_nodes(settings, [node("a", 8, 29), node("b", 8, 29)])
    with pytest.raises(RecipeError, match=r"for 58 CPU .*a: 8 GPU, 29 CPU; b: 8 GPU, 28 CPU.*num_data_storage_units=1"):
        cluster.check_nodes(settings, [node("a", 8, 29), node("b", 8, 28)])
    cluster.check_nodes(
        config("trainer.nnodes=2", "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"),
        [node("a", 8, 27), node("b", 8, 24)],
    )


@pytest.mark.parametrize(
    "nodes",
    [
        [node("a", 8, 64)],
        [node("a", 8, 64), node("b", 8, 64, alive=False)],
        [node("a", 8, 64), node("b", 4, 64), node("c", 4, 64)],
        [node("a", 8, 64), node("b", 8, 23)],
    ],
)
def test_devices_that_would_never_be_free_are_refused(nodes):
    settings = config("trainer.nnodes=2", "trainer.n_gpus_per_node=8")
    with pytest.raises(RecipeError, match="2 times 8 GPU with 24 CPU on one node.*Ray has a: 8 GPU, 64 CPU"):
        cluster.check_nodes(settings, nodes)


def test_one_large_node_takes_two_small_shares():
    cluster.check_nodes(config("trainer.nnodes=2", "trainer.n_gpus_per_node=4"), [node("a", 8, 64)])


def test_two_ray_nodes_of_one_machine_are_two():
    cluster.check_nodes(config("trainer.nnodes=2", "trainer.n_gpus_per_node=1"), [node("a", 1, 8), node("a", 1, 8)])


def test_rollout_devices_of_their_own_ask_for_two_cpus_each():
    """3 x 1, 2 x 1 x 4 and 10."""
    overrides = ["trainer.v1.trainer_mode=opd_separate_async", "trainer.n_gpus_per_node=1"]
    overrides += ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=4"]
    cluster.check_nodes(config(*overrides), [node("a", 5, 21)])
    with pytest.raises(RecipeError, match="for 21 CPU"):
        cluster.check_nodes(config(*overrides), [node("a", 5, 20)])


def test_a_run_that_is_ending_is_waited_for_and_another_is_refused():
    looks = iter([True, True, False])
    cluster.check_alone(lambda: next(looks), pause=0)
    with pytest.raises(RecipeError, match="another run of verl is on this Ray cluster.*ray job stop"):
        cluster.check_alone(lambda: True, patience=0)
