"""A job on a Ray cluster of two hosts: submitted, stopped, submitted again, robbed of a host, submitted again; and its losses
are those of a single process."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from opd_recipes.checkpoints import last_step
from opd_recipes.curve import read_metrics
from tests.e2e.cluster import Cluster
from tests.e2e.runs import EQUAL_LENGTHS
from tests.harness import BASE

pytestmark = pytest.mark.e2e

#: So many that the job is not at its end when it is stopped.
STEPS = 8
OVERRIDES = (
    "+overlay=[cpu,toy]",
    # The cluster has its own.
    "ray_kwargs.ray_init.num_cpus=null",
    "ray_kwargs.ray_init.num_gpus=null",
    EQUAL_LENGTHS,
    "data.train_batch_size=16",
    "trainer.total_epochs=2",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.logger=[console,file]",
)


class Job:
    """``examples/ray_job.sh`` on a cluster."""

    def __init__(self, cluster: Cluster, data: Path, out: Path, nodes: int = 2):
        self.cluster, self.metrics = cluster, out / "metrics.jsonl"
        self.checkpoints = out / "checkpoints"
        settings = {"NODES": str(nodes), "GPUS": "1", "MODEL": str(BASE), "OUT": str(out)}
        settings |= {"TRAIN": f"{data}/train.parquet", "VAL": f"{data}/val.parquet"}
        path = f"+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH={self.metrics}"
        said = cluster.run("examples/ray_job.sh", *OVERRIDES, path, env=settings)
        self.name = re.findall(r"raysubmit_\w+", said)[0]

    def ask(self, what: str) -> str:
        return self.cluster.run("ray", "job", what, self.name)

    @property
    def runs(self) -> bool:
        return any("-m opd_recipes" in name for name in self.cluster.hosts[0].processes().values())

    def wait_for_start(self) -> None:
        wait(lambda: self.runs, 60)

    def checkpoint(self) -> int:
        """The step of the last one; 0 before the first."""
        return last_step(self.checkpoints)

    def wait_for_step(self, after: int) -> None:
        """Until a later one is in the log; its checkpoint is there by then."""
        wait(lambda: any(step > after for step, _ in read_metrics(self.metrics)) or not self.runs, 400)

    def places(self) -> list[dict[str, int]]:
        """How many ranks and rollout servers each host has, by its own list of processes."""
        names = [list(host.processes().values()) for host in self.cluster.hosts]
        kinds = ("ray::WorkerDict", "ray::vLLMHttpServer")
        return [{kind: sum(name.startswith(kind) for name in on_host) for kind in kinds} for on_host in names]

    def wait_for_end(self) -> None:
        wait(lambda: not self.runs, 400)

    def end(self) -> SimpleNamespace:
        """What Ray and the run itself say of it now."""
        steps = dict(read_metrics(self.metrics))
        return SimpleNamespace(status=self.ask("status"), log=self.ask("logs"), steps=steps)


def wait(until: Callable[[], object], seconds: float, why: Callable[[], str] = str) -> None:
    end = time.time() + seconds
    while not until():
        assert time.time() < end, why()
        time.sleep(0.2)


def wait_for_nothing_left(cluster: Cluster, before: list[set[int]]) -> None:
    """Until nothing runs on the hosts that did not run before the first job, but for what Ray keeps for later."""
    kept = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray-dashboard")

    def left() -> list[str]:
        found = zip(cluster.hosts, before, strict=True)
        new = [name for host, known in found for pid, name in host.processes().items() if pid not in known]
        return [name for name in new if not name.startswith(kept)]

    wait(lambda: not left(), 60, lambda: "\n".join(left()))


def nodes(cluster: Cluster) -> list[dict]:
    """Those that are there."""
    return json.loads(cluster.run("ray", "list", "nodes", "--format=json", "--filter", "state=ALIVE"))


@pytest.fixture(scope="module")
def story(folder, data):
    """A job that is stopped; the same until a host is lost; the same to its end; and one that asks for too much."""
    home = folder / "cluster"
    home.mkdir()
    cluster = Cluster(home)
    try:
        before = [set(host.processes()) for host in cluster.hosts]
        job = Job(cluster, data, folder / "out")
        job.wait_for_start()
        job.wait_for_step(0)
        assert job.runs, job.ask("logs")[-6000:]
        places = [job.places()]
        job.ask("stop")
        wait_for_nothing_left(cluster, before)
        stopped, at = job.end(), [job.checkpoint()]

        job = Job(cluster, data, folder / "out")
        job.wait_for_start()
        job.wait_for_step(at[0])
        places.append(job.places())
        cluster.hosts[1].crash()
        began = time.time()
        job.wait_for_end()
        lost, seconds = job.end(), time.time() - began
        at.append(job.checkpoint())
        cluster.hosts[1].start()
        wait(lambda: len(nodes(cluster)) == 2, 60)
        before[1] = set(cluster.hosts[1].processes())
        wait_for_nothing_left(cluster, before)

        job = Job(cluster, data, folder / "out")
        job.wait_for_start()
        job.wait_for_end()
        wait_for_nothing_left(cluster, before)
        resumed = job.end()
        job = Job(cluster, data, folder / "too_large", nodes=3)
        job.wait_for_start()
        job.wait_for_end()
        refused = job.end()
        yield SimpleNamespace(
            stopped=stopped,
            lost=lost,
            seconds=seconds,
            resumed=resumed,
            refused=refused,
            at=at,
            places=places,
            nodes=nodes(cluster),
        )
    finally:
        cluster.end()


def test_jobs_end_as_they_should(story):
    """That nothing of them goes on running has been waited for."""
    assert "was stopped" in story.stopped.status and 1 <= story.at[0] < story.at[1] < STEPS
    assert "succeeded" in story.resumed.status, story.resumed.log[-6000:]
    assert "step:1 " in story.stopped.log and f"step:{STEPS} " in story.resumed.log


def test_a_lost_host_ends_the_job_soon_and_the_log_says_how_to_go_on(story):
    assert "failed" in story.lost.status and story.seconds < 90
    assert f"The same command goes on from the checkpoint of step {story.at[1]}" in story.lost.log[-4000:]


def test_more_nodes_than_there_are_end_a_job_with_a_message(story):
    assert "failed" in story.refused.status and not story.refused.steps
    (message,) = [line for line in story.refused.log.splitlines() if line.startswith("opd_recipes: trainer.nnodes=3")]
    assert message.count("1 GPU, 6 CPU") == 2


def test_each_host_has_a_rank_and_a_server(story):
    assert len({node["node_id"] for node in story.nodes}) == len({node["node_ip"] for node in story.nodes}) == 2
    one_of_each = {"ray::WorkerDict": 1, "ray::vLLMHttpServer": 1}
    assert story.places == [[one_of_each] * 2] * 2, "two jobs on two hosts"


def test_submitting_again_continues_from_the_last_checkpoint(story):
    starts = [1, story.at[0] + 1, story.at[1] + 1]
    for job, start in zip((story.stopped, story.lost, story.resumed), starts, strict=True):
        assert list(job.steps) == list(range(start, start + len(job.steps)))
    assert max(story.resumed.steps) == STEPS


def test_two_hosts_and_interruptions_change_nothing(story, first):
    """The same losses as one process that was not interrupted, in the steps that both have logged.

    A step is logged after its checkpoint: one that is interrupted in between is not done again, and in no log.
    """
    steps = {**story.stopped.steps, **story.lost.steps, **story.resumed.steps}
    both = sorted(steps.keys() & first.steps.keys())
    assert len(both) >= 2
    for key in ("opd/divergence", "opd/entropy", "actor/loss", "actor/grad_norm", "actor/lr"):
        assert [steps[i][key] for i in both] == pytest.approx([first.steps[i][key] for i in both], rel=1e-3), key
    assert min(metrics["opd/rollout_pearson"] for metrics in steps.values()) >= 0.9999
