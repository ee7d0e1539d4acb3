"""Generated text without what nobody needs where it runs by itself: imports, kernels' sources, checks.

Inductor writes a module that imports its compiler. Here the statements are kept that `call` needs, torch's own functions
take the places of Inductor's names for them, and text that needs more than that is refused.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import dis
import math
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchloom._torch.generated import check_layout
from torchloom.bytecode import nested


def _assert_tensor_metadata(
    tensor: Tensor | None, sizes: Any, strides: Any, dtype: torch.dtype, op_name: str | None = None
) -> None:
    """Check what an operator returned, as a function of Inductor's runtime does since torch 2.14."""
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise RuntimeError(
            f"{op_name or 'an operator'} returned {tensor.dtype} where its fake said {dtype}: "
            "torchloom.custom_ops.check_op finds such mistakes"
        )
    check_layout(tensor, sizes, strides, op_name)


GIVEN: Mapping[str, Any] = {
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


def reduced(
    text: str, scope: Mapping[str, Any], constants: Iterable[str], known_inputs: Collection[int]
) -> tuple[str, dict[str, bytes]]:
    """Return what of a generated text defines `call`, and the shared objects of its kernels.

    Args:
        text: the module that Inductor wrote.
        scope: the globals of that module.
        constants: names that stand for tensors.
        known_inputs: places of inputs whose sizes and strides need no comparison.

    Raises:
        NotPlainError: it needs more than this.
    """
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
    known = {*GIVEN, *kernels, *given, *dir(builtins)}
    known |= {name for statement in kept for name in _defined(statement)}
    unknown = sorted(names_in(source) - known)
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

    `assert_size_stride(arg1_1, (8,), (1,), 'input')`. Calls that compare several tensors, since torch 2.15, stay.
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
        return node


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


def names_in(source: str) -> set[str]:
    """Return the global names that a text looks up."""
    return _loaded(compile(source, "<torchloom graph>", "exec"))


def _loaded(code: types.CodeType) -> set[str]:
    """Return the global names that code looks up."""
    return {
        instruction.argval
        for each in nested(code)
        for instruction in dis.get_instructions(each)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
