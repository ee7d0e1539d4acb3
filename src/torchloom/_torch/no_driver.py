"""Torch's CUDA build on a machine without a driver: fake tensors on `cuda`, and kernels that are compiled and never run.

Autograd and Inductor ask the driver even where tensors have no data. In a process that does nothing else,

library    a stub of libcuda.so.1, loaded before torch, tells autograd that no device is in use (`build_stub`)
table      published properties of a device answer Inductor and Triton (`answer_for`)
compiler   Triton and ptxas make machine code, which nobody loads (`machine_code`)
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from torchloom.errors import PlanError

_NUM_DEVICES = "torchloom_num_devices"
_FAILING = [
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuFuncSetCacheConfig",
    "cuGetErrorString",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuInit",
    "cuLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLinkAddData_v2",
    "cuLinkComplete",
    "cuLinkCreate_v2",
    "cuModuleGetFunction",
    "cuModuleLoad",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
]
"""What torch's libcaffe2_nvrtc.so links against; here each returns CUDA_ERROR_NO_DEVICE."""
_STUB = f"""
{" ".join(f"int {name}(void) {{ return 100; }}" for name in _FAILING)}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {{ *flags = 0; *active = 0; return 0; }}
signed char {_NUM_DEVICES} = 0;
signed char _ZN3c104cuda12device_countEv(void) {{ return {_NUM_DEVICES}; }}
"""
"""The last line takes the place of `c10::cuda::device_count()`, by which autograd checks the numbers of devices."""


@dataclass(frozen=True, slots=True)
class _Arch:
    """Published properties of a kind of GPU."""

    major: int
    num_units: int
    """Streaming multiprocessors."""
    shared_kib: int
    """Shared memory of one of them."""
    l2_mib: int


_ARCHS = {
    "a100": _Arch(8, 108, 164, 40),
    "h100": _Arch(9, 132, 228, 50),
    "h200": _Arch(9, 132, 228, 50),
    "b200": _Arch(10, 148, 228, 126),
}
"""By the beginning of a device's name; from NVIDIA's tuning guides for Ampere, Hopper and Blackwell."""


