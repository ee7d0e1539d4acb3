"""What makes two nodes of a captured graph do the same: labels, and what a part of a graph reads and gives.

Layers that are checkpointed with different policies keep different values, and one body would have the memory of one of
them: `choice_text` says which functions choose what a checkpoint keeps.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from torchloom import ops
from torchloom._torch.bodies import (
    CHECKPOINT_POLICY,
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    LOG_USAGE,
    SET_GRAD,
)
from torchloom._torch.modes import is_traced
from torchloom._torch.operators import HigherOrderOperator, OpOverload
from torchloom.bytecode import code_digest
from torchloom.errors import RegionError

PARAMETER_OPS = (ops.gather, ops.replicate, ops.cast)
"""They name their parameter, so no two are equal, and transfers are ordered over all layers."""


def traced_value(node: fx.Node) -> Any:
    """Return the fake value that Dynamo, or a later trace, recorded for a node."""
    return node.meta.get("example_value", node.meta.get("val"))


def is_outside(node: fx.Node) -> bool:
    """Say whether a node stays in the graph.

    What it makes belongs to one layer alone, as a parameter's weight, or to all of them: a size that the first
    layer that needs it computes.
    """
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        return not isinstance(module_of_attr(node), fx.GraphModule)
    if node.op != "call_function":
        return False
    if node.target not in PARAMETER_OPS and not isinstance(traced_value(node), torch.SymInt):
        return False
    return all(is_outside(each) for each in node.all_input_nodes)


_STATEMENTS = (ENTER_AUTOCAST, EXIT_AUTOCAST, SET_GRAD, LOG_USAGE, operator.setitem)
"""What has no value and may stand in a graph whose layers are calls."""


def is_strange(node: fx.Node) -> bool:
    """Say whether nothing is known here of what a node does.

    Functions of users that Dynamo does not look into (`allow_in_graph`) may do something else at each call, or
    share their name with another one. Statements have no value and act on what follows.
    """
    if node.op != "call_function" or node.target in _STATEMENTS:
        return False
    if not _is_known(node.target):
        return True
    return traced_value(node) is None and not node.users


def _is_known(target: Any) -> bool:
    if isinstance(target, (OpOverload, HigherOrderOperator)):
        return True
    room = str(getattr(target, "__module__", None) or "torch").partition(".")[0]
    return room in ("torch", "_operator", "operator", "math", "builtins")


Contexts = tuple[fx.Node, ...]
"""Nodes that entered autocast and have not left it, outermost first."""


def open_contexts(graph: fx.Graph) -> dict[fx.Node, Contexts]:
    """Return for each node the contexts that are open where it stands."""
    found: dict[fx.Node, Contexts] = {}
    now: Contexts = ()
    for node in graph.nodes:
        found[node] = now
        if node.target is ENTER_AUTOCAST:
            now = (*now, node)
        elif node.target is EXIT_AUTOCAST:
            now = tuple(each for each in now if each is not node.args[0])
    return found


def is_weight(node: fx.Node) -> bool:
    """Say whether a node gathers a weight, which backward may gather again."""
    return node.target is ops.gather


def module_of_attr(node: fx.Node) -> Any:
    """Return the attribute of a graph's module that a node reads."""
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found


def value_text(value: Any) -> str:
    """Return all that code which is compiled for a value depends on."""
    if isinstance(value, Tensor):
        strides = list(value.stride()) if value.layout is torch.strided else value.layout
        return (
            f"{value.dtype}{list(value.shape)}{strides}{value.device}{value.requires_grad}{signs_of(value)}"
            f"{type(value).__name__ if type(value).__name__ != 'Parameter' else ''}"
        )
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(value_text(each) for each in value)}]"
    return f"{type(value).__name__} {value}"


Show = Callable[[Any], str]
"""Spells a fake value."""


def label(node: fx.Node, show: Show = value_text) -> str:
    """Return all that a node does, except which values it reads."""
    if node.op == "placeholder":
        return f"placeholder {show(traced_value(node))}"
    if node.op == "get_attr":
        return f"get_attr {_attr_text(module_of_attr(node), show)}"
    what = node.target if isinstance(node.target, str) else _callable_text(node.target)
    args = fx.node.map_arg((node.args, node.kwargs), lambda _: _READ)
    tags = node.meta.get("recompute")
    return f"{node.op} {what} {_text(args)} -> {show(traced_value(node))} {tags}"


def graph_form(graph: fx.Graph, show: Show = value_text) -> str:
    """Return a hash of what a graph computes, whatever its nodes and modules are called.

    Args:
        graph: with values recorded on its nodes.
        show: spells these; serving leaves out how symbols are called.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        inputs: list[int] = []
        fx.node.map_arg((node.args, node.kwargs), lambda used, to=inputs: to.append(place[used]))
        lines.append(f"{label(node, show)} {inputs}")
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _attr_text(value: Any, show: Show) -> str:
    if isinstance(value, fx.GraphModule):
        policy = value.meta.get(CHECKPOINT_POLICY)
        keeps = "" if policy is None else f" keeps what {choice_text(policy)} says"
        return f"graph {graph_form(value.graph, show)}{keeps}"
    if isinstance(value, Tensor) and not is_traced([value]):
        content = hashlib.sha256(str(value.tolist()).encode()).hexdigest()
        return f"constant {show(value)} {content}"
    raise RegionError(f"it holds a constant that is not compared: {show(value)}")


class _Read:
    def __repr__(self) -> str:
        return "%"


_READ: Any = _Read()


def _callable_text(target: Any) -> str:
    name = getattr(target, "__qualname__", None)
    if isinstance(target, OpOverload) or name is None:
        return str(target)
    return f"{getattr(target, '__module__', '')}.{name}"


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{', '.join(_text(each) for each in value)}]"
    if isinstance(value, slice):
        return f"slice[{_text(value.start)}, {_text(value.stop)}, {_text(value.step)}]"
    return f"{type(value).__name__} {value!r}"


def signs_of(value: object) -> str:
    """Return what is still to be done to the numbers in memory, "" if they are those of the tensor."""
    return "conj" * value.is_conj() + "neg" * value.is_neg() if isinstance(value, Tensor) else ""


_PLAIN = (
    enum.Enum,
    bool,
    int,
    float,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    OpOverload,
)


def choice_text(value: Any) -> str:
    """Return text that is equal in every process for functions that do the same with the same values.

    Args:
        value: the `context_fn` of a checkpoint, or something that it holds.

    Raises:
        RegionError: it holds an object of which this is not known.
    """
    try:
        return _choice_text(value)
    except RecursionError:
        raise RegionError(
            "what a checkpoint keeps depends on a function that holds itself"
        ) from None


def _choice_text(value: Any) -> str:
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value}"
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    held = [_choice_text(each) for each in _held(value)]
    if isinstance(value, (set, frozenset)):
        held.sort()
    return f"{_name(value)}[{', '.join(held)}]"


def _name(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__} {code_digest(value.__code__)}"
    return type(value).__name__


def _held(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [*cells, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    raise RegionError(f"what a checkpoint keeps depends on an object of {type(value).__name__}")
