"""Reading Dynamo's state: entries, guards, what is being compiled. Changes nothing.

Guards are objects of C++ whose methods are asked by name: what a torch lacks is answered with "nothing known".
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch

from torchloom import qualnames


def innermost(fn: Any) -> Any:
    """Return the function that torch.compile was given."""
    from torch._dynamo.eval_frame import OptimizedModule, innermost_fn

    if isinstance(fn, OptimizedModule):
        fn = fn._orig_mod
    return innermost_fn(fn)


def compiled_call_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return what `Module.compile` or torchloom put in place of a module's call."""
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(module, OptimizedModule):
        # A module of torch.nn is called through a function of Dynamo's own, which holds the entries.
        inner = innermost(module.forward)
        return inner if getattr(inner, "__name__", "") == "inner" else None
    call = getattr(module, "_compiled_call_impl", None)
    return getattr(call, "__torchloom_compiled__", call)


def original_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that torch.compile(module) wrapped, or the module itself."""
    return getattr(module, "_orig_mod", module)


def place_of(code: CodeType) -> tuple[str, int]:
    """Return the file and line of what a code object runs.

    What torchloom puts in front of a module carries the place of the module's forward.
    """
    forward = _forward_of(code)
    return (code.co_filename, code.co_firstlineno) if forward is None else forward[1:3]


def forward_arguments(code: CodeType) -> tuple[str, ...] | None:
    """Return the arguments of the module's forward behind `self`, None for other code than torchloom's own."""
    forward = _forward_of(code)
    return None if forward is None else forward[3]


def _forward_of(code: CodeType) -> tuple[str, str, int, tuple[str, ...]] | None:
    for constant in code.co_consts:
        # Dynamo puts any object of the program among the constants: ask nothing of those.
        is_text = type(constant) is tuple and len(constant) == 4 and type(constant[0]) is str
        if is_text and constant[0] == FORWARD_PLACE:
            return constant
    return None


def qualname_of(code: CodeType) -> str:
    """Return the qualified name of a code object."""
    found = qualnames.qualname_of(code)
    # What torchloom puts in front of a module is renamed, and keeps its own qualified name.
    return found if found.rpartition(".")[2] == code.co_name else code.co_name


def is_invalid(manager: Any) -> bool:
    """Return whether an entry's guards can never hold again: something that they look at is gone."""
    return isinstance(getattr(manager, "invalidation_reason", None), str)


FORWARD_PLACE = "torchloom: the place of forward"
"""Marks the constant that `place_of` reads."""


class CacheEntry(NamedTuple):
    """What one of Dynamo's entries holds.

    Dynamo's own object is a reference into memory that `torch._dynamo.reset()` frees: reading it after
    that ends the process. Its fields are Python objects, which stay whole.
    """

    code: CodeType
    compile_id: Any
    guard_manager: Any
    backend: Any
    region: int
    """Number of `torch.compile(isolate_recompiles=True)`; -1 where entries are shared."""


