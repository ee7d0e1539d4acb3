"""What an operator looks like to a compiler: its schema, and the Python that stands for it during a trace.

What runs in its place when a program is called is looked up by that call, and is no part of this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload, OpOverloadPacket

_TORCHS = frozenset({"aten", "prim", "prims", "higher_order"})
_OF_A_DEFINITION = ("_abstract_fn", "_backward_fn", "_setup_context_fn", "_vmap_fn")
Operator = OpOverload | OpOverloadPacket


def operators_in(graph_module: fx.GraphModule) -> list[str]:
    """Return the names of operators that are not torch's own, such as "mylib::scale"."""
    found = {
        str(packet._qualified_op_name)
        for module in graph_module.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        for target in (node.target, *node.args)
        if isinstance(target, (OpOverload, OpOverloadPacket))
        for packet in [_packet(target)]
    }
    return sorted(name for name in found if name.partition("::")[0] not in _TORCHS)


def schemas_of(operator: Operator) -> list[str]:
    """Return schemas and tags of all overloads."""
    packet = _packet(operator)
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [f"{each._schema} {sorted(map(str, each.tags))}" for each in overloads]


def traced_functions(operator: Operator) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions that stand for an operator during a trace, with what each is."""
    packet = _packet(operator)
    name = str(packet._qualified_op_name)
    defined = getattr(_module("torch._library.custom_ops"), "OPDEFS", {}).get(name)
    for kind in _OF_A_DEFINITION:
        if (function := getattr(defined, kind, None)) is not None:
            yield kind, function
    registry = getattr(_module("torch._library.simple_registry"), "singleton", None)
    entry = getattr(registry, "_data", {}).get(name)  # `find` would make one, and 2.12 has no `get`
    fake = getattr(entry, "fake_impl", None)
    kernels = [*getattr(fake, "kernels", ()), getattr(fake, "kernel", None)]  # several since 2.13
    for kernel in kernels:
        if (function := getattr(kernel, "func", None)) is not None:
            yield "fake", function
    rules = getattr(getattr(entry, "torch_dispatch_rules", None), "_data", {})
    for kind, function in [*rules.items(), *getattr(defined, "_torch_dispatch_fns", {}).items()]:
        yield f"for {kind.__qualname__}", function
    table = getattr(_module("torch._decomp"), "decomposition_table", {})
    for overload in packet.overloads():
        each = getattr(packet, overload)
        if each in table:
            yield f"decomposition of {overload}", table[each]
        for key, kernel in each.py_kernels.items():
            if callable(kernel):
                yield f"{overload} for {key}", kernel


def _packet(operator: Operator) -> Any:
    return operator.overloadpacket if isinstance(operator, OpOverload) else operator


def _module(name: str) -> Any:
    """Return a module of torch's if it was imported: whoever registers something with it imports it."""
    return sys.modules.get(name)


def is_random(node: fx.Node) -> bool:
    """Say whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def keep_calls(overload: Any) -> None:
    """Let compilers keep each call of an operator, in order, though it returns nothing."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    _register_effectful_op(overload, _EffectType.ORDERED)


def has_autograd_kernel(overload: Any) -> bool:
    """Return whether an operator has a backward of its own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "Autograd")
