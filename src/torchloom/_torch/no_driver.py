"""Torch's CUDA build on a machine without a driver: fake tensors on `cuda`, and kernels that are compiled and never run.

Autograd and Inductor ask the driver even where tensors have no data. In a process that does nothing else,

library    a stub of libcuda.so.1, loaded before torch, tells autograd that no device is in use (`build_stub`)
table      published properties of a device answer Inductor and Triton (`answer_for`)
compiler   Triton and ptxas make machine code, which nobody loads (`machine_code`)
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config

from torchloom.errors import PlanError

_NUM_DEVICES = "torchloom_num_devices"
_STUB = f"""
signed char {_NUM_DEVICES} = 0;
signed char _ZN3c104cuda12device_countEv(void) {{ return {_NUM_DEVICES}; }}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {{ *flags = *active = 0; return 0; }}
"""
"""Takes the place of `c10::cuda::device_count()`, by which autograd checks the numbers of devices before it asks the
driver whether each is in use."""
_ARCHS = {
    "a100": (8, 108, 164),
    "h100": (9, 132, 228),
    "h200": (9, 132, 228),
    "b200": (10, 148, 228),
}
"""Compute capability, multiprocessors and KiB of shared memory of one, by the beginning of a device's name; from
NVIDIA's tuning guides for Ampere, Hopper and Blackwell."""


def why_not_lowered(device: str) -> str:
    """Return why code for a device cannot be compiled here, and what to install; nothing if it can.

    Args:
        device: a row of the cost tables, such as "h100-80gb".
    """
    if device.partition("-")[0] not in _ARCHS:
        return (
            f"there is no CUDA architecture for device {device!r}: use one of {', '.join(_ARCHS)}"
        )
    if not torch.backends.cuda.is_built() or find_spec("triton") is None:
        return (
            f"torch {torch.__version__} has no CUDA or no Triton: install a build that has, which needs no GPU "
            "(pip install 'torchloom[gpu-check]' from an index with CUDA builds of torch)"
        )
    return "" if shutil.which("cc") else "there is no C compiler: install gcc or clang"


def build_stub(folder: Path) -> Path:
    """Compile the library that a process has to load before torch (LD_PRELOAD); return its path."""
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(_STUB, encoding="ascii")
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise PlanError(f"--lower: the C compiler failed: {made.stderr.strip()}")
    return library


def has_stub() -> bool:
    """Return whether this process loaded the library of `build_stub` before torch."""
    return hasattr(ctypes.CDLL(None), _NUM_DEVICES)


@functools.cache  # the same for each combination that a command simulates
def answer_for(device: str, capacity_bytes: int, run: Callable[[str], Callable[..., Any]]) -> None:
    """Let fake tensors on `cuda` be traced, and compiled by Inductor, as on a device. The process is of no other use then.

    Args:
        device: a row of the cost tables, such as "h100-80gb".
        capacity_bytes: its memory.
        run: makes of a wrapper's source what runs in its place.
    """
    torch._C._ensureCUDADeviceGuardSet()  # a guard that does nothing, made where no device is
    ctypes.c_int8.in_dll(ctypes.CDLL(None), _NUM_DEVICES).value = 127  # more than autograd asks for
    major, num_units, shared_kib = _ARCHS[device.partition("-")[0]]
    _answer_torch(
        SimpleNamespace(
            name=f"NVIDIA {device.upper()}",
            major=major,
            minor=0,
            total_memory=capacity_bytes,
            multi_processor_count=num_units,
            warp_size=32,
            max_threads_per_block=1024,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block_optin=(shared_kib - 1) << 10,
        )
    )
    _answer_inductor(10 * major, run)


class _Generator(torch.Generator):
    """Stands for the device's, which graphs take that compute random operators again."""

    device = torch.device("cuda", 0)

    def clone_state(self) -> _Generator:
        """Return one more."""
        return _Generator()


def _answer_torch(properties: SimpleNamespace) -> None:
    answers: dict[str, Callable[..., Any]] = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda _=None: (properties.major, 0),
        "get_device_properties": lambda _=None: properties,
        "set_device": lambda _: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if hasattr(CudaInterface, name):
            setattr(CudaInterface, name, staticmethod(answer))
    torch.cuda.default_generators = (_Generator(),)
    # Dynamo and fake tensors would make streams and contexts; Inductor asks its interface.
    torch.cuda.is_available = lambda: False
    CudaInterface.is_available = staticmethod(lambda: True)


def _answer_inductor(capability: int, run: Callable[[str], Callable[..., Any]]) -> None:
    from torch._inductor.async_compile import AsyncCompile  # begins workers when it is imported
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime import triton_helpers

    triton, compiler = import_module("triton"), import_module("triton.backends.compiler")
    target = compiler.GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    triton_helpers.set_driver_to_gpu = lambda: None
    AsyncCompile.triton = lambda *_, **__: None  # `machine_code` compiles those of the final code
    config.joint_graph_constant_folding = False  # computes constants on the device
    config.shape_padding = False  # measures on the device whether padding pays
    config.force_disable_caches = True  # what comes from a cache was woven at another time
    for name in (
        "use_static_triton_launcher",
        "use_static_cuda_launcher",
    ):  # the second: torch 2.11
        if hasattr(config, name):
            setattr(config, name, False)  # keeps no machine code that could be measured
    CompiledFxGraph.__call__ = lambda self, inputs: run(self.source_code)(inputs)


def machine_code(name: str, source: str) -> tuple[int, str]:
    """Compile a Triton kernel for all configurations that Inductor would try.

    Args:
        name: of the kernel.
        source: the module that Inductor wrote for it.

    Returns:
        Bytes of machine code, and why there is none.
    """
    from torch._inductor.codecache import _load_triton_kernel_from_source

    try:
        kernel: Any = _load_triton_kernel_from_source(name, source)
        kernel.precompile(warm_cache_only=True)
    except Exception as error:  # noqa: BLE001  Triton and ptxas raise anything
        return 0, f"{type(error).__name__}: {error}".partition("\n")[0]
    return sum(len(each.kernel.asm["cubin"]) for each in kernel.compile_results), ""
