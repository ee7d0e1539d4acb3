"""What Inductor generated, run by itself: kernels and torch's operators, no compiler stack (2.11-2.15).

A graph that only computes needs nothing of what `torch.compile` puts around it at run time: no wrapper for
gradients, no aliases to restore, no module of Inductor. Its generated text is taken apart once, when it is
built, and what remains runs in any process that has torch: a call costs less, and loading does not import
the compiler (1.4 s). Graphs that need more than that are run the way torch runs them.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import dis
import hashlib
import importlib.util
import math
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchloom._torch.libraries import in_memory

Call = Callable[..., Any]


def _assert_tensor_metadata(
    tensor: Tensor | None, sizes: Any, strides: Any, dtype: torch.dtype, op_name: str | None = None
) -> None:
    """Check what an operator returned, as a function of Inductor's runtime does (2.14, 2.15)."""
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise RuntimeError(
            f"{op_name or 'an operator'} returned {tensor.dtype} where its fake said {dtype}: "
            "torchloom.custom_ops.check_op finds such mistakes"
        )
    torch._C._dynamo.guards.assert_size_stride(tensor, sizes, strides, op_name)  # type: ignore[attr-defined]


_GIVEN: Mapping[str, Any] = {
    "torch": torch,
    "device": torch.device,
    "empty_strided": torch.empty_strided,
    "math": math,
    "inf": math.inf,
    "nan": math.nan,
    "nanj": complex(0, math.nan),
    "c_void_p": ctypes.c_void_p,
    "c_long": ctypes.c_long,
    "c_int": ctypes.c_int,
    "assert_tensor_metadata": _assert_tensor_metadata,
}
"""Names that generated text imports and may need, as its own imports define them."""
_PUBLIC_OPS = frozenset({"_alloc_from_pool", "_reinterpret_tensor"})
"""Operators of `torch.ops.inductor` that torch itself defines, and not one of Inductor's modules."""
_MADE_BY_MODULES = frozenset(
    {"prims", "rngprims", "higher_order", "_quantized", "quantized_decomposed"}
)
"""Namespaces of operators that modules define which nothing may have imported."""


class NotPlainError(Exception):
    """A graph needs more than its generated text; the text says what."""