def why_not_lowered(device: str) -> str:
    """Return why code for a device cannot be compiled here, and what to install; nothing if it can.

    Args:
        device: a row of the cost tables, such as "h100-80gb".
    """
    if device.partition("-")[0] not in _ARCHS:
        return (
            f"there is no CUDA architecture for device {device!r}: use one of {', '.join(_ARCHS)}"
        )
    if not torch.backends.cuda.is_built():
        return (
            f"torch {torch.__version__} has no CUDA: install a build that has, which needs no GPU "
            "(pip install 'torchloom[gpu-check]' from an index with CUDA builds of torch)"
        )
    try:
        import triton  # noqa: F401
    except ImportError:
        return "there is no triton: pip install 'torchloom[gpu-check]'"
    if _compiler() is None:
        return "there is no C compiler: install gcc or clang"
    return ""


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def build_stub(folder: Path) -> Path:
    """Compile the library that a process has to load before torch (LD_PRELOAD); return its path.

    Raises:
        PlanError: the C compiler fails.
    """
    source, library = folder / "stub.c", folder / "libcuda.so.1"
    source.write_text(_STUB, encoding="ascii")
    command = [_compiler() or "cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    made = subprocess.run(
        [*command, str(source), "-o", str(library)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise PlanError(f"--lower: the C compiler failed: {made.stderr.strip()}")
    return library


def has_stub() -> bool:
    """Return whether this process loaded the library of `build_stub` before torch."""
    return hasattr(ctypes.CDLL(None), _NUM_DEVICES)


def answer_for(device: str, capacity_bytes: int, run: Callable[[str], Callable[..., Any]]) -> None:
    """Let fake tensors on `cuda` be traced, and compiled by Inductor, as on a device. The process is of no other use then.

    Args:
        device: a row of the cost tables, such as "h100-80gb".
        capacity_bytes: its memory.
        run: makes of a wrapper's source what runs in its place.
    """
    torch._C._ensureCUDADeviceGuardSet()  # a guard that does nothing, made where no device is
    ctypes.c_int8.in_dll(ctypes.CDLL(None), _NUM_DEVICES).value = 127  # more than autograd asks for
    arch = _ARCHS[device.partition("-")[0]]
    _answer_torch(device, capacity_bytes, arch)
    _answer_inductor(arch, run)
    _choose_attention()


def _answer_torch(device: str, capacity_bytes: int, arch: _Arch) -> None:
    properties = SimpleNamespace(
        name=f"NVIDIA {device.upper()}",
        major=arch.major,
        minor=0,
        total_memory=capacity_bytes,
        multi_processor_count=arch.num_units,
        warp_size=32,
        max_threads_per_block=1024,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=(arch.shared_kib - 1) << 10,
        shared_memory_per_multiprocessor=arch.shared_kib << 10,
        L2_cache_size=arch.l2_mib << 20,
        gcnArchName="",
    )
    from torch._dynamo.device_interface import CudaInterface

    answers: dict[str, Callable[..., Any]] = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_initialized": lambda: False,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_name": lambda _=None: properties.name,
        "get_device_capability": lambda _=None: (arch.major, 0),
        "get_device_properties": lambda _=None: properties,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "set_device": lambda _: None,
        "synchronize": lambda _=None: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if hasattr(CudaInterface, name.lstrip("_")):
            setattr(CudaInterface, name.lstrip("_"), staticmethod(answer))
    # Dynamo and fake tensors would make streams and contexts; Inductor asks its interface.
    torch.cuda.is_available = lambda: False
    CudaInterface.is_available = staticmethod(lambda: True)
    CudaInterface.Worker.current_device = staticmethod(answers["current_device"])
    CudaInterface.Worker.get_device_properties = staticmethod(answers["get_device_properties"])
    torch._C._cuda_getCurrentRawStream = lambda _: 0


def _answer_inductor(arch: _Arch, run: Callable[[str], Callable[..., Any]]) -> None:
    import triton
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 10 * arch.major, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _=0: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
    )
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = lambda: None
    AsyncCompile.triton = lambda *_, **__: None  # `machine_code` compiles those of the final code
    config.joint_graph_constant_folding = False  # computes constants on the device
    config.shape_padding = False  # measures on the device whether padding pays
    config.compile_threads = 1
    for name in (
        "use_static_triton_launcher",
        "use_static_cuda_launcher",
    ):  # the second until torch 2.11
        if hasattr(config, name):
            setattr(config, name, False)  # keeps no machine code that could be measured
    config.force_disable_caches = True  # what comes from a cache was woven at another time
    CompiledFxGraph.__call__ = lambda self, inputs: run(self.source_code)(inputs)


def _choose_attention() -> None:
    """Choose the kernel of attention by dtype and shape: torch asks the device, and then takes the same."""
    aten = torch.ops.aten

    def attention(
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        is_half = q.dtype in (torch.float16, torch.bfloat16)
        if is_half and attn_mask is None and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
            flash = aten._scaled_dot_product_flash_attention
            return flash(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    _LIBRARY.impl("scaled_dot_product_attention", attention, "AutogradCUDA")


_LIBRARY = torch.library.Library("aten", "IMPL")


def machine_code(name: str, source: str) -> list[int]:
    """Compile a Triton kernel for each configuration that Inductor would try; return the bytes of each.

    Args:
        name: of the kernel.
        source: the module that Inductor wrote for it.

    Raises:
        Exception: Triton or ptxas refuse it.
    """
    from torch._inductor.codecache import _load_triton_kernel_from_source

    kernel = _load_triton_kernel_from_source(name, source)
    kernel.precompile(warm_cache_only=True)
    return [len(_binary(each).asm["cubin"]) for each in kernel.compile_results]


def _binary(result: Any) -> Any:
    return result.kernel
