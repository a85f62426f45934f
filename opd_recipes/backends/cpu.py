"""verl and vLLM on a machine without an accelerator: with ``vllm_cpu`` the only CPU-specific code of the package.

Chosen by ``+overlay=cpu``, which sets ``VERL_PLATFORM=cpu`` and names :mod:`opd_recipes.backends.vllm_cpu` for vLLM.
"""

from __future__ import annotations

import resource
import types
from contextlib import contextmanager

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _CpuDevice(str):
    """verl uses a device id both as ``tensor.to(id)`` and inside ``f"{name}:{id}"``: 'cpu' to the first, 0 to the second."""

    def __new__(cls):
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return "0"


_DEVICE = _CpuDevice()


def _nothing(*args, **kwargs) -> None:
    return None


def _resident(*args) -> int:
    return psutil.Process().memory_info().rss


def _peak_resident(*args) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory(*args) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_module() -> types.ModuleType:
    """What verl calls on ``torch.cuda``, for the CPU: memory is the process's, streams and caches are nothing."""
    module = types.ModuleType("opd_recipes_cpu_device")
    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: _DEVICE,
        set_device=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        ipc_collect=_nothing,
        reset_peak_memory_stats=_nothing,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        memory_allocated=_resident,
        memory_reserved=_resident,
        max_memory_allocated=_peak_resident,
        max_memory_reserved=_peak_resident,
        mem_get_info=_memory,
        get_device_name=lambda *args: "cpu",
        get_device_properties=lambda *args: types.SimpleNamespace(
            name="cpu", total_memory=_memory()[1], major=0, minor=0
        ),
        Stream=torch.cpu.Stream,
        current_stream=torch.cpu.current_stream,
        stream=torch.cpu.stream,
    )
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The platform named by ``VERL_PLATFORM=cpu``; never detected by itself, so GPU machines are not affected."""

    _module = _device_module()
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: self._module)

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return False

    def current_device(self):
        return _DEVICE

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    # verl schedules on GPU or NPU resources only; ray.init(num_gpus=N) makes N logical ones without any hardware.
    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False  # weights go to vLLM through shared memory

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def cudart(self):
        return None

    @contextmanager
    def nvtx_range(self, msg):
        yield
