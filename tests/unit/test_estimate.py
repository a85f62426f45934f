"""Memory told before a GPU is touched: each part against arithmetic on the published sizes."""

import argparse
import json
from copy import deepcopy
from functools import cache

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from data_prep import check_memory
from opd_recipes import estimate
from opd_recipes.registry import RecipeError

GIB = 2**30
VOCABULARY = 248320


def text_layer(hidden, feed_forward, full):
    """Parameters of one decoder layer of Qwen3.5 with 16 query heads (gated), 4 key-value heads, 256 numbers each."""
    norms, mlp = 2 * hidden, 3 * hidden * feed_forward
    if full:
        return norms + mlp + hidden * (2 * 16 * 256 + 2 * 4 * 256) + 16 * 256 * hidden + 2 * 256
    key_value = 2 * 16 * 128 + 32 * 128
    mixer = hidden * (key_value + 32 * 128 + 32 + 32) + 4 * key_value + 32 * 128 * hidden + 128 + 2 * 32
    return norms + mlp + mixer


def vision(hidden, feed_forward, depth, out):
    block = 4 * hidden + (3 * hidden * hidden + 3 * hidden) + (hidden * hidden + hidden)
    block += 2 * hidden * feed_forward + feed_forward + hidden
    merged = 4 * hidden
    merger = 2 * hidden + merged * merged + merged + merged * out + out
    return depth * block + hidden * 3 * 2 * 16 * 16 + hidden + 2304 * hidden + merger


def whole(hidden, feed_forward, heads, tower):
    layers = 24 * text_layer(hidden, feed_forward, False) + 8 * text_layer(hidden, feed_forward, True)
    return heads * VOCABULARY * hidden + layers + hidden + vision(*tower, hidden)


#: By hand, with the head tied to the embedding in the small model only.
PARAMETERS = {
    "Qwen/Qwen3.5-4B": whole(2560, 9216, 1, (1024, 4096, 24)),
    "Qwen/Qwen3.5-9B": whole(4096, 12288, 2, (1152, 4304, 27)),
}


@cache
def composed(name, *overrides):
    inputs = ["data.train_files=t", "data.val_files=v", "actor_rollout_ref.model.path=Qwen/Qwen3.5-4B"]
    with initialize_config_module("opd_recipes.config", version_base=None):
        return compose(name, overrides=[*inputs, *overrides])


def config(name="vision_opd", **changes):
    """A composed recipe on 1 x 8 GPUs with some values changed, named with __ for the dots."""
    found = deepcopy(composed(name))
    for key, value in changes.items():
        OmegaConf.update(found, key.replace("__", "."), value)
    return found


@pytest.fixture
def counted(monkeypatch):
    """Parameters from the table above: building a model, if only its names, takes a second."""
    numbers = {2560: PARAMETERS["Qwen/Qwen3.5-4B"], 4096: PARAMETERS["Qwen/Qwen3.5-9B"]}
    monkeypatch.setattr(check_memory, "count_parameters", lambda sizes: numbers[sizes.get_text_config().hidden_size])


def estimated(found=None, memory=80 * GIB):
    found = found or config()
    return estimate.estimate(found, estimate.model_config(found), memory)


@pytest.mark.parametrize("name", estimate.KNOWN)
def test_the_known_sizes_give_the_published_number_of_parameters(name):
    found = config(actor_rollout_ref__model__path=name)
    assert check_memory.count_parameters(estimate.model_config(found)) == PARAMETERS[name]
    assert PARAMETERS[name] / 1e9 == pytest.approx({"4B": 4.54, "9B": 9.41}[name[-2:]], abs=0.005)


