"""Logits that a model returns and a training step does not read: made only when somebody reads them.

    compiled graph -> loss, rows     to the caller -> loss, UnreadLogits(rows)

Any operator that reads a stand-in computes the logits first, from the rows and the weights of that step, without a
gradient. What cannot be had any more is an error: logits behind the optimizer's step, and a gradient through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from torchloom._torch.modes import num_writes
from torchloom._torch.subclasses import PLAIN_RESULTS, wrapper
from torchloom.errors import CompileError

UNREAD = "torchloom_unread"
"""Meta of a captured graph module: by the place of a result, what it stands for."""
_KEEP = 'set compile.chunk_loss to "never", and logits are made as before'


class Unread(NamedTuple):
    """What a result of a graph stands for that is rows: logits with as many leading dimensions."""

    logits: fx.GraphModule
    """Takes the rows, then inputs of the captured graph."""
    inputs: tuple[int, ...]
    """Which ones: they hold the head's weights."""
    vocabulary: int
    dtype: torch.dtype


def with_stand_ins(
    compiled: Callable[..., Any], unread: Mapping[int, Unread]
) -> Callable[..., Any]:
    """Return code that returns stand-ins where a compiled graph returns rows.

    Args:
        compiled: the graph.
        unread: by the place of the result.
    """
    if not unread:
        return compiled

    def run(*args: Any) -> Any:
        results = list(compiled(*args))
        for place, each in unread.items():
            rows, inputs = results[place], [args[index] for index in each.inputs]
            compute = _Logits(each.logits, rows, inputs)
            like = rows.new_empty(0, dtype=each.dtype)
            shape = (*rows.shape[:-1], each.vocabulary)
            anchor = torch.empty(0, requires_grad=True)
            with torch.enable_grad():
                results[place] = _NoWayBack.apply(anchor, compute, like, shape)
        return tuple(results)

    return run


class _Logits:
    """Computes logits as long as the weights are what they were.

    Args:
        logits: of rows and weights.
        rows: of the forward pass.
        inputs: what holds the weights.
    """

    def __init__(self, logits: fx.GraphModule, rows: Tensor, inputs: Sequence[Any]) -> None:
        self._logits, self._rows, self._inputs = logits, rows, inputs
        self._num_writes = [*map(num_writes, inputs)]
        self._found: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._found is None:
            if self._num_writes != [*map(num_writes, self._inputs)]:
                raise CompileError(
                    "logits of a training step are read after the weights changed, and were never made before: read "
                    f"them before the optimizer steps, or {_KEEP}"
                )
            with torch.no_grad():
                self._found = self._logits(self._rows, *self._inputs)
        return self._found


class _NoWayBack(torch.autograd.Function):
    """Makes a stand-in of what computes logits; a gradient that comes to it is an error."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, compute: Callable[[], Tensor], like: Tensor, shape: Sequence[int]
    ) -> Tensor:
        return _made(compute, like, shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise CompileError(
            "a loss is made of logits that a model returned beside the loss that it computed: they have no gradient, "
            f"as they were never made in forward; {_KEEP}"
        )


class UnreadLogits(Tensor):
    """Logits that are computed when an operator reads them; `shape`, `dtype` and `device` are known before.

    At stage 3 that gathers the head's weight, so all ranks read them or none does.
    """

    compute: Callable[[], Tensor]
    """Returns the logits, the same tensor each time."""

    __torch_function__ = PLAIN_RESULTS

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # reads nothing
            return _made(args[0].compute, args[0], args[0].shape)
        args, kwargs = map_aggregate((args, kwargs or {}), _read)
        return func(*args, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the logits as an array."""
        return self.compute().numpy(force=force)

    def tolist(self) -> Any:
        """Return the logits as lists."""
        return self.compute().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Say what it is, and compute nothing."""
        return f"UnreadLogits(shape={tuple(self.shape)}, dtype={self.dtype})"


def _read(value: Any) -> Any:
    return value.compute() if isinstance(value, UnreadLogits) else value


def _made(compute: Callable[[], Tensor], like: Tensor, shape: Sequence[int]) -> UnreadLogits:
    made = wrapper(UnreadLogits, like, shape)
    made.compute = compute
    return made
