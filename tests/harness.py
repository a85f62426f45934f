"""Real student and teacher engines (FSDP2 over gloo) on the tiny base model, fed with rows as the rollout worker makes them."""

from __future__ import annotations

import os
import random
import socket
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from tensordict import TensorDict

import data_prep.toy
from data_prep.toy.scenes import make_scene

OPTIMIZER = [f"actor_rollout_ref.actor.optim.{s}" for s in ("lr=1e-3", "lr_warmup_steps=0", "total_training_steps=100")]
BASE = str(Path(data_prep.toy.__file__).parent / "base")


def config(*overrides: str, overlay: str = "[cpu,toy]"):
    with initialize_config_module("opd_recipes.config", version_base=None):
        return compose(
            "vision_opd",
            overrides=[f"+overlay={overlay}", f"actor_rollout_ref.model.path={BASE}", *OPTIMIZER, *overrides],
        )


def start(rank: int = 0, world: int = 1, port: int | None = None) -> None:
    if dist.is_initialized():
        return
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port or free_port()), RANK=str(rank), WORLD_SIZE=str(world)
    )
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo", rank=rank, world_size=world)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def engines(cfg, micro_tokens: int = 4096):
    """A student with its teacher, both started from the base model, ready for ``train_batch``."""
    from verl.utils.config import omega_conf_to_dataclass

    from opd_recipes.engine import StudentEngine
    from opd_recipes.recipe import Recipe

    actor = omega_conf_to_dataclass(cfg.actor_rollout_ref.actor)
    model = omega_conf_to_dataclass(cfg.actor_rollout_ref.model)
    model.model_type = "language_model"
    settings = actor.engine
    settings.use_dynamic_bsz = True
    settings.max_token_len_per_gpu = settings.infer_max_token_len_per_gpu = micro_tokens
    settings.use_remove_padding = model.use_remove_padding
    student = StudentEngine(
        model_config=model, engine_config=settings, optimizer_config=actor.optim, checkpoint_config=actor.checkpoint
    )
    student.initialize()
    student.attach(Recipe.load(cfg.opd))
    return student, student.teacher


@cache
def prompt_builder():
    """The rollout worker without its Ray and vLLM parts: it makes prompts, positions and pixels."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    from opd_recipes.dataset import TwoViewDataset
    from opd_recipes.recipe import Recipe
    from opd_recipes.rollout import TwoViewAgentLoopWorker

    cfg = config()
    worker = object.__new__(TwoViewAgentLoopWorker)
    model = omega_conf_to_dataclass(cfg.actor_rollout_ref.model)
    worker.config, worker.recipe = cfg, Recipe.load(cfg.opd)
    worker.tokenizer, worker.processor = model.tokenizer, model.processor
    worker.dataset_cls, worker.mm_processor_kwargs = TwoViewDataset, {}
    worker.builder = create_continuous_token_builder(
        model.tokenizer,
        hf_model_type="qwen3_vl",
        processor=model.processor,
        chat_template_kwargs={},
        mm_processor_kwargs={},
    )
    return worker


def rows(responses: list[list[int]], same_view: bool = False, sizes: list[int] | None = None) -> list[dict]:
    """One row for each response, on scenes of their own; ``sizes`` enlarges some student images, so prompts differ."""
    from opd_recipes.dataset import with_images
    from opd_recipes.views import View

    worker = prompt_builder()
    generator = random.Random(0)
    out = []
    for i, response in enumerate(responses):
        scene = make_scene(generator)
        student, teacher = (
            worker.recipe.student_view(scene.image, scene.bbox),
            worker.recipe.teacher_view(scene.image, scene.bbox),
        )
        negative = View([{"kind": "mask_blur", "radius": 4}])(teacher, None)
        if sizes:
            student = student.resize((sizes[i], sizes[i]))
        question = [
            {
                "role": "user",
                "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "What colour?"}],
            }
        ]
        shown = (student, student if same_view else teacher, negative)
        views = [worker._prompt(with_images(question, [image])) for image in shown]
        full = [torch.cat([view.ids, torch.tensor(response, dtype=torch.long)]) for view in views]
        positions = [view.extended(len(ids)) for view, ids in zip(views, full, strict=True)]
        out.append(
            {
                "input_ids": full[0],
                "position_ids": positions[0],
                "multi_modal_inputs": views[0].inputs,
                "responses": torch.tensor(response, dtype=torch.long),
                "loss_mask": torch.ones(len(response), dtype=torch.long),
                "rollout_log_probs": -torch.rand(len(response), generator=torch.Generator().manual_seed(i)) - 0.5,
                "teacher_input_ids": full[1],
                "teacher_positions": positions[1].transpose(0, 1).contiguous(),
                "teacher_multi_modal_inputs": views[1].inputs,
                "negative_input_ids": full[2],
                "negative_positions": positions[2].transpose(0, 1).contiguous(),
                "negative_multi_modal_inputs": views[2].inputs,
            }
        )
    return out


def batch(rows: list[dict], temperature: float = 1.0, packed: bool = False, micro_tokens: int = 4096) -> TensorDict:
    """Rows as they reach the engine, by way of the layout in which verl's agent loop stores positions."""
    from verl.utils import tensordict_utils as tu

    from opd_recipes.worker import with_row_major_positions

    data = TensorDict({}, batch_size=len(rows))
    for key in rows[0]:
        values = [row[key] for row in rows]
        if isinstance(values[0], torch.Tensor):
            nested = (
                _by_planes if key == "position_ids" else partial(torch.nested.as_nested_tensor, layout=torch.jagged)
            )
            data[key] = nested(values)
        else:
            tu.assign_non_tensor_stack(data, key, values)
    tu.assign_non_tensor(
        data,
        temperature=temperature,
        use_remove_padding=packed,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=micro_tokens,
    )
    return with_row_major_positions(data)


def _by_planes(values: list[torch.Tensor]) -> torch.Tensor:
    """(planes, length) rows as verl's agent loop stores them: as_nested_tensor where lengths agree, ragged last else."""
    if len({value.shape for value in values}) == 1:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)
    from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

    return nested_tensor_from_tensor_list(values)


def update(student, data: TensorDict) -> dict:
    """One optimizer step; returns the summed metrics and loss of this rank."""
    from opd_recipes.engine import loss_function

    with student.train_mode():
        out = student.train_batch(data, loss_function(student.recipe))
    metrics = {k: v.aggregate() if hasattr(v, "aggregate") else v for k, v in out["metrics"].items()}
    return {"loss": sum(out["loss"]), **metrics}


def full_weights(module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in module.named_parameters()
    }


def full_gradients(module) -> dict[str, torch.Tensor]:
    return {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in module.named_parameters()
        if p.grad is not None
    }