def test_every_part_of_the_update_by_hand(counted):
    """Qwen3.5-4B, 8 GPUs: 96 x 8 rollouts, micro-batches of 16384 tokens, D 2560, F 9216, 32 layers, chunks of 256."""
    update = estimated().update
    n, head = PARAMETERS["Qwen/Qwen3.5-4B"], VOCABULARY * 2560
    expected = {
        "weights": n // 2,
        "gradients": n // 2,
        "Adam": n,
        "teacher": n // 2,
        "activations": 16384 * (32 * 2560 + 8 * 2560 + 3 * 9216) * 2,
        "head: chunks": 6 * 256 * VOCABULARY * 4,
        # In bf16 the student's head, its gradient and the teacher's head; the gradient's sum over chunks in fp32.
        "head: whole weights": 3 * head * 2 + head * 4,
        "layers: whole weights": 2 * 2 * 2 * ((n - head) // 32),
        "teacher's hidden states": 96 * 1024 * 2560 * 2,
    }
    expected["reserve"] = int(0.25 * sum(list(expected.values())[4:]))
    assert update == expected


def test_every_part_of_the_rollout_by_hand(counted):
    found = estimated()
    n = PARAMETERS["Qwen/Qwen3.5-4B"]
    assert found.rollout == {"weights": n // 2, "Adam": n, "teacher": n // 2, "vLLM": 40 * GIB}
    assert found.kv_cache == 40 * GIB - 2 * n
    assert found.without_checkpointing == 16384 * 32 * (8 * 2560 + 3 * 9216) * 2


def test_the_state_is_what_the_data_check_reports(counted):
    assert estimate.WEIGHTS + estimate.GRADIENTS + estimate.ADAM + estimate.TEACHER == check_memory.BYTES_PER_PARAMETER


def test_more_nodes_shard_the_state_and_the_rows(counted):
    one, four = estimated().update, estimated(config(trainer__nnodes=4)).update
    for part in ("weights", "gradients", "Adam", "teacher", "teacher's hidden states"):
        assert four[part] == one[part] // 4, part
    assert four["activations"] == one["activations"]
    halves = estimated(config(trainer__nnodes=4, actor_rollout_ref__actor__fsdp_config__fsdp_size=8)).update
    assert halves["weights"] == one["weights"], "sharded inside a node, repeated over nodes"


def test_a_second_view_of_the_teacher_is_kept_as_well(counted):
    assert estimated(config("opd_v")).update["teacher's hidden states"] == 2 * 96 * 1024 * 2560 * 2


def test_a_larger_external_teacher_has_its_own_sizes(counted):
    external = {"kind": "external", "path": "Qwen/Qwen3.5-9B"}
    found = deepcopy(composed("vision_opd", "opd/teacher=external", "opd.teacher.path=Qwen/Qwen3.5-9B"))
    assert found.opd.teacher == external
    update = estimated(found).update
    assert update["teacher"] == PARAMETERS["Qwen/Qwen3.5-9B"] // 2
    assert update["teacher's hidden states"] == 96 * 1024 * 4096 * 2
    assert update["head: whole weights"] == VOCABULARY * ((2 * 2560 + 4096) * 2 + 4 * 2560)


def test_lora_trains_and_copies_an_adapter_alone(counted, monkeypatch):
    """2.4 million parameters of rank 32: gradients, Adam and teacher are theirs, and the head has no gradient."""
    monkeypatch.setattr(estimate, "count_adapter", lambda sizes, model: 75_000 * model.lora_rank)
    found = estimated(deepcopy(composed("vision_opd", "+overlay=lora")))
    adapter, head = 2_400_000, VOCABULARY * 2560
    n = PARAMETERS["Qwen/Qwen3.5-4B"] + adapter
    update = found.update
    assert (found.parameters, found.trained) == (n, adapter)
    assert [update[part] for part in ("weights", "gradients", "Adam", "teacher")] == [
        n // 2, adapter // 2, adapter, adapter // 2
    ]  # fmt: skip
    assert update["head: whole weights"] == 2 * head * 2
    assert update["layers: whole weights"] == 2 * 2 * ((n - adapter - head) // 32 + 2 * adapter // 32)
    assert update["activations"] == estimated().update["activations"]
    assert "million of them trained, on 8 GPUs" in estimate.text(found)
    external = deepcopy(
        composed("vision_opd", "+overlay=lora", "opd/teacher=external", "opd.teacher.path=Qwen/Qwen3.5-9B")
    )
    assert estimated(external).update["teacher"] == PARAMETERS["Qwen/Qwen3.5-9B"] // 2


def test_an_adapter_is_counted_by_hand():
    """Rank 4 on q_proj (128 -> 128) and v_proj (128 -> 64) of the three layers of the toy model."""
    from transformers import AutoConfig

    from tests.harness import BASE

    model = OmegaConf.create({"lora_rank": 4, "target_modules": ["q_proj", "v_proj"], "exclude_modules": None})
    sizes = AutoConfig.from_pretrained(BASE)
    assert estimate.count_adapter(sizes, model) == 3 * 4 * ((128 + 128) + (128 + 64))
    model.target_modules = ["nothing"]
    with pytest.raises(RecipeError, match=r"target_modules=\['nothing'\]: .*not found"):
        estimate.count_adapter(sizes, model)


def test_an_external_teacher_of_unknown_size_is_named(counted):
    found = deepcopy(composed("vision_opd", "opd/teacher=external", "opd.teacher.path=org/other"))
    with pytest.raises(RecipeError, match=r"opd\.teacher\.path=org/other: not on this machine"):
        estimated(found)


def test_offloading_empties_the_rollout_and_takes_turns_in_the_update(counted):
    base = {"actor_rollout_ref__actor__fsdp_config__param_offload": True}
    found = estimated(config(**base, actor_rollout_ref__actor__fsdp_config__optimizer_offload=True))
    assert found.rollout == {"weights": 0, "Adam": 0, "teacher": 0, "vLLM": 40 * GIB}
    assert found.update["teacher"] == 0 and found.update["weights"] == estimated().update["weights"]


def test_vllm_that_does_not_sleep_takes_its_share_of_the_update(counted):
    assert estimated(config(actor_rollout_ref__rollout__free_cache_engine=False)).update["vLLM"] == 40 * GIB


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"actor_rollout_ref__rollout__gpu_memory_utilization": 0.95}, "lower rollout.gpu_memory_utilization"),
        ({"actor_rollout_ref__rollout__gpu_memory_utilization": 0.1}, "vLLM's weights exceed its share"),
        ({"actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 400000}, "lower actor.ppo_max_token_len_per_gpu"),
    ],
)
def test_what_does_not_fit_says_what_to_change(counted, changes, remedy):
    found = estimated(config(**changes))
    assert not found.fits and "DOES NOT FIT in 80.00 GiB" in estimate.text(found) and remedy in estimate.text(found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor_rollout_ref__rollout__tensor_model_parallel_size": 3}, "must divide the 8 GPUs"),
        ({"actor_rollout_ref__actor__fsdp_config__fsdp_size": 5}, "fsdp_size=5 .* must divide the 8 GPUs"),
        ({"actor_rollout_ref__actor__ppo_mini_batch_size": 36}, "must be a multiple"),
        ({"actor_rollout_ref__actor__strategy": "fsdp"}, "must be fsdp2"),
    ],
)
def test_what_cannot_run_is_refused(counted, changes, message):
    with pytest.raises(RecipeError, match=message):
        estimated(config(**changes))


