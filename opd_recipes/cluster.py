"""What a Ray cluster that runs already must offer, said before a run waits for it without end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from opd_recipes.registry import RecipeError

#: verl reserves this many CPUs with each GPU (``max_colocate_count`` of its resource pools), on the same node.
CPUS_PER_GPU = 3
#: The same for devices that only answer (``trainer_mode=opd_separate_async``).
CPUS_PER_ROLLOUT_GPU = 2

#: Settings of ``ray.init`` that describe a cluster that it starts itself.
_OWN_CLUSTER = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")


def address(config: Any) -> str | None:
    """Of the cluster that the run will use; None where ``ray.init`` starts its own."""
    named = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return None if named in (None, "", "local") else str(named)


def check_settings(config: Any, cluster: str) -> None:
    """Refuse what Ray would refuse later, and results that each process would write to a folder of its own.

    Args:
        cluster: See :func:`address`.

    Raises:
        RecipeError: The first such setting.
    """
    for name in _OWN_CLUSTER:
        value = OmegaConf.select(config, f"ray_kwargs.ray_init.{name}")
        if value is not None:
            raise RecipeError(
                f"ray_kwargs.ray_init.{name}={value} on the Ray cluster {cluster}: only one that is started for the run can be "
                f"told; set ray_kwargs.ray_init.{name}=null"
            )
    written = {"trainer.default_local_dir": config.trainer.save_freq > 0, "opd.trace.folder": config.opd.trace.rows > 0}
    for key, used in written.items():
        path = OmegaConf.select(config, key)
        if used and not (path.startswith(("/", "~")) or "://" in path):
            raise RecipeError(
                f"{key}={path} on the Ray cluster {cluster}: each process there may have a working folder of its own, which "
                "Ray removes later; give the whole path (/...) of a folder that all nodes see"
            )


def check_nodes(config: Any, nodes: Sequence[Mapping[str, Any]], resource: str = "GPU") -> None:
    """Refuse a cluster on which verl's placement groups would wait without end.

    Args:
        nodes: As from ``ray.nodes()``.
        resource: What verl schedules on.

    Raises:
        RecipeError: The devices do not fit on the nodes, or the CPUs of all do not suffice.
    """
    alive = [(node["NodeManagerAddress"], node["Resources"]) for node in nodes if node["Alive"]]
    there = "; ".join(f"{name}: {r.get(resource, 0):g} {resource}, {r.get('CPU', 0):g} CPU" for name, r in alive)
    count, devices = config.trainer.nnodes, config.trainer.n_gpus_per_node
    cpus = CPUS_PER_GPU * devices
    places = sum(min(r.get(resource, 0) // devices, r.get("CPU", 0) // cpus) for _, r in alive)
    if places < count:
        raise RecipeError(
            f"trainer.nnodes={count} and trainer.n_gpus_per_node={devices}: verl would wait without end for {count} times "
            f"{devices} {resource} with {cpus} CPU on one node ({CPUS_PER_GPU} CPU for each); Ray has {there}. Ask for less, "
            "start Ray with more (ray start --num-cpus: any number, not cores), or wait until all nodes have joined"
        )
    needed = CPUS_PER_GPU * count * devices + _other_cpus(config)
    total = sum(r.get("CPU", 0) for _, r in alive)
    if total < needed:
        raise RecipeError(
            f"verl would wait without end for {needed} CPU ({CPUS_PER_GPU} for each {resource}, the others for its queue); Ray "
            f"has {there}. Start Ray with more (ray start --num-cpus, or ray_kwargs.ray_init.num_cpus where the run starts it: "
            "any number, not cores), or set transfer_queue.backend.SimpleStorage.num_data_storage_units=1"
        )


def _other_cpus(config: Any) -> int:
    """What is held beside the trainer's devices: the queue's storage and controller, rollout devices, one to start the rest."""
    backend, rollout = config.transfer_queue.backend, config.actor_rollout_ref.rollout
    units = backend.SimpleStorage.num_data_storage_units if backend.storage_backend == "SimpleStorage" else 0
    separate = config.trainer.v1.trainer_mode == "opd_separate_async"
    return units + 2 + (CPUS_PER_ROLLOUT_GPU * rollout.nnodes * rollout.n_gpus_per_node if separate else 0)


def check_alone(queue_exists: Callable[[], bool], patience: float = 30, pause: float = 1) -> None:
    """Refuse a cluster on which another run of verl lives: both would use one queue, and end with its end.

    Args:
        queue_exists: Asks Ray for the queue's controller.
        patience: Seconds in which a run that is just ending may end.
        pause: Seconds between two looks.

    Raises:
        RecipeError: It is still there.
    """
    end = time.monotonic() + patience
    while queue_exists():
        if time.monotonic() >= end:
            raise RecipeError(
                "another run of verl is on this Ray cluster, and its queue (the actor TransferQueueController) would be "
                "shared; wait for it, end it (ray job list, ray job stop ID), or use a cluster of your own for each run"
            )
        time.sleep(pause)


def check_cluster(config: Any) -> None:
    """The checks that need Ray to run: :func:`check_alone`, :func:`check_nodes`."""
    import ray
    from verl.plugin.platform import get_platform

    def queue_exists() -> bool:
        try:
            ray.get_actor("TransferQueueController", namespace="transfer_queue")
        except ValueError:
            return False
        return True

    check_alone(queue_exists)
    check_nodes(config, ray.nodes(), get_platform().ray_resource_name())
