"""Inductor's generated wrapper code as a function that can be replayed without data.

The wrapper is Python: it allocates buffers, calls kernels, and drops buffers. Replayed, its kernels do
nothing and its buffers are fake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Wrapper = Callable[[list[Any]], Any]
OnExtern = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]

_COMPILER = "async_compile = AsyncCompile()"


def load_wrapper(source: str, on_extern: OnExtern) -> Wrapper | None:
    """Return the wrapper's entry, with kernels that do nothing; None if it is of unknown form.

    Args:
        source: the module that Inductor wrote, as `CompiledFxGraph.source_code` holds it.
        on_extern: told of each library kernel that writes into given buffers: the operator of ATen
            that it stands for, its arguments and keyword arguments.
    """
    if _COMPILER not in source:
        return None
    names: dict[str, Any] = {"__name__": "torchloom_replay", "_compiler": _Nothing()}
    try:
        exec(
            compile(source.replace(_COMPILER, "async_compile = _compiler"), "<wrapper>", "exec"),
            names,
        )
    except Exception:  # noqa: BLE001  # generated code runs, of a form that was never seen
        return None
    names.update(
        empty_strided_cpu=_empty_on("cpu"),
        empty_strided_cuda=_empty_on("cuda"),
        reinterpret_tensor=_reinterpret,
        assert_size_stride=_ignore,
        assert_size_stride_grouped=_ignore,
        assert_tensor_metadata=_ignore,
        assert_alignment=_ignore,
        copy_if_misaligned=_same,  # reads addresses, which fake tensors have none of
        extern_kernels=_Extern(on_extern),
        get_raw_stream=_ignore,
    )
    found: Wrapper | None = names.get("call")
    return found


class _Nothing:
    """Stands for the kernel compiler and for each kernel."""

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        return self


class _Extern:
    """Stands for `extern_kernels`: what writes into `out` allocates no result."""

    def __init__(self, on_extern: OnExtern) -> None:
        self._on_extern = on_extern

    def __getattr__(self, name: str) -> Callable[..., Any]:
        packet = getattr(torch.ops.aten, name)
        target = getattr(packet, "default", packet)

        def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            if out is None:
                return packet(*args, **kwargs)
            self._on_extern(target, args, kwargs)
            return out

        return call


def _empty_on(device: str) -> Callable[..., Tensor]:
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _reinterpret(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _ignore(*_: Any) -> None:
    return None


def _same(tensor: Tensor) -> Tensor:
    return tensor
