"""The launchers, run here with their cluster's commands replaced: what they start is a valid run with the papers' settings."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module

from data_prep import check_memory
from opd_recipes import estimate
from opd_recipes.check import check_run
from tests.unit.test_estimate import GIB, PARAMETERS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))
MODELS = sorted(PARAMETERS)
SETTINGS = {"MODEL": "Qwen/Qwen3.5-4B", "TRAIN": "/shared/train.parquet", "VAL": "/shared/val.parquet"}

#: Fields of KubeRay's ray.io/v1 custom resources that an example may use (KubeRay's API reference, v1.3 and later).
RAY_JOB = {
    *(
        "activeDeadlineSeconds",
        "backoffLimit",
        "clusterSelector",
        "deletionStrategy",
        "entrypoint",
        "entrypointNumCpus",
    ),
    *("entrypointNumGpus", "entrypointResources", "jobId", "managedBy", "metadata", "rayClusterSpec", "runtimeEnvYAML"),
    *("shutdownAfterJobFinishes", "submissionMode", "submitterConfig", "submitterPodTemplate", "suspend"),
    "ttlSecondsAfterFinished",
}
RAY_CLUSTER = {
    *(
        "autoscalerOptions",
        "enableInTreeAutoscaling",
        "gcsFaultToleranceOptions",
        "headGroupSpec",
        "headServiceAnnotations",
    ),
    *("managedBy", "rayVersion", "suspend", "workerGroupSpecs"),
}
HEAD_GROUP = {"enableIngress", "headService", "rayStartParams", "serviceType", "template"}
WORKER_GROUP = {
    *("groupName", "idleTimeoutSeconds", "maxReplicas", "minReplicas", "numOfHosts", "rayStartParams", "replicas"),
    *("scaleStrategy", "suspend", "template"),
}


@pytest.fixture
def commands(tmp_path):
    """Commands of a cluster that only tell how they were called, first on the path; ``FAIL`` makes training fail."""
    folder = tmp_path / "bin"
    folder.mkdir()
    calls = tmp_path / "calls"
    calls.mkdir()
    tell = f"""#!{sys.executable}
import json, os, sys
name = os.path.basename(sys.argv[0])
with open({str(calls)!r} + "/" + name, "w") as file:
    json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ)}}, file)
