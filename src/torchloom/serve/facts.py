"""What a trace read besides its tensors: constants, attributes, functions, source code.

A compiler would look at all of it at each call. Here it is written down once, in words that can be stored and
compared: `self.norm.eps` was 1e-05, `model.py` defined `Block.forward` so. Looking a fact up evaluates nothing:
it follows steps of a few kinds (`_torch.places`).
"""

from __future__ import annotations

import ast
import enum
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchloom._torch.places import NoPlaceError, place_of, value_at

_MOST_ITEMS = 64
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_STEP = re.compile(r"\.?_(?:modules|parameters|buffers)\['([^']+)'\]")


Facts = Mapping[str, Mapping[str, Any]]
"""What was found, by a name for people: `{"place": [["argument", "self"], ...], "was": "1e-05"}`."""


def facts_of(
    sources: Iterable[str],
    scope: Mapping[str, Any],
    varying: Iterable[str],
    rest: str | None = None,
    modules: Mapping[str, str] | None = None,
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return what each source stood for, in words, and those that cannot be written down.

    Args:
        sources: expressions over `L` and `G`.
        scope: their values.
        varying: arguments that may differ from call to call.
        rest: the name under which a function holds further keyword arguments.
        modules: what the trace called modules among the globals.
    """
    names = list(varying)
    skipped = tuple(f"L['{name}']" for name in names)
    skipped += tuple(f"L['{rest}']['{name}']" for name in names if rest)
    found: dict[str, dict[str, Any]] = {}
    unwritten = []
    for source in sources:
        if source.startswith(skipped):
            continue
        try:
            place = place_of(source, modules or {})
        except NoPlaceError:
            unwritten.append(readable(source))
            continue
        if place is None:
            continue
        try:
            found[source] = {"place": place, "was": words_for(value_at(place, scope))}
        except Exception:  # noqa: BLE001 - what does not exist cannot be looked up later either
            continue
    return found, unwritten


def changed_facts(facts: Facts, scope: Mapping[str, Any]) -> list[str]:
    """Say which facts no longer hold, one line each."""
    lines = []
    for source, fact in facts.items():
        try:
            now = words_for(value_at(fact["place"], scope))
        except Exception as error:  # noqa: BLE001 - attributes may raise anything
            now = f"gone ({type(error).__name__})"
        if now != fact["was"]:
            lines.append(f"{readable(source)} was {fact['was']}, is {now}")
    return lines


def readable(source: str) -> str:
    """Return a source as a user would write it.

    Example:
        >>> readable("L['self']._modules['layers']._modules['0'].eps")
        'self.layers.0.eps'
    """
    text = re.sub(r"^L\['(\w+)'\]", r"\1", source)
    text = re.sub(r"^G\['(\w+)'\]", r"\1", text)
    return _STEP.sub(r".\1", text)


def words_for(value: Any) -> str:  # noqa: PLR0911 - one answer for each kind
    """Return what can be said of a value that another process can say too."""
    if isinstance(value, Tensor):
        grad = ", requires grad" if value.requires_grad else ""
        return f"tensor {value.dtype}{list(value.shape)} strides {list(value.stride())} on {value.device}{grad}"
    if isinstance(value, (*_PLAIN, enum.Enum)):
        return repr(value)
    if isinstance(value, nn.Module):
        return f"module {_name(type(value))}, {'training' if value.training else 'evaluating'}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{'class' if isinstance(value, type) else 'function'} {_name(value)}"
    if isinstance(value, Mapping):
        keys = list(value)[:_MOST_ITEMS]
        return f"{_name(type(value))} of {len(value)}: {', '.join(map(str, keys))}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = (
            sorted(map(_item, value)) if isinstance(value, (set, frozenset)) else map(_item, value)
        )
        return f"{_name(type(value))} of {len(value)}: {', '.join(list(items)[:_MOST_ITEMS])}"
    return f"a {_name(type(value))}"


def _item(value: Any) -> str:
    return repr(value) if isinstance(value, _PLAIN) else f"a {_name(type(value))}"


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}".removeprefix("builtins.")


@dataclass(frozen=True)
class Sources:
    """The code that was traced, without torch's own, which its version stands for."""

    files: Mapping[str, str]
    """Hash of a module's file, by module name."""
    parts: Mapping[str, Mapping[str, str]]
    """Hash of each traced definition, by module name and name in it."""

    @classmethod
    def of(cls, codes: Iterable[types.CodeType]) -> Sources:
        """Return the sources of code objects."""
        files: dict[str, str] = {}
        parts: dict[str, dict[str, str]] = {}
        indices: dict[str, _Index] = {}
        for code in codes:
            module = inspect.getmodule(code)
            if module is None or module.__name__.partition(".")[0] == "torch":
                continue
            name = module.__name__
            if name not in indices:
                text = _text(module)
                if text is None:
                    continue
                indices[name] = _Index(text)
                files[name] = _hash(text)
            found = indices[name].at(code.co_firstlineno)
            if found is not None:
                parts.setdefault(name, {})[found[0]] = found[1]
        return cls(files, parts)

    def changed(self) -> list[str]:
        """Say what differs now, one line each; comments and other functions do not matter."""
        lines = []
        for name, parts in self.parts.items():
            try:
                module = sys.modules.get(name) or import_module(name)
            except ImportError as error:
                lines.append(f"source of {name}: cannot be imported ({error})")
                continue
            text = _text(module)
            if text is None:
                lines.append(f"source of {name}: cannot be read")
                continue
            if _hash(text) == self.files.get(name):
                continue
            index = _Index(text)
            where = Path(str(module.__file__)).name
            lines += [
                f"source changed: {where}, {part}"
                for part, digest in parts.items()
                if digest not in index.digests_of(part)
            ]
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return it as texts."""
        return {"files": dict(self.files), "parts": {k: dict(v) for k, v in self.parts.items()}}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Sources:
        """Return what `to_json` wrote."""
        return cls(stored["files"], stored["parts"])


class _Index:
    """The definitions of a file: functions, methods and other statements at the top."""

    def __init__(self, text: str) -> None:
        self._found: list[tuple[int, int, str, str]] = []
        try:
            self._visit(ast.parse(text).body, "")
        except SyntaxError:
            return

    def _visit(self, body: Iterable[ast.stmt], prefix: str) -> None:
        for statement in body:
            decorators = getattr(statement, "decorator_list", [])
            first = min([statement.lineno, *(each.lineno for each in decorators)])
            name = getattr(statement, "name", "")
            if isinstance(statement, ast.ClassDef):
                self._visit(statement.body, f"{prefix}{name}.")
                continue
            label = f"{prefix}{name}" if name else f"{prefix}<statement>"
            content = _hash(ast.dump(statement))
            self._found.append((first, statement.end_lineno or first, label, content))

    def at(self, line: int) -> tuple[str, str] | None:
        """Return name and hash of the definition that a line is in."""
        for first, last, label, digest in self._found:
            if first <= line <= last:
                return (
                    label if not label.endswith("<statement>") else f"{label} {digest[:12]}"
                ), digest
        return None

    def digests_of(self, label: str) -> set[str]:
        """Return the hashes of all definitions of a name."""
        plain = (
            label.partition("<statement>")[0] + "<statement>" if "<statement>" in label else label
        )
        return {digest for _, _, name, digest in self._found if name == plain}


def _text(module: types.ModuleType) -> str | None:
    path = getattr(module, "__file__", None)
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
