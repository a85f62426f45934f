"""Traces: what student and teacher think of each token of a few validation rows, written each time validation has run.

The same rows are asked every time, so that a report can show them before and after training. A trace is a rollout of its own,
on the views of training, scored by one more forward of both models without an update. Off unless ``opd.trace.rows`` is set.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import transfer_queue as tq
from PIL import Image
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from opd_recipes.dataset import ROW_IMAGES, ROW_NUMBER, TRACED
from opd_recipes.trace_tokens import COLUMNS, PREFIX, WEIGHT

#: Longest side of an image in the traces, in pixels.
LARGEST = 1024


class Tracer:
    """Writes ``step_*.jsonl`` and ``images/`` into a folder, for the first rows of the validation set.

    Args:
        trainer: verl's, set up.
        folder: Made if needed.
        rows: How many rows are traced.
    """

    def __init__(self, trainer: Any, folder: str, rows: int):
        self.trainer, self.folder = trainer, Path(folder)
        self.tokenizer = trainer.tokenizer
        dataset, views = trainer.val_dataset, len(trainer.val_dataset.views)
        examples = [dataset[i * views] for i in range(min(rows, len(dataset) // views))]
        self.examples = {int(example[ROW_NUMBER]): example for example in examples}
        #: What a trace says of a row's images: the same every time, so drawn once.
        self.seen = {number: self._seen(example, number) for number, example in self.examples.items()}

    def write(self, step: int) -> None:
        """Trace the rows under the weights of ``step``."""
        trainer, batch = self.trainer, self._rollouts(step)
        trainer.checkpoint_manager.sleep_replicas()  # both models need the memory that the rollout server holds
        batch.extra_info["temperature"] = trainer.config.actor_rollout_ref.rollout.temperature
        batch = trainer._balanced(batch, {})
        trainer.actor_rollout_wg.trace(batch)
        trainer.checkpoint_manager.update_weights(step)
        rows = [json.dumps(row) for row in self._rows(step, batch)]
        tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)
        unfinished = self.folder / f"step_{step:06d}.jsonl.new"
        unfinished.write_text("".join(row + "\n" for row in rows))
        unfinished.replace(unfinished.with_suffix(""))

    def _rollouts(self, step: int) -> Any:
        """One answer for each row, in the way of verl's validation."""
        trainer, count = self.trainer, len(self.examples)
        columns = collate_fn([dict(example) for example in self.examples.values()])
        columns["uid"] = np.array([str(uuid.uuid4()) for _ in range(count)], dtype=object)
        columns[TRACED] = np.array([True] * count, dtype=object)
        columns["__rollout_n__"] = np.array([1] * count, dtype=object)
        batch = tu.get_tensordict(columns)
        tu.assign_non_tensor_data(batch, "global_steps", step)
        tu.assign_non_tensor_data(batch, "validate", True)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in range(count)]
        tq.kv_batch_put(keys=list(columns["uid"]), partition_id="val", tags=tags)
        trainer.agent_loop_manager.generate_sequences(batch)
        return trainer.replay_buffer.sample(global_steps=step, partition_id="val", batch_size=count)[0]

    def _rows(self, step: int, batch: Any) -> Iterable[dict[str, Any]]:
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        columns = [PREFIX + name for name in (*COLUMNS, *([WEIGHT] if self.trainer.recipe.weights.contrast else []))]
        fields = [ROW_NUMBER, "responses", "rm_scores", *columns]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        numbers = [int(number) for number in data[ROW_NUMBER]]
        for i in sorted(range(len(keys)), key=numbers.__getitem__):
            number = numbers[i]
            example = self.examples[number]
            ids = data["responses"][i].tolist()
            traced = {name.removeprefix(PREFIX): data[name][i].tolist() for name in columns}
            yield {
                "step": step,
                "id": f"row{number}",
                "question": _question(example["raw_prompt"]),
                "reference": str(example["reward_model"]["ground_truth"]),
                "score": float(data["rm_scores"][i].sum()),
                **self.seen[number],
                "response": self.tokenizer.decode(ids, skip_special_tokens=True),
                "tokens": [self._token(token, {k: v[t] for k, v in traced.items()}) for t, token in enumerate(ids)],
            }

    def _token(self, token: int, values: dict[str, Any]) -> dict[str, Any]:
        def top(model: str) -> list[list[Any]]:
            pairs = zip(values[f"{model}_top_ids"], values[f"{model}_top_logp"], strict=True)
            return [[self.tokenizer.decode([int(i)]), float(np.exp(logp))] for i, logp in pairs]

        return {
            "text": self.tokenizer.decode([token]),
            "id": token,
            **{key: values[key] for key in ("divergence", "weight", "student_logp", "teacher_logp") if key in values},
            "entropy": values["student_entropy"],
            "teacher_entropy": values["teacher_entropy"],
            "student_top": top("student"),
            "teacher_top": top("teacher"),
        }

    def _seen(self, example: dict, number: int) -> dict[str, Any]:
        """Write the views of a row; their files, and box and size of its last image."""
        source = example[ROW_IMAGES]
        (self.folder / "images").mkdir(parents=True, exist_ok=True)
        seen: dict[str, Any] = {"bbox": source.box and [float(v) for v in source.box]}
        for view, images in source.rendered(self.trainer.recipe.views):
            name = f"images/row{number}_{view}.png"
            seen[f"{view}_image"] = name
            _write_image(images[-1], self.folder / name)
        return seen | {"original_size": list(source.size())}


def _write_image(image: Image.Image, file: Path) -> None:
    image.thumbnail((LARGEST, LARGEST))
    unfinished = file.with_suffix(".new")
    image.save(unfinished, "PNG")
    os.replace(unfinished, file)


def _question(messages: list[dict]) -> str:
    """The text of the last user turn."""
    content = [message["content"] for message in messages if message["role"] == "user"][-1]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content).strip()
