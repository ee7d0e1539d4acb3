"""Step bf16 parameters in fp32, and round what the optimizer wrote stochastically.

    before optimizer.step()    weights, gradients and states of some parameters are fp32 copies
    after it                   each number is rounded to one of its two neighbours in bf16, in proportion to its distance

Rounded to nearest, an update below 2^-9 of a weight is lost each time; rounded this way, weights and states move by what was
asked for in the mean (Gupta et al., arXiv 1502.02551). The random bits are a hash of a seed, the parameter's name, the place
of the element in the whole weight, and the step: any number of ranks, at any stage, also after a resume, rounds alike.

Parameters step a few at a time, so that fp32 copies of all of them never exist together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom.config import Config
from torchloom.errors import ConfigError
from torchloom.loop.elementwise import ELEMENTWISE
from torchloom.loop.ownership import ownership_of
from torchloom.plan.states import CHUNK_BYTES
from torchloom.shard import Layout, owners_of

_WIDE_BYTES = 16
"""Bytes of fp32 copies of an element: weight, gradient and two states."""
_BLOCK = 1 << 22
"""Elements that share a hash of everything but their place, counted from the start of the whole weight."""
_MULTIPLIERS = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)
"""Of MurmurHash3's final mix (Appleby, 2011), as signed numbers."""


@dataclass
class Rounding:
    """Steps an optimizer whose parameters are bf16.

    Args:
        seed: of all random bits.
        places: by the id of a parameter: its name, and the place of its first element in the whole weight.
    """

    seed: int
    places: Mapping[int, tuple[str, int]]
    step: int = 0
    """Number of the optimizer step."""

    def update(self, optimizer: Optimizer) -> None:
        """Step all parameters of an optimizer, a few at a time; all at once if it may count its own steps."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for some in in_chunks(params) if type(optimizer) in ELEMENTWISE else [params]:
            with only(optimizer, some), self.in_fp32(optimizer, some):
                optimizer.step()

    @contextmanager
    def in_fp32(self, optimizer: Optimizer, params: Iterable[nn.Parameter]) -> Iterator[None]:
        """Let parameters with a gradient, and their states, be fp32 inside a `with` block; round them at its end.

        If the block raises, they are as before it.
        """
        narrow = [
            (param, param.data, param.grad)
            for param in params
            if param.grad is not None and param.dtype == torch.bfloat16
        ]
        before = {param: dict(optimizer.state.get(param, {})) for param, *_ in narrow}
        for param, data, grad in narrow:
            _hold(param, data.float(), grad.float())
            for key, value in before[param].items():
                if _is_of_elements(value, param, torch.bfloat16):
                    optimizer.state[param][key] = value.float()
        try:
            yield
        except BaseException:
            for param, data, grad in narrow:
                _hold(param, data, grad)
                if param in optimizer.state:
                    optimizer.state[param] = before[param]
            raise
        for param, data, grad in narrow:
            data.copy_(self._rounded(param.data, param, ""))
            _hold(param, data, grad)
            state = optimizer.state.get(param, {})
            for key, value in state.items():
                if _is_of_elements(value, param, torch.float32):
                    place = before[param].get(key)
                    if place is None or not _is_of_elements(place, param, torch.bfloat16):
                        place = torch.empty_like(value, dtype=torch.bfloat16)
                    state[key] = place.copy_(self._rounded(value, param, key))

    def _rounded(self, values: Tensor, param: nn.Parameter, what: str) -> Tensor:
        name, first = self.places.get(id(param), ("", 0))
        return stochastic_bf16(values.detach(), (self.seed, self.step, name, what), first)


def stochastic_bf16(values: Tensor, key: Sequence[Any], first: int = 0) -> Tensor:
    """Return fp32 numbers rounded to bf16, up or down in proportion to what is cut off; NaN and Inf stay.

    Args:
        values: a part of a tensor, whose elements count in order.
        key: chooses the random bits, with the place of an element in the whole tensor.
        first: place of the part's first element.

    Example:
        >>> stochastic_bf16(torch.tensor([1.0, -0.5]), ("any",))  # bf16 has these
        tensor([ 1.0000, -0.5000], dtype=torch.bfloat16)
    """
    flat = values.reshape(-1)
    rounded = torch.empty_like(flat, dtype=torch.bfloat16)
    done = 0
    while done < flat.numel():
        block, inside = divmod(first + done, _BLOCK)
        part = slice(done, done + min(_BLOCK - inside, flat.numel() - done))
        bits = random_bits((*key, block), inside, flat[part]).add_(flat[part].view(torch.int32))
        cut = bits.bitwise_and_(-1 << 16).view(torch.float32)
        rounded[part] = torch.where(flat[part].isnan(), flat[part], cut)
        done = part.stop
    return rounded.view(values.shape)


def random_bits(key: Sequence[Any], first: int, like: Tensor) -> Tensor:
    """Return 16 random bits for each element of a flat tensor, as int32.

    Args:
        key: chooses them, with the place of an element.
        first: place of the first element; less than 2^31 less their number.
        like: has their number and device.
    """
    digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
    bits = torch.arange(first, first + like.numel(), dtype=torch.int32, device=like.device)
    for word in (digest[:4], digest[4:]):
        bits.bitwise_xor_(int.from_bytes(word, "little", signed=True))
        for shift, multiplier in zip((16, 13), _MULTIPLIERS, strict=True):
            bits.bitwise_xor_(_shifted(bits, shift)).mul_(multiplier)
        bits.bitwise_xor_(_shifted(bits, 16))
    return bits.bitwise_and_((1 << 16) - 1)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Return numbers shifted right as unsigned ones, which torch has no shift for."""
    return (bits >> by).bitwise_and_((1 << 32 - by) - 1)


