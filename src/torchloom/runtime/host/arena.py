"""Host memory that torchloom owns: few large segments, cut into blocks, counted to the byte.

A block is the memory of one tensor. It comes back when the last tensor over it dies, wherever that
happens. Segments are anonymous mappings, outside of torch's own allocators: on a CPU, what torch's
allocator counts is then the device pool, and what the arena counts is the host pool. For a GPU a
segment is page-locked when it is made; registering it avoids the rounding of torch's pinned
allocator to powers of two.

Host memory belongs to the account that was charged when it was taken, and what is copied into or out of it is counted
there, whoever does it: the loss of one engine may reload what another one has offloaded.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from torchloom.errors import MoveError

SEGMENT_BYTES = 32 << 20
"""Least size of a segment. A guess: registering memory costs a call of about 3 ms, whatever its size."""
_ALIGN = 64


Direction = Literal["to_host", "to_device"]


@dataclass(eq=False)
class Account:
    """What one engine, or a device altogether, has moved and holds on the host; all in bytes."""

    used: int = 0
    """In use on the host now, dead tensors included until the arena has buried them."""
    peak: int = 0
    """Most that was in use on the host at a time."""
    moved: dict[Direction, int] = field(default_factory=lambda: {"to_host": 0, "to_device": 0})
    in_flight: int = 0
    in_flight_peak: int = 0

    def take(self, num_bytes: int) -> None:
        """Note host memory that is taken, or, if negative, given back."""
        self.used += num_bytes
        self.peak = max(self.peak, self.used)

    def fly(self, num_bytes: int) -> None:
        """Note a copy that begins or, if negative, was waited for."""
        self.in_flight += num_bytes
        self.in_flight_peak = max(self.in_flight_peak, self.in_flight)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Let host memory that is taken inside a `with` block be this account's."""
        # Of the process, not of a thread: autograd runs backward of a GPU on threads of its own.
        _CHARGED.append(self)
        try:
            yield
        finally:
            _CHARGED.pop()


_CHARGED: list[Account] = []


def charged_account() -> Account | None:
    """Return the account that host memory is taken for now."""
    return _CHARGED[-1] if _CHARGED else None


@dataclass
class _Segment:
    memory: mmap.mmap
    address: int
    size: int
    free: list[tuple[int, int]]
    """(offset, length) of the free ranges, in order, never touching each other."""
    pinned: bool


@dataclass
class _Block:
    segment: _Segment
    offset: int
    length: int
    """Bytes taken, rounded up."""
    nbytes: int
    """Bytes asked for."""
    account: Account | None = None
    """Whose it is."""

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.segment.address + self.offset