@dataclass(frozen=True)
class PlainGraph:
    """A compiled graph as text and what the text refers to."""

    source: str
    """Defines `call`, which takes a list, empties it, and returns a tuple."""
    kernels: Mapping[str, bytes]
    """The shared object of each kernel that the text calls."""
    returned: tuple[int | None, ...] | None = None
    """For each result, which input it is, None for one that was computed; None if all were."""
    written: tuple[int, ...] = ()
    """Inputs that are written to, whose versions count up as with any operator."""
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors that the text refers to."""
    with_grad: bool = False
    """Whether calls come with gradients enabled: what is generated relies on their being off."""


def plain_graph(compiled: Call, known: Collection[int] = ()) -> PlainGraph:
    """Take apart what Inductor made of a graph, in the process that made it.

    Args:
        compiled: what `torch._inductor.standalone_compile(aot=True)` calls.
        known: places of inputs whose sizes and strides need no comparison.

    Raises:
        NotPlainError: the graph needs torch's own way to run.
    """
    try:
        result = compiled.serialize()  # type: ignore[attr-defined]
        graph = result.compiled_fw.result
        returned, written = _around(result)
        scope = compiled.current_callable.__func__.__globals__  # type: ignore[attr-defined]
        if graph.constants is None or graph.frozen_param_names or graph.torchbind_constants:
            raise NotPlainError("it holds constants that are no plain tensors")
        source, kernels = _reduced(graph.source_code, scope, graph.constants, known)
    except NotPlainError:
        raise
    except (AttributeError, KeyError, TypeError, SyntaxError) as error:
        raise NotPlainError(f"it is not of a form that is known: {error}") from error
    constants = {name: value for name, value in graph.constants.items() if name in _names(source)}
    if any(type(value) is not Tensor for value in constants.values()):
        raise NotPlainError("it holds constants that are no plain tensors")
    return PlainGraph(source, kernels, returned, written, constants, torch.is_grad_enabled())


def run_plain(graph: PlainGraph) -> Call:
    """Return a function of a graph's inputs that returns a list or tuple of its results.

    The function has an attribute `boxed`: the same, for a list of the inputs, which it empties.

    Raises:
        LookupError: a kernel's shared object cannot be loaded.
    """
    scope: dict[str, Any] = {**_GIVEN, **graph.constants}
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
    kept = sorted({place for place in graph.returned or () if place is not None})
    lines += [f"    a{place} = args[{place}]" for place in kept]
    if graph.with_grad:
        lines += ["    with no_grad():", "        out = call(args)"]
    else:
        lines.append("    out = call(args)")
    if graph.returned:
        parts = [
            f"out[{number}]" if place is None else f"a{place}"
            for number, place in enumerate(graph.returned)
        ]
        lines.append(f"    return ({''.join(f'{part}, ' for part in parts)})")
    else:
        lines.append("    return out")
    scope = {
        "call": call,
        "no_grad": torch.no_grad,
        "count_up": torch.autograd.graph.increment_version,
    }
    exec(compile("\n".join(lines), "<torchloom graph>", "exec"), scope)
    return scope["boxed"]


def _around(result: Any) -> tuple[tuple[int | None, ...] | None, tuple[int, ...]]:
    """Return which inputs are returned and written to.

    Raises:
        NotPlainError: torch's wrappers have more to do than that.
    """
    from torch._functorch._aot_autograd.schemas import OutputType

    meta = result.runtime_metadata
    reasons = {
        "it computes gradients": result.compiled_bw is not None,
        "it takes tensor subclasses": result.maybe_subclass_meta is not None,
        "it draws random numbers by torch's functional way": meta.is_rng_op_functionalized,
        "it has effects that are ordered by tokens": bool(meta.tokens),
        "it changes the gradient mode": meta.grad_enabled_mutation is not None,
        "its inputs are changed after it ran": meta.num_mutated_inp_runtime_indices > 0,
        "its inputs share memory": any(w.needs_post_compile for w in result.dispatch_wrappers),
        "autocast is on": torch._C._is_any_autocast_enabled(),
        "its results share memory": meta.num_intermediate_bases > 0,
        "inputs have to be realigned": bool(result.compiled_fw.result.inputs_to_check),
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotPlainError(reason)
    computed = {
        OutputType.non_alias,
        OutputType.unsafe_view_alias,
        OutputType.custom_function_view,
    }
    returned: list[int | None] = []
    for output in meta.output_info:
        if output.output_type in computed:
            returned.append(None)
        elif output.output_type is OutputType.is_input:
            returned.append(output.base_idx)
        else:
            raise NotPlainError(f"a result is a view ({output.output_type.name})")
    written = tuple(meta.mutated_graph_handled_indices_seen_by_autograd)
    return (tuple(returned) if any(p is not None for p in returned) else None), written


def _reduced(
    text: str, scope: Mapping[str, Any], constants: Iterable[str], known_inputs: Collection[int]
) -> tuple[str, dict[str, bytes]]:
    """Return what of a generated text defines `call`, and the shared objects of its kernels."""
    body = ast.parse(text).body
    given = set(constants)
    kernels: dict[str, bytes] = {}
    kept: list[ast.stmt] = []
    wanted = {"call"}
    for statement in reversed(body):
        defined = _defined(statement)
        if not defined & wanted or defined & given:
            continue  # the text says None for tensors that Inductor puts there itself
        if _is_kernel(statement):
            kernels |= {name: _library(scope[name]).read_bytes() for name in defined}
            continue
        statement = _Unasserted(known_inputs).visit(_ExternKernels(scope).visit(statement))
        kept.append(statement)
        wanted |= _loaded(compile(ast.Module([statement], []), "", "exec"))
    kept.reverse()
    source = ast.unparse(ast.Module(kept, [])) + "\n"
    _check(kept)
    known = {*_GIVEN, *kernels, *given, *dir(builtins)}
    known |= {name for statement in kept for name in _defined(statement)}
    unknown = sorted(_names(source) - known)
    if unknown:
        raise NotPlainError(f"its text needs {', '.join(unknown)}")
    return source, kernels


class _ExternKernels(ast.NodeTransformer):
    """Writes torch's own functions where Inductor has names for them.

    `extern_kernels.mm` is `torch.mm`, for those names of which that is so.
    """

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self._scope = scope

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not (isinstance(node.value, ast.Name) and node.value.id == "extern_kernels"):
            return self.generic_visit(node)
        kernel = getattr(self._scope["extern_kernels"], node.attr)
        if kernel is not getattr(torch, node.attr, None):
            raise NotPlainError(f"it calls Inductor's own {node.attr}")
        module = ast.copy_location(ast.Name("torch", ast.Load()), node.value)
        return ast.copy_location(ast.Attribute(module, node.attr, node.ctx), node)


class _Unasserted(ast.NodeTransformer):
    """Leaves out comparisons of inputs that are known to be what they were.

    `assert_size_stride(arg1_1, (8,), (1,), 'input')`, and of several in one call since torch 2.15.
    """

    def __init__(self, known: Collection[int]) -> None:
        self._known = known
        self._names: set[str] = set()

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        match node:
            case ast.Assign([ast.Tuple(names)], ast.Name("args")):
                self._names |= {
                    name.id
                    for place, name in enumerate(names)
                    if place in self._known and isinstance(name, ast.Name)
                }
            case ast.Assign([ast.Name(name)], ast.Subscript(ast.Name("args"), ast.Constant(place))):
                self._names |= {name} if place in self._known else set()
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        match node.value:
            case ast.Call(ast.Name("assert_size_stride"), [ast.Name(name), *_]):
                return None if name in self._names else node
            case ast.Call(ast.Name("assert_size_stride_grouped") as function, args):
                return self._fewer(node, function, args)
        return node

    def _fewer(self, node: ast.Expr, function: ast.Name, args: list[ast.expr]) -> ast.AST | None:
        lists = [each.elts for each in args[:3] if isinstance(each, ast.Tuple)]
        if len(lists) != 3 or len(set(map(len, lists))) != 1:
            return node
        rows = [
            row
            for row in zip(*lists, strict=True)
            if not (isinstance(row[0], ast.Name) and row[0].id in self._names)
        ]
        if not rows:
            return None
        kept = [ast.Tuple(list(column), ast.Load()) for column in zip(*rows, strict=True)]
        call = ast.Call(function, [*kept, *args[3:]], [])
        return ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node))


def _is_kernel(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(value=ast.Call(func=ast.Attribute(ast.Name("async_compile"), name))):
            if name != "cpp_pybinding":
                raise NotPlainError(f"it has kernels of another kind ({name})")
            return True
    return False


def _library(kernel: Any) -> Path:
    """Return the shared object that a kernel is a function of."""
    library = getattr(kernel, "__self__", None)
    path = getattr(library, "__file__", None)
    if not isinstance(library, types.ModuleType) or path is None:
        raise NotPlainError("a kernel is no function of a shared object")
    return Path(path)


def _check(statements: Sequence[ast.stmt]) -> None:
    """Refuse text that reaches into modules which nothing has imported.

    Raises:
        NotPlainError: it does.
    """
    for statement in statements:
        for node in ast.walk(statement):
            match node:
                case ast.Import() | ast.ImportFrom():
                    raise NotPlainError("it imports modules while it runs")
                case ast.Attribute(ast.Name("torch"), name) if name.startswith(
                    "_"
                ) and name not in ("_C", "_mkldnn"):
                    raise NotPlainError(f"it uses torch.{name}")
                case ast.Attribute(ast.Attribute(ast.Name("torch"), "ops"), name) if (
                    name in _MADE_BY_MODULES
                ):
                    raise NotPlainError(f"it uses operators of {name}")
                case ast.Attribute(
                    ast.Name("inductor_ops")
                    | ast.Attribute(ast.Attribute(ast.Name("torch"), "ops"), "inductor"),
                    name,
                ) if name not in _PUBLIC_OPS:
                    raise NotPlainError(f"it uses Inductor's operator {name}")


def _defined(statement: ast.stmt) -> set[str]:
    """Return the names that a statement at the top defines."""
    match statement:
        case ast.FunctionDef(name) | ast.ClassDef(name):
            return {name}
        case ast.Assign(targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
    return set()


def _names(source: str) -> set[str]:
    return _loaded(compile(source, "<torchloom graph>", "exec"))


def _loaded(code: types.CodeType) -> set[str]:
    """Return the global names that code looks up."""
    return {
        instruction.argval
        for each in _codes(code)
        for instruction in dis.get_instructions(each)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _kernel(content: bytes) -> Call:
    """Return the function of a shared object, as Inductor loads it.

    Raises:
        LookupError: it cannot be loaded.
    """
    name = f"torchloom_{hashlib.sha256(content).hexdigest()[:32]}.kernel"
    if name not in sys.modules:
        # The object asks for this when it is first loaded: how it finds the memory of a tensor.
        pointer = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
        os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(pointer)
        try:
            with in_memory(content) as path:
                loader = ExtensionFileLoader(name, path)
                spec = importlib.util.spec_from_file_location(name, path, loader=loader)
                assert spec is not None, "given with its loader"
                module = importlib.util.module_from_spec(spec)
                loader.exec_module(module)
        except (ImportError, OSError) as error:
            raise LookupError(f"a shared object cannot be loaded: {error}") from error
        sys.modules[name] = module
    return sys.modules[name].kernel
