"""torch's own stored forms: of graphs, and of the bytecode that Dynamo writes."""

from __future__ import annotations

import io
import types
from typing import Any

from torch import fx

from torchloom._torch.shapes import new_shape_env


def graph_to_bytes(graph_module: fx.GraphModule) -> bytes:
    """Return a graph with its operators, tensors and symbols as bytes."""
    from torch.fx._graph_pickler import GraphPickler, Options

    return GraphPickler.dumps(graph_module, Options(ops_filter=None))


def graph_from_bytes(content: bytes) -> fx.GraphModule:
    """Return what `graph_to_bytes` stored; this runs its content."""
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler

    graph_module: Any = GraphPickler.loads(content, FakeTensorMode(shape_env=new_shape_env()))
    graph_module.recompile()
    return graph_module


def is_made_by_dynamo(target: object) -> bool:
    """Return whether a function of a graph was made by Dynamo for this process, such as those for NumPy's."""
    return type(target).__module__.startswith("torch._dynamo")


def code_to_bytes(code: types.CodeType, rest: tuple[Any, ...]) -> tuple[bytes, list[str]]:
    """Return Dynamo's bytecode and objects that it refers to as bytes, and the kinds of what cannot be stored.

    Raises:
        Exception: whatever pickling an object raises.
    """
    from torch._dynamo.aot_compile import AOTCompilePickler
    from torch._dynamo.package import SerializedCode

    buffer = io.BytesIO()
    pickler = AOTCompilePickler({}, buffer)
    pickler.dump((SerializedCode.from_code_object(code), *rest))
    kinds = sorted({type(each).__name__ for each in pickler.errors.values()})
    return buffer.getvalue(), kinds


def code_from_bytes(content: bytes) -> tuple[types.CodeType, list[Any]]:
    """Return what `code_to_bytes` stored; this runs its content."""
    from torch._dynamo.aot_compile import AOTCompileUnpickler
    from torch._dynamo.package import SerializedCode

    code, *rest = AOTCompileUnpickler({}, io.BytesIO(content)).load()
    return SerializedCode.to_code_object(code), rest
