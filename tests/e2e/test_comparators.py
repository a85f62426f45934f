"""GRPO and SFT on rendered rows, by the commands of docs/comparators.md: verl's own trainers, Ray and vLLM on this CPU."""

import io
import sys

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from data_prep.__main__ import main as data_prep
from opd_recipes.curve import read_metrics
from opd_recipes.runs import Process
from tests.e2e.runs import finish
from tests.harness import BASE

pytestmark = pytest.mark.e2e

ROWS = 16


def run(folder, *command):
    """A finished run's metrics by step."""
    process = finish(Process([sys.executable, "-m", "opd_recipes.cli", *command, *output(folder)], folder))
    assert process.exit_code == 0, process.tail()
    return dict(read_metrics(process.metrics))


def output(folder):
    return [
        "trainer.logger=[console,file]",
        "trainer.total_training_steps=2",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"hydra.run.dir={folder}/hydra",
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """train.parquet with the student's view; val_full.parquet and val_crop.parquet with one view each."""
    folder = tmp_path_factory.mktemp("data")
    data_prep(["toy", "--out", str(folder / "toy"), "--train", str(ROWS), "--val", "12"])
    for split, view, tag, name in (
        ("train", "student", [], "train"),
        ("val", "student", ["--tag", "full"], "val_full"),
        ("val", "teacher", ["--tag", "crop"], "val_crop"),
    ):
        files = ["--data", str(folder / "toy" / f"{split}.parquet"), "--out", str(folder / f"{name}.parquet")]
        data_prep(["render", *files, "--view", view, "--overlay", "toy", *tag])
    return folder


@pytest.fixture(scope="module")
def sft(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    metrics = run(
        folder,
        *("sft", "+overlay=[cpu_sft,toy_sft]", f"model.path={BASE}", f"data.train_files={data}/train.parquet"),
        *(f"data.train_batch_size={ROWS}", "optim.lr_warmup_steps=0"),
    )
    return metrics, folder / "checkpoints" / "global_step_2" / "huggingface"


def answer_loss(rows):
    """The base model's mean negative log-likelihood of the answers' tokens, by transformers alone."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(BASE)
    model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32).eval()
    losses = []
    for row in rows:
        image = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")
        question, answer = row["messages"]
        text = question["content"].removeprefix("<image>")
        turns = [
            {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer["content"]}]},
        ]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        whole = processor.apply_chat_template(turns, **options)
        prompt = processor.apply_chat_template(turns[:1], add_generation_prompt=True, **options)["input_ids"].shape[1]
        with torch.no_grad():
            log_probs = model(**whole).logits.float().log_softmax(-1)[0, prompt - 1 : -1]
        losses.append(-log_probs.gather(1, whole["input_ids"][0, prompt:, None]))
    return torch.cat(losses).mean().item()


def test_sft_starts_from_the_base_models_loss_on_the_answers_and_lowers_it(sft, data):
    metrics, trained = sft
    # One batch holds all rows, and the first update has not been taken when its loss is computed.
    expected = answer_loss(pq.read_table(data / "train.parquet").to_pylist())
    assert metrics[1]["train/loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics[2]["train/loss"] < metrics[1]["train/loss"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in trained.iterdir()}


def test_grpo_continues_from_the_sft_model_and_measures_both_views(sft, data, tmp_path):
    """All answers have the same length, where verl's positions need the mend of opd_recipes.stock."""
    _, trained = sft
    metrics = run(
        tmp_path,
        *("grpo", "+overlay=[cpu,toy_grpo]", f"actor_rollout_ref.model.path={trained}"),
        f"data.train_files={data}/train.parquet",
        f"data.val_files=[{data}/val_full.parquet,{data}/val_crop.parquet]",
        *("data.train_batch_size=4", "data.max_response_length=1", "trainer.test_freq=2"),
    )
    assert sorted(metrics) == [0, 1, 2]
    for step in (1, 2):
        assert metrics[step]["response_length/min"] == metrics[step]["response_length/max"] == 1
        assert metrics[step]["training/rollout_actor_probs_pearson_corr"] >= 0.9999
        assert 0 <= metrics[step]["critic/score/mean"] <= 1
    for step in (0, 2):
        for view in ("full", "crop"):
            assert 0 <= metrics[step][f"val-core/toy@{view}/acc/mean@1"] <= 1
