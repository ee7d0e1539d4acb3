"""Step bf16 parameters in fp32, and round what the optimizer wrote stochastically.

    before a step    weights, gradients and states of some parameters become fp32 copies
    after it         each number is rounded to one of its two neighbours in bf16, in proportion to its distance

Rounded to nearest, an update below 2^-9 of a weight is lost each time; rounded this way, weights and states move by what was
asked for in the mean (Gupta et al., arXiv 1502.02551). The random bits are a hash of a seed, the parameter's name, the place
of the element in the whole weight, and the step: shards, slices, whole parameters and those on their owners round alike.

`loop.ownership` steps parameters a few at a time where it may, so that fp32 copies of all of them never exist together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torchloom._torch.tensors import tensors_inside
from torchloom._torch.untraced import leave_alone
from torchloom.config import Config
from torchloom.errors import ConfigError
from torchloom.loop.elementwise import needs_closure
from torchloom.plan.states import CHUNK_BYTES
from torchloom.shard import Layout, owners_of

_WIDE_BYTES = 16
"""Bytes of fp32 copies of an element: weight, gradient and two states."""
_BLOCK = 1 << 22
"""Elements that share a hash of everything but their place, counted from the start of the whole weight."""
_MULTIPLIERS = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)
"""Of MurmurHash3's final mix (Appleby, 2011), as signed numbers."""


class _Place(NamedTuple):
    """What chooses the random bits of a parameter, beside the step."""

    seed: int
    name: str
    numel: int
    """Elements of the whole parameter."""
    first: int
    """Place of the first element of this rank's part in it."""


_PLACES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of the parameters that are rounded stochastically."""
_COUNT = "rounded_steps"
"""Key of an optimizer's groups: its number of steps. `state_dict` and `load_state_dict` carry all keys of groups."""


def round_stochastically(model: nn.Module, layout: Layout, seed: int | None) -> None:
    """Let optimizers step the bf16 parameters of a sharded model in fp32 from now on, and round the results.

    Args:
        model: sharded.
        layout: how it is sharded.
        seed: of all random bits; None: they step as they are.
    """
    for name, param in owners_of(model).items():
        spec = layout[name]
        _PLACES.pop(param, None)
        if seed is not None:
            _PLACES[param] = _Place(seed, name, spec.numel, layout.rank * spec.shard_numel)


def seed_of_rounding(config: Config) -> int | None:
    """Return what chooses all random bits; None where a config does not ask for stochastic rounding."""
    return (config.seed or 0) if config.precision.stochastic_rounding else None


def is_rounded(optimizer: Any) -> bool:
    """Say whether an optimizer steps parameters whose results are rounded stochastically."""
    return any(param in _PLACES for group in optimizer.param_groups for param in group["params"])


def stand_in(param: Tensor, made: Tensor) -> None:
    """Let `made` be rounded as `param` is."""
    if param in _PLACES:
        _PLACES[made] = _PLACES[param]


def count_step(optimizer: Optimizer) -> int:
    """Count a step of a loop's optimizer in its groups, where files of its states keep it; return its number.

    Raises:
        ConfigError: the optimizer evaluates the loss in its step.
    """
    if needs_closure(optimizer):
        raise ConfigError(
            f"bf16.stochastic_rounding: {type(optimizer).__name__} evaluates the loss anew in its step, where weights are fp32: "
            "drop the key"
        )
    step = max(group.get(_COUNT, 0) for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        group[_COUNT] = step + 1
    return step


def check_carried(optimizer: Optimizer) -> None:
    """Raise if torch's `load_state_dict` would not give back what a loop's optimizer has kept in its step.

    It casts all states but `step` to the dtype of the parameter.

    Raises:
        ConfigError: the optimizer keeps fp32 numbers that are none of elements.
    """
    for param, state in optimizer.state.items():
        for key, value in state.items() if param in _PLACES else ():
            found = tensors_inside(value)
            if key != "step" and any(each.dtype == torch.float32 for each in found):
                raise ConfigError(
                    f"bf16.stochastic_rounding: {type(optimizer).__name__} keeps {key!r} in fp32, which load_state_dict makes bf16, so "
                    "a resumed loop would train to other weights: drop the key, or train with torchloom.initialize"
                )


for _function in (count_step, check_carried):
    leave_alone(_function, "it changes, or looks at, what an optimizer keeps")


class Wide:
    """Parameters with a gradient, and their states, while they are fp32.

    Wide(...)   they are fp32 copies
    end()       they are rounded
    undo()      they are as before, after a step that raised

    Args:
        optimizer: steps them.
        params: some of its parameters; those that are not bf16, or not rounded, stay as they are.
        step: chooses the random bits.
    """

    def __init__(self, optimizer: Optimizer, params: Iterable[nn.Parameter], step: int) -> None:
        self._state, self._step = optimizer.state, step
        self._narrow = [
            (param, param.data, param.grad, dict(optimizer.state.get(param, {})))
            for param in params
            if param.grad is not None and param.dtype == torch.bfloat16 and param in _PLACES
        ]
        for param, data, grad, before in self._narrow:
            _hold(param, data.float(), grad.float())
            for key, value in before.items():
                if _is_of_elements(key, value, param) and value.dtype == torch.bfloat16:
                    optimizer.state[param][key] = value.float()

    def end(self) -> None:
        """Let parameters and states be bf16, rounded."""
        for param, data, grad, before in self._narrow:
            data.copy_(self._rounded(param.data, param, ""))
            state = self._state.get(param, {})
            for key, value in state.items():
                if _is_of_elements(key, value, param) and value.dtype == torch.float32:
                    kept = before.get(key)
                    if not isinstance(kept, Tensor) or kept.dtype != torch.bfloat16:
                        kept = torch.empty_like(value, dtype=torch.bfloat16)
                    state[key] = kept.copy_(self._rounded(value, param, key))
            _hold(param, data, grad)

    def undo(self) -> None:
        """Let parameters and states be as before."""
        for param, data, grad, before in self._narrow:
            _hold(param, data, grad)
            if param in self._state:
                self._state[param] = before

    def _rounded(self, values: Tensor, param: nn.Parameter, what: str) -> Tensor:
        place = _PLACES[param]
        first = 0 if param.numel() == place.numel else place.first
        return stochastic_bf16(values.detach(), (place.seed, self._step, place.name, what), first)


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


def _is_of_elements(key: str, value: Any, param: Tensor) -> bool:
    """Say whether a state holds numbers of elements, not the count of a parameter's steps or another single number."""
    return (
        isinstance(value, Tensor)
        and key != "step"
        and (value.numel() > 1 or value.shape == param.shape)
    )


def _hold(param: nn.Parameter, data: Tensor, grad: Tensor) -> None:
    param.grad = None  # which has to be of the dtype of the data
    param.data = data
    param.grad = grad