@dataclass
class HostArena:
    """Host memory of one device.

    Args:
        device: the device whose tensors wait here; decides how memory is page-locked.
        segment_bytes: least size of a segment.
    """

    device: torch.device
    segment_bytes: int = SEGMENT_BYTES
    total: Account = field(default_factory=Account, init=False)
    """All that is in use."""
    _accounts: dict[int, Account] = field(default_factory=dict, init=False)
    """Whose the blocks are, by their addresses."""
    _segments: list[_Segment] = field(default_factory=list, init=False)
    _dead: deque[_Block] = field(default_factory=deque, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def used_bytes(self) -> int:
        """Bytes of all living tensors of the arena."""
        with self._lock:
            self._bury()
            return self.total.used

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self._segments)

    def account_of(self, tensor: Tensor) -> Account | None:
        """Return the account that a tensor of the arena was taken for."""
        return self._accounts.get(tensor.data_ptr())

    def owns(self, tensor: Tensor) -> bool:
        """Say whether a tensor lives in this arena."""
        address = tensor.data_ptr()
        return any(0 <= address - s.address < s.size for s in self._segments)

    def empty_like(self, tensor: Tensor, *, pin: bool = True) -> Tensor:
        """Return an unfilled CPU tensor of the arena with `tensor`'s shape, strides and dtype.

        Strides with gaps or overlaps are packed, as `torch.empty_like` packs them.

        Raises:
            MoveError: the machine has no memory for another segment.
        """
        plan = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
        numel = plan.numel()
        if numel == 0:
            return torch.empty_like(plan, device="cpu")
        flat = self.empty(numel, plan.dtype, pin=pin)
        return flat.as_strided(plan.size(), plan.stride())

    def empty(self, numel: int, dtype: torch.dtype, *, pin: bool = True) -> Tensor:
        """Return a flat, unfilled CPU tensor of the arena; see `empty_like`."""
        nbytes = numel * dtype.itemsize
        with self._lock:
            self._bury()
            block = self._take(nbytes, pin and self.device.type != "cpu")
            block.account = charged_account()
            self.total.take(nbytes)
            if block.account is not None:
                block.account.take(nbytes)
                self._accounts[block.address] = block.account
        view = (ctypes.c_char * nbytes).from_buffer(block.segment.memory, block.offset)
        # The tensor keeps the view alive. A finalizer may run on any thread and inside of any other
        # call, also one that holds the lock: it only leaves a note.
        finalizer: Any = weakref.finalize(view, self._dead.append, block)
        finalizer.atexit = False
        return torch.frombuffer(view, dtype=dtype)

    def device_like(self, tensor: Tensor) -> Tensor:
        """Return host memory in `tensor`'s likeness that is a tensor of the arena's own device.

        It can stand wherever the device's tensors can, e.g. as a parameter. On a GPU every access
        of a kernel crosses the bus: copy it with the mover before computing with it.
        """
        return _device_view(self.empty_like(tensor), self.device)

    def host_alias(self, tensor: Tensor) -> Tensor:
        """Return the CPU tensor over the same memory as one that `device_like` made."""
        if tensor.device.type == "cpu":
            return tensor
        nbytes = tensor.nbytes
        view = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
        flat = torch.frombuffer(view, dtype=tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride())

    def _bury(self) -> None:
        while self._dead:
            block = self._dead.popleft()
            self.total.take(-block.nbytes)
            if block.account is not None:
                block.account.take(-block.nbytes)
                self._accounts.pop(block.address, None)
            _give_back(block.segment.free, block.offset, block.length)

    def _take(self, nbytes: int, pin: bool) -> _Block:
        length = -(-nbytes // _ALIGN) * _ALIGN
        fits = [
            (size, index, place)
            for index, segment in enumerate(self._segments)
            if segment.pinned == pin
            for place, (_, size) in enumerate(segment.free)
            if size >= length
        ]
        if fits:
            _, index, place = min(fits)
            segment = self._segments[index]
        else:
            segment, place = self._grow(length, pin), 0
        offset, size = segment.free.pop(place)
        if size > length:
            segment.free.insert(place, (offset + length, size - length))
        return _Block(segment, offset, length, nbytes)

    def _grow(self, length: int, pin: bool) -> _Segment:
        size = -(-max(length, self.segment_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, MemoryError) as error:
            raise MoveError(
                f"no {size} bytes of host memory for tensors that are offloaded from {self.device} "
                f"({self.reserved_bytes} bytes are reserved already): offload less, or run fewer "
                "processes on this host"
            ) from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if pin:
            _page_lock(address, size, self.device)
        segment = _Segment(memory, address, size, [(0, size)], pin)
        self._segments.append(segment)
        return segment


def _give_back(free: list[tuple[int, int]], offset: int, length: int) -> None:
    """Add a range to a sorted list of free ranges and join it with its neighbours."""
    place = bisect.bisect(free, (offset, length))
    if place < len(free) and offset + length == free[place][0]:
        length += free.pop(place)[1]
    if place and sum(free[place - 1]) == offset:
        offset, before = free[place - 1][0], free[place - 1][1]
        free[place - 1] = (offset, before + length)
    else:
        free.insert(place, (offset, length))


class _OnDevice:
    """Memory in the form in which torch takes over CUDA arrays of others; keeps `host` alive."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": (host.nbytes,),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


def _device_view(host: Tensor, device: torch.device) -> Tensor:
    """See page-locked host memory as a tensor of the GPU, which can address it directly."""
    if device.type == "cpu" or host.numel() == 0:
        return host.to(device) if host.numel() == 0 else host
    flat = torch.as_tensor(_OnDevice(host), device=device).view(host.dtype)
    return flat.as_strided(host.size(), host.stride())


def _page_lock(address: int, size: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        cudart: Any = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(address, size, 0))
    if code != 0:
        raise MoveError(
            f"CUDA refused to page-lock {size} bytes of host memory for {device} (error {code}): "
            "raise the limit of locked memory (ulimit -l), or set "
            "compile.offload_activation_pin_memory to false"
        )