def in_chunks(params: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group parameters in order until their fp32 copies reach the size of a chunk, whether or not they have a gradient.

    So ranks take equally many steps.
    """
    chunk: list[nn.Parameter] = []
    for param in params:
        if chunk and sum(map(wide_bytes, chunk)) + wide_bytes(param) > CHUNK_BYTES:
            yield chunk
            chunk = []
        chunk.append(param)
    if chunk:
        yield chunk


def wide_bytes(param: nn.Parameter) -> int:
    """Return what fp32 copies of a parameter, its gradient and its states take."""
    return _WIDE_BYTES * param.numel() if param.dtype == torch.bfloat16 else 0


@contextmanager
def only(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Show an optimizer only some of its parameters, inside a `with` block."""
    chosen, groups = set(params), optimizer.param_groups
    before = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = [param for param in group["params"] if param in chosen]
        yield
    finally:
        for group, params in zip(groups, before, strict=True):
            group["params"] = params


def rounding_of(
    config: Config, model: nn.Module, layout: Layout, optimizer: Optimizer | None
) -> Rounding | None:
    """Return what steps an optimizer with stochastic rounding; None where a config does not ask for it.

    Args:
        config: the run's settings.
        model: sharded.
        layout: how it is sharded.
        optimizer: over this rank's leaves.

    Raises:
        ConfigError: the optimizer sees parameters whole, on the ranks that own them.
    """
    if not config.precision.stochastic_rounding:
        return None
    if optimizer is not None and ownership_of(optimizer).units:
        raise ConfigError(
            f"bf16.stochastic_rounding steps shards in fp32, and {type(optimizer).__name__} sees parameters whole, on the "
            "ranks that own them: drop the key, or use an optimizer that is elementwise, such as AdamW"
        )
    params = owners_of(model)
    places = {id(params[spec.name]): (spec.name, layout.rank * spec.shard_numel) for spec in layout}
    return Rounding(config.seed or 0, places)


def _is_of_elements(value: Any, param: nn.Parameter, dtype: torch.dtype) -> bool:
    """Say whether a state holds a number for each element of its parameter, in a dtype."""
    return isinstance(value, Tensor) and value.dtype == dtype and value.shape == param.shape


def _hold(param: nn.Parameter, data: Tensor, grad: Tensor) -> None:
    param.grad = None  # which has to be of the dtype of the data
    param.data = data
    param.grad = grad
