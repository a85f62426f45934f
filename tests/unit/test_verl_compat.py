"""Each workaround for verl, and verl's own behaviour that makes it needed: when verl mends it, a test here says so."""

import os
import pickle

import pytest
import torch

from opd_recipes.verl_compat import (
    ENGINE_DEVICE,
    TESTED_VERL,
    LiteralMode,
    engine_device,
    plane_major_positions,
    row_major_positions,
    undecorated,
    warnings_only,
)


def test_the_tested_release_is_installed():
    import verl

    assert verl.__version__ == TESTED_VERL


def lengths_as(*lengths):
    return [torch.arange(4 * n).reshape(4, n) + 100 * n for n in lengths]


def verls(rows):
    """How verl's agent loop stores them."""
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    return list_of_dict_to_tensordict([{"position_ids": row} for row in rows])["position_ids"]


def forms(rows):
    """The forms in which positions reach a worker."""
    from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

    ragged_last = nested_tensor_from_tensor_list(rows)
    yield "ragged last", ragged_last
    unlabelled = nested_tensor_from_tensor_list(rows)
    unlabelled._ragged_idx = 1  # what pickling leaves
    yield "label lost", unlabelled
    if len({row.shape for row in rows}) == 1:
        yield "ragged over planes", torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        yield "dense", torch.stack(rows)


@pytest.mark.parametrize("lengths", [(3, 5, 2), (6, 6, 6), (4, 4), (4,), (1, 1, 1), (4, 1)])
def test_every_form_of_positions_becomes_row_major(lengths):
    rows = lengths_as(*lengths)
    for name, form in forms(rows):
        out = row_major_positions(form)
        assert [piece.tolist() for piece in out.unbind()] == [row.T.tolist() for row in rows], name
        back = plane_major_positions(out)
        assert torch.equal(back.values(), torch.cat(rows, dim=1)), name
        assert back.offsets().tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()], name


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_equal_lengths_of_as_many_tokens_as_there_are_planes_in_the_batch(count):
    """(B * planes, L) with L = B * planes looks like (planes, all lengths) from one side."""
    rows = [torch.arange(4 * 4 * count).view(4, 4 * count) + 1000 * i for i in range(count)]
    out = row_major_positions(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    assert all(torch.equal(found, row.T) for found, row in zip(out.unbind(), rows, strict=True))


def test_what_verl_stores_becomes_row_major():
    for lengths in ((3, 5, 2), (6, 6, 6)):
        rows = lengths_as(*lengths)
        out = row_major_positions(verls(rows))
        assert [piece.tolist() for piece in out.unbind()] == [row.T.tolist() for row in rows]


def test_row_major_positions_survive_pickling_and_chunking():
    from tensordict import TensorDict
    from verl.utils.tensordict_utils import chunk_tensordict

    for lengths in ((3, 5, 2, 4), (6, 6, 6, 6)):
        rows = lengths_as(*lengths)
        data = TensorDict(
            {"positions": row_major_positions(torch.stack(rows) if lengths[0] == 6 else next(forms(rows))[1])}, 4
        )
        parts = chunk_tensordict(pickle.loads(pickle.dumps(data)), 2)
        assert [p.tolist() for part in parts for p in part["positions"].unbind()] == [row.T.tolist() for row in rows]


def test_verl_still_breaks_equal_length_positions():
    """Needed for row_major_positions. If this fails, verl has mended it: the conversion can go."""
    from tensordict import TensorDict
    from verl.utils.tensordict_utils import chunk_tensordict, maybe_fix_3d_position_ids

    rows = lengths_as(6, 6, 6, 6)
    data = TensorDict({"position_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, 4)
    maybe_fix_3d_position_ids(data)
    try:
        parts = [p for part in chunk_tensordict(data, 2) for p in part["position_ids"].unbind()]
        right = all(torch.equal(part, row) for part, row in zip(parts, rows, strict=True))
    except (RuntimeError, ValueError):
        right = False
    assert not right


def test_flat_positions_pass_through():
    flat = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    assert row_major_positions(flat) is flat and plane_major_positions(flat) is flat


def test_engine_device_selects_our_engine_and_restores(monkeypatch):
    from verl.workers.engine.base import EngineRegistry

    from opd_recipes.engine import StudentEngine

    with engine_device():
        assert os.environ["VERL_ENGINE_DEVICE"] == ENGINE_DEVICE
        assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is StudentEngine
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is not StudentEngine
    monkeypatch.delenv("VERL_ENGINE_DEVICE")
    with engine_device():
        pass
    assert "VERL_ENGINE_DEVICE" not in os.environ


def test_verl_still_refuses_a_second_engine_under_its_own_key():
    """Needed for ENGINE_DEVICE."""
    from verl.workers.engine.base import EngineRegistry

    from opd_recipes.engine import StudentEngine

    with pytest.raises(AssertionError, match="already"):
        EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cuda")(StudentEngine)


def test_verl_still_publishes_decorated_classes():
    """Needed for undecorated()."""
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.ppo.v1 import AgentLoopWorkerTQ

    for actor in (TaskRunnerV1, AgentLoopWorkerTQ):
        assert not isinstance(actor, type) and isinstance(undecorated(actor), type)


def test_verl_still_compares_with_the_literal_sync():
    """Needed for LiteralMode."""
    import inspect

    from verl.trainer.ppo.v1 import trainer_base

    assert 'self.trainer_mode != "sync"' in inspect.getsource(trainer_base)

    class Trainer:
        trainer_mode = LiteralMode("sync")

    trainer = Trainer()
    trainer.trainer_mode = "opd_sync"
    assert trainer.trainer_mode == "sync"


def test_verls_separate_trainer_still_logs_with_an_unknown_argument():
    """Needed for warnings_only()."""
    import inspect
    import logging

    from verl.trainer.ppo.v1 import trainer_separate_async

    assert "flush=True" in inspect.getsource(trainer_separate_async.PPOTrainerSeparateAsync._setup)
    logger = logging.getLogger("test_verl_compat")
    logger.setLevel(logging.INFO)
    with pytest.raises(TypeError):
        logger.info("x", flush=True)
    with warnings_only(logger):
        logger.info("x", flush=True)
    assert logger.level == logging.INFO


def test_cpu_platform_is_registered_for_every_process():
    from verl.plugin.platform import get_platform

    import opd_recipes.plugin  # noqa: F401

    platform = get_platform()
    assert platform.device_name == "cpu" and not platform.is_platform_available()
    assert f"{platform.device_name}:{platform.current_device()}" == "cpu:0"
    assert torch.zeros(1).to(platform.current_device()).device.type == "cpu"


def test_the_entry_point_is_installed():
    from importlib.metadata import entry_points

    assert [e.value for e in entry_points(group="verl.plugins") if e.name == "opd_recipes"] == ["opd_recipes.plugin"]