"""
    bodies = {
        "python": tell + 'sys.exit(int(os.environ.get("FAIL", 0)))\n',
        "ray": tell + 'if sys.argv[1] == "symmetric-run":\n    rest = sys.argv[sys.argv.index("--") + 1 :]\n'
        "    os.execvp(rest[0], rest)\n",
        "srun": tell + "os.execvp(sys.argv[1], sys.argv[1:])\n",
        "scontrol": tell + 'print("node-1\\nnode-2")\n',
    }
    for name, body in bodies.items():
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    return tmp_path


def start(commands, script, *arguments, env=SETTINGS, check=True):
    """Run a launcher; returns what was called, by name."""
    environment = {"PATH": f"{commands / 'bin'}:{os.environ['PATH']}", "OUT": str(commands / "out"), **env}
    result = subprocess.run(
        ["bash", str(script), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0 or not check, result.stderr
    calls = {file.name: json.loads(file.read_text()) for file in (commands / "calls").iterdir()}
    return {**calls, "exit": result.returncode, "stderr": result.stderr}


@cache
def composed(name, *overrides):
    with initialize_config_module("opd_recipes.config", version_base=None):
        return compose(name, overrides=list(overrides))


def checked(call):
    """The configuration that a call of ``python -m opd_recipes`` composes, after the package's own check of it."""
    arguments = call["arguments"]
    assert arguments[:3] == ["-m", "opd_recipes", "--config-name"]
    found = composed(arguments[3], *(text for text in arguments[4:] if not text.startswith("hydra.")))
    check_run(found, files=False)
    assert estimate.check_resources(found) == (), "GPUs, batch and parallel sizes divide"
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_parses(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    subprocess.run([shellcheck, str(script)], check=True)


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recipe", ["vision_opd", "rp_opsd"])
def test_the_papers_settings_on_one_and_on_four_nodes(commands, monkeypatch, recipe, model, nodes):
    env = {**SETTINGS, "RECIPE": recipe, "MODEL": model, "NODES": str(nodes)}
    found = checked(start(commands, EXAMPLES / "train.sh", env=env)["python"])
    assert (found.trainer.nnodes, found.trainer.n_gpus_per_node) == (nodes, 8)
    assert (found.trainer.experiment_name, found.actor_rollout_ref.model.path) == (recipe, model)
    assert (found.data.train_batch_size, found.actor_rollout_ref.rollout.n) == (96, 8)
    assert (found.data.max_prompt_length, found.data.max_response_length) == (8192, 1024)
    assert found.actor_rollout_ref.actor.optim.lr == 2e-6 and found.opd.teacher == {"kind": "ema", "rate": 0.05}
    assert found.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert found.trainer.device == "cuda" and found.actor_rollout_ref.model.use_remove_padding
    monkeypatch.setattr(check_memory, "count_parameters", lambda sizes: PARAMETERS[model])
    memory = estimate.estimate(found, estimate.model_config(found), 80 * GIB)
    print(f"{recipe}, {model}, {nodes} x 8:\n{estimate.text(memory)}")
    assert memory.fits and memory.devices == 8 * nodes


def test_more_overrides_are_passed_on_whole(commands):
    views = "opd.views.teacher=[{kind: crop, zoom: 3.0}]"
    found = checked(start(commands, EXAMPLES / "train.sh", "opd/teacher=frozen", views)["python"])
    assert found.opd.teacher.kind == "frozen" and found.opd.views.teacher[0].zoom == 3.0


def test_a_run_continues_from_its_own_folder_and_keeps_two_checkpoints(commands):
    trainer = checked(start(commands, EXAMPLES / "train.sh")["python"]).trainer
    assert trainer.default_local_dir == f"{commands}/out/checkpoints" and trainer.resume_mode == "auto"
    assert (trainer.save_freq, trainer.max_actor_ckpt_to_keep) == (20, 2)


def test_a_dry_run_estimates_and_does_not_train(commands):
    env = {**SETTINGS, "DRY_RUN": "1", "GPU_MEMORY": "141GB"}
    arguments = start(commands, EXAMPLES / "train.sh", "trainer.nnodes=2", env=env)["python"]["arguments"]
    assert arguments[:5] == ["-m", "opd_recipes.cli", "estimate", "--gpu-memory", "141GB"]
    import argparse

    parser = argparse.ArgumentParser()
    estimate.add_arguments(parser)
    known = parser.parse_args(arguments[3:])
    assert known.config_name == "vision_opd" and known.overrides[-1] == "trainer.nnodes=2"


def test_a_ray_job_brings_the_checkout_and_its_settings(commands):
    env = {**SETTINGS, "NODES": "4", "OUT": "/shared/a run", "RAY_DASHBOARD": "http://head:8265"}
    arguments = start(commands, EXAMPLES / "ray_job.sh", "opd/teacher=frozen", env=env)["ray"]["arguments"]
    options, entry = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    assert options[:3] == ["job", "submit", "--address=http://head:8265"] and "--no-wait" in options
    assert options[options.index("--working-dir") + 1] == str(ROOT)
    runtime = json.loads(options[options.index("--runtime-env-json") + 1])
    assert runtime.keys() == {"excludes"}, "Ray refuses variables that verl gives its workers as well"
    assert not {"/examples", "/opd_recipes", "/data_prep"} & set(runtime["excludes"])
    settings = {**SETTINGS, "NODES": "4", "OUT": "/shared/a run"}
    assert (entry[0], entry[-3:]) == ("env", ["bash", "examples/train.sh", "opd/teacher=frozen"])
    assert dict(variable.split("=", 1) for variable in entry[1:-3]) == settings
    found = checked(start(commands, EXAMPLES / "train.sh", entry[-1], env=settings)["python"])
    assert (found.trainer.nnodes, found.trainer.default_local_dir) == (4, "/shared/a run/checkpoints")


SLURM = {**SETTINGS, "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8"}


def on_slurm(commands, *arguments, **options):
    env = {**SLURM, "SLURM_JOB_ID": "17", **options.pop("env", {})}
    return start(commands, EXAMPLES / "slurm.sh", *arguments, env=env, **options)


def test_slurm_starts_ray_over_the_allocation_and_trains_on_its_first_node(commands):
    calls = on_slurm(commands, "opd.views.teacher=[{kind: crop, zoom: 3.0}]")
    assert calls["scontrol"]["arguments"] == ["show", "hostnames", "node-[1-2]"]
    ray = calls["ray"]["arguments"]
    expected = ["--address", "node-1:6379", "--min-nodes", "2", "--num-gpus", "8"]
    assert ray[: ray.index("--")] == ["symmetric-run", *expected]
    assert calls["python"]["environment"]["RAY_ADDRESS"] == "node-1:6379"
    found = checked(calls["python"])
    assert (found.trainer.nnodes, found.trainer.n_gpus_per_node) == (2, 8) and found.opd.views.teacher[0].zoom == 3.0
    header = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", (EXAMPLES / "slurm.sh").read_text(), re.MULTILINE))
    assert (header["nodes"], header["gpus-per-node"], header["ntasks-per-node"]) == ("4", "8", "1")


def test_a_slurm_job_whose_training_fails_or_never_starts_fails(commands):
    failed = on_slurm(commands, env={"FAIL": "3"}, check=False)
    assert failed["exit"] != 0 and "python" in failed
    (commands / "calls" / "python").unlink()
    (commands / "bin" / "srun").write_text("#!/bin/sh\nexit 0\n")  # as when Ray could not start: it says nothing
    silent = on_slurm(commands, check=False)
    assert silent["exit"] == 1 and "training did not finish" in silent["stderr"] and "python" not in silent


def test_the_ray_job_of_kuberay_is_one_and_its_numbers_agree(commands):
    settings, job = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert spec.keys() <= RAY_JOB and cluster.keys() <= RAY_CLUSTER and cluster["headGroupSpec"].keys() <= HEAD_GROUP
    (workers,) = cluster["workerGroupSpecs"]
    assert workers.keys() <= WORKER_GROUP
    env = settings["data"]
    assert all(isinstance(value, str) for value in env.values()), "a ConfigMap holds strings"
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == int(env["NODES"])
    assert all(isinstance(value, str) for value in cluster["headGroupSpec"]["rayStartParams"].values())
    for group, gpus in ((cluster["headGroupSpec"], None), (workers, env["GPUS"])):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
        assert container["resources"]["limits"].get("nvidia.com/gpu") == gpus
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert spec["entrypoint"].split() == ["bash", "/opt/opd_recipes/examples/train.sh"]
    found = checked(start(commands, EXAMPLES / "train.sh", env=env)["python"])
    assert (found.trainer.nnodes, found.trainer.n_gpus_per_node) == (4, 8)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_says_which_variable_is_missing(commands, script):
    missing = start(commands, script, env={"TRAIN": "train.parquet"}, check=False)
    assert missing["exit"] != 0 and "MODEL" in missing["stderr"] and "python" not in missing and "ray" not in missing


def test_the_readme_has_every_file():
    readme = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.name != "README.md"}
    assert {name for name in files if f"]({name})" in readme} == files