def cache_entries(code: CodeType) -> list[CacheEntry]:
    """Return Dynamo's entries for a code object, the one used last in front."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return [
        CacheEntry(
            raw.code,
            raw.compile_id,
            raw.guard_manager,
            raw.backend,
            getattr(raw, "isolate_recompiles_id", -1),
        )
        for raw in _debug_get_cache_entry_list(code)
    ]


def backend_name(entry: Any) -> str:
    """Return the name of what compiled an entry.

    torch calls a backend that has no name by its printed form, which may show anything: such a one is
    called by its class, or by the function that a partial calls.
    """
    backend = getattr(entry, "backend", None)
    while backend is not None:
        name = getattr(backend, "compiler_name", None)
        if isinstance(name, str) and (name in _registered() or name == _name_of(backend)):
            return name
        inner = getattr(backend, "compiler_fn", None) or getattr(
            backend, "_torchdynamo_orig_backend", None
        )
        if inner is None or inner is backend:
            break
        backend = inner
    while isinstance(backend, functools.partial):
        backend = backend.func
    return _name_of(backend) or type(backend).__name__


def _name_of(backend: Any) -> str | None:
    """Return the name that a backend has itself."""
    found = [vars(each).get("compiler_name") for each in type(backend).__mro__]
    name = next((each for each in found if isinstance(each, str)), None)
    name = getattr(backend, "__name__", None) if name is None else name
    return name if isinstance(name, str) else None


def _registered() -> Collection[str]:
    """Return the names under which backends are known to torch.compile."""
    from torch._dynamo.backends import registry

    return {*getattr(registry, "_BACKENDS", ()), *getattr(registry, "_COMPILER_FNS", ())}


def recompile_limit() -> int:
    """Return how many entries Dynamo makes for a function before it runs the function eagerly."""
    from torch._dynamo import config

    return int(config.recompile_limit)


def guard_leaves(manager: Any) -> Iterator[tuple[str, str, list[str], int]]:
    """Yield (source, kind, code parts, fails) of each leaf check below a guard manager."""
    root = getattr(manager, "root", None)
    if root is None:
        return
    yield from _leaves(root)
    for leaf in _call(root, "get_epilogue_lambda_guards", []):
        yield "", type(leaf).__name__, list(leaf.verbose_code_parts()), 0


def _leaves(manager: Any) -> Iterator[tuple[str, str, list[str], int]]:
    children = list(_call(manager, "get_child_managers", []))
    if hasattr(manager, "get_key_value_managers"):
        pairs = manager.get_key_value_managers().values()
        children += [each for pair in pairs for each in pair if each is not None]
    # A manager counts what failed below it as well.
    below = sum(int(_call(child, "fail_count", 0)) for child in children)
    fails = max(0, int(_call(manager, "fail_count", 0)) - below)
    source = _call(manager, "get_source", "")
    leaves = _call(manager, "get_leaf_guards", [])
    kinds = [type(leaf).__name__ for leaf in leaves]
    blamed = kinds.index("TENSOR_MATCH") if "TENSOR_MATCH" in kinds else 0
    for index, leaf in enumerate(leaves):
        own = fails if index == blamed else 0
        yield source, kinds[index], list(leaf.verbose_code_parts()), own
    for child in children:
        yield from _leaves(child)
    yield from _reached(manager)


def _reached(manager: Any) -> Iterator[tuple[str, str, list[str], int]]:
    """Yield the attributes that a check goes to and asks nothing of: that they are there is what it asks.

    That is how Dynamo keeps a `hasattr` that found something.
    """
    source = _call(manager, "get_source", "")
    ways, children = _call(manager, "get_accessors", []), _call(manager, "get_child_managers", [])
    for way, child in zip(ways, children, strict=False):
        if _call(child, "get_leaf_guards", [1]) or _call(child, "get_child_managers", [1]):
            continue
        fails, text = int(_call(child, "fail_count", 0)), str(_call(way, "repr", ""))
        owner = source.removesuffix(".__dict__")
        if found := _TO_ATTRIBUTE.fullmatch(text):
            yield source, "HASATTR", [f"hasattr({source}, {found[1]!r})"], fails
        elif (found := _TO_KEY.fullmatch(text)) and owner != source:
            yield owner, "HASATTR", [f"hasattr({owner}, {found[1]})"], fails
        elif found:
            yield source, "DICT_CONTAINS", [f"___dict_contains({found[1]}, {source})"], fails


_TO_ATTRIBUTE = re.compile(r"(?:Get|GenericGet)AttrGuardAccessor\((\w+)\)")
_TO_KEY = re.compile(r"DictGetItemGuardAccessor\((.+)\)", re.DOTALL)


def _call(value: Any, name: str, default: Any) -> Any:
    method = getattr(value, name, None)
    try:
        return default if method is None else method()
    except (RuntimeError, TypeError):
        return default


def guard_failure(entry: Any, values: Mapping[str, Any]) -> str | None:
    """Return the first check of an entry that fails for these locals, None if all hold."""
    from torch._dynamo import guards

    checked = entry.guard_manager.check_verbose(dict(values))
    if checked.result:
        return None
    try:
        text = guards.get_guard_fail_reason_helper(
            entry.guard_manager, dict(values), entry.compile_id, entry.backend
        )
    except Exception:  # noqa: BLE001  guards run code of the program's; the parts say nearly the same
        text = ""
    text = text.partition(": ")[2] if text.startswith(f"{entry.compile_id}: ") else text
    return text.strip() or (checked.verbose_code_parts or ["a guard fails"])[0]


def continuation_code(value: Any) -> CodeType | None:
    """Return the code of what Dynamo keeps under the global name of a continuation.

    That is the function itself. Of code with free variables it is a function that makes it, with the code
    in its own closure, or the code alone in torch 2.11.
    """
    if isinstance(value, CodeType):
        return value
    if not isinstance(value, FunctionType):
        return None
    code = value.__code__
    if code.co_name != "_make_fn" or "code" not in code.co_freevars:
        return code
    made = (value.__closure__ or ())[code.co_freevars.index("code")].cell_contents
    return made if isinstance(made, CodeType) else code


def current_compile_id() -> str | None:
    """Return the id of the compile that this thread is in."""
    from torch._guards import CompileContext

    found = CompileContext.current_compile_id()
    return None if found is None else str(found)


def interned_files() -> dict[int, str]:
    """Return the file names that trace records name by number."""
    from torch._logging.structured import INTERN_TABLE

    return {number: path for path, number in INTERN_TABLE.items()}


def config_changes() -> dict[str, list[str]]:
    """Return the settings of Dynamo, AOTAutograd and Inductor that are not at their defaults."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    modules: dict[str, Any] = {"dynamo": dynamo, "functorch": functorch}
    if "torch._inductor.config" in sys.modules:
        modules["inductor"] = sys.modules["torch._inductor.config"]
    found: dict[str, list[str]] = {}
    for name, module in modules.items():
        try:
            lines = module.codegen_config().splitlines()
        except (AttributeError, TypeError):
            continue
        named = [line.rpartition("config.")[2] for line in lines if line.strip()]
        kept = [line for line in named if not _is_default(module, line.partition(" = ")[0])]
        if kept:
            found[name] = kept
    return found


def _is_default(module: Any, name: str) -> bool:
    """Say whether a setting that was assigned holds its default again, as after a `patch`."""
    known = getattr(module, "_config", {}).get(name)
    found = operator.attrgetter(name)(module) if known is not None else None
    return known is not None and bool(known.default == found)


@functools.cache
def graph_break_registry() -> dict[str, dict[str, Any]]:
    """Return upstream's words on each sort of graph break: by its title, with its id."""
    try:
        text = importlib.resources.files("torch._dynamo").joinpath("graph_break_registry.json")
        data = json.loads(text.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for number, versions in data.items():
        for each in versions:
            found.setdefault(str(each.get("Gb_type", "")), {"id": number, **each})
    return found