def test_rows_that_do_not_divide_are_a_note(counted):
    assert estimated(config(trainer__n_gpus_per_node=7, trainer__nnodes=1)).notes == (
        "an update of 768 rollouts on 7 GPUs is filled up with 2 empty ones",
    )


@pytest.mark.parametrize(
    ("written", "size"),
    [("80GiB", 80 * GIB), ("141 GB", 141 * 10**9), ("24576MiB", 24 * GIB), ("1.5GiB", 3 * GIB // 2)],
)
def test_memory_is_written_with_its_unit(written, size):
    assert estimate.parse_memory(written) == size


@pytest.mark.parametrize("written", ["80", "GiB", "80 G", "-1GiB"])
def test_memory_without_a_known_unit_is_refused(written):
    with pytest.raises(RecipeError, match="--gpu-memory"):
        estimate.parse_memory(written)


def command(*arguments):
    parser = argparse.ArgumentParser()
    estimate.add_arguments(parser)
    return estimate.run(parser.parse_args(["data.train_files=t", "data.val_files=v", *arguments]))


def test_the_command_takes_sizes_from_a_folder_or_a_file(counted, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(estimate.KNOWN["Qwen/Qwen3.5-9B"]))
    assert command(f"actor_rollout_ref.model.path={tmp_path}") == 0
    local = capsys.readouterr().out
    assert local.startswith("9.41 billion parameters on 8 GPUs") and local.rstrip().endswith("fits in 80.00 GiB")
    options = ("actor_rollout_ref.model.path=org/other", "--gpu-memory", "24GiB")
    assert command(*options, "--model-config", str(tmp_path / "config.json")) == 1
    assert "DOES NOT FIT in 24.00 GiB: " in capsys.readouterr().out


def test_a_model_of_unknown_size_is_refused_with_the_remedy(capsys):
    assert command("actor_rollout_ref.model.path=org/other") == 2
    assert "name a folder with its config.json or give that with --model-config" in capsys.readouterr().err


def test_a_configuration_that_does_not_compose_is_refused(capsys):
    assert command("no.such.key=1") == 2
    assert capsys.readouterr().err.startswith("opd_recipes: --config-name vision_opd:")
