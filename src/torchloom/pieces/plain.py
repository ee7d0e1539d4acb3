"""What Inductor generated, run by itself: kernels and torch's operators, no compiler stack.

A graph that only computes needs nothing of what `torch.compile` puts around it at run time: no wrapper for
gradients, no aliases to restore, no module of Inductor. Its generated text is taken apart once, when it is
built, and what remains runs in any process that has torch: a call costs less, and loading does not import
the compiler (1.4 s). Graphs that need more than that are run the way torch runs them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from torchloom._torch.generated import tell_kernels
from torchloom._torch.standalone import generated_code
from torchloom.pieces.reduced import GIVEN, NotPlainError, names_in, reduced
from torchloom.pieces.views import result_texts


@contextmanager
def as_library(content: bytes) -> Iterator[str]:
    """Let bytes be a shared object in a folder that no other user can enter; yield its path.

    Each has a folder of its own: the dynamic loader takes an object that it knows by the same path for the same object.
    """
    with tempfile.TemporaryDirectory(prefix="torchloom-") as folder:
        path = Path(folder, "loaded.so")
        path.write_bytes(content)
        yield str(path)


Call = Callable[..., Any]


@dataclass(frozen=True)
class PlainGraph:
    """A compiled graph as text and what the text refers to."""

    source: str
    """Defines `call`, which takes a list, empties it, and returns a tuple."""
    kernels: Mapping[str, bytes]
    """The shared object of each kernel that the text calls."""
    returned: tuple[str, ...] | None = None
    """The Python of each result, as `result_texts` writes it."""
    written: tuple[int, ...] = ()
    """Inputs that are written to, whose versions count up as with any operator."""
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that the text refers to."""
    with_grad: bool = False
    """Whether calls come with gradients enabled: what is generated relies on their being off."""


def plain_graph(
    graph_module: fx.GraphModule, compiled: Call, known: Collection[int] = ()
) -> PlainGraph:
    """Take apart what Inductor made of a graph, in the process that made it.

    Args:
        graph_module: the graph.
        compiled: what `torch._inductor.standalone_compile(aot=True)` calls.
        known: places of inputs whose sizes and strides need no comparison.

    Raises:
        NotPlainError: the graph needs torch's own way to run.
    """
    try:
        made = generated_code(compiled)
        if made.needs:
            raise NotPlainError(made.needs)
        source, kernels = reduced(made.text, made.scope, made.constants, known)
        returned = result_texts(graph_module, made.returned)
    except NotPlainError:
        raise
    except (AttributeError, KeyError, TypeError, SyntaxError) as error:
        raise NotPlainError(f"it is not of a form that is known: {error}") from error
    constants = {name: value for name, value in made.constants.items() if name in names_in(source)}
    if any(type(value) is not Tensor for value in constants.values()):
        raise NotPlainError("it holds constants that are no plain tensors")
    return PlainGraph(source, kernels, returned, made.written, constants, torch.is_grad_enabled())


def run_plain(graph: PlainGraph) -> Call:
    """Return a function of a graph's inputs that returns a list or tuple of its results.

    The function has an attribute `boxed`: the same, for a list of the inputs, which it empties.

    Raises:
        LookupError: a kernel's shared object cannot be loaded.
    """
    scope: dict[str, Any] = {**GIVEN, **graph.constants}
    scope |= {name: _kernel(content) for name, content in graph.kernels.items()}
    exec(compile(graph.source, "<torchloom graph>", "exec"), scope)
    boxed = _wrapped(graph, scope["call"])

    def call(*inputs: Any) -> Any:
        return boxed(list(inputs))

    call.boxed = boxed  # type: ignore[attr-defined]
    return call


def _wrapped(graph: PlainGraph, call: Call) -> Call:
    """Return what does around a call that which its text does not."""
    if not (graph.returned or graph.written or graph.with_grad):
        return call
    lines = ["def boxed(args):"]
    if graph.written:
        lines.append(f"    count_up([{', '.join(f'args[{place}]' for place in graph.written)}])")
    result = f"({''.join(f'{each}, ' for each in graph.returned)})" if graph.returned else "out"
    kept = sorted(set(re.findall(r"\ba(\d+)\b", result)), key=int)
    lines += [f"    a{place} = args[{place}]" for place in kept]
    if graph.with_grad:
        lines += ["    with no_grad():", "        out = call(args)"]
    else:
        lines.append("    out = call(args)")
    lines.append(f"    return {result}")
    scope = {
        **GIVEN,
        "call": call,
        "no_grad": torch.no_grad,
        "count_up": torch.autograd.graph.increment_version,
    }
    exec(compile("\n".join(lines), "<torchloom graph>", "exec"), scope)
    return scope["boxed"]


def _kernel(content: bytes) -> Call:
    """Return the function of a shared object, as Inductor loads it.

    Raises:
        LookupError: it cannot be loaded.
    """
    name = f"torchloom_{hashlib.sha256(content).hexdigest()[:32]}.kernel"
    if name not in sys.modules:
        tell_kernels()
        try:
            with as_library(content) as path:
                loader = ExtensionFileLoader(name, path)
                spec = importlib.util.spec_from_file_location(name, path, loader=loader)
                assert spec is not None, "given with its loader"
                module = importlib.util.module_from_spec(spec)
                loader.exec_module(module)
        except (ImportError, OSError) as error:
            raise LookupError(f"a shared object cannot be loaded: {error}") from error
        sys.modules[name] = module
    return sys.modules[name].kernel
