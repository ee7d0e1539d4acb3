"""The fingerprint of a program: what has to be the same where it is used again.

    facts        what Dynamo guards, with digests of the code behind it (`model.facts`, `model.code`)
    files        the content of each file whose code was traced, and of the files of classes and functions that were read
    attributes   numbers, texts and containers of them that are attributes of the model's modules

With the key (`store.misses`: versions, machine, contract, options, the structure and dtypes of tensors) this is all that
a load compares. An edit of such a file that changes nothing for the model makes a new program; `check="trace"` captures
the model again instead. What neither notices is listed in docs/serving.md.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchloom.bytecode import code_digest, nested
from torchloom.serve.model.code import CodeReader, has_version
from torchloom.serve.model.facts import Facts, changed_facts
from torchloom.serve.model.spelling import NotExactError, exact
from torchloom.serve.model.target import Target

_STARTED = time.time()
_PLAIN = (bool, int, float, complex, str, type(None), list, tuple, dict)


@dataclass(frozen=True)
class Fingerprint:
    """What a program relies on of its model."""

    facts: Facts
    files: Mapping[str, str] = field(default_factory=dict)
    """Hashes of contents, by module."""
    attributes: Mapping[str, str] = field(default_factory=dict)

    def changed(self, scope: Mapping[str, Any], target: Target, reader: CodeReader) -> list[str]:
        """Say what is another thing now, one line each.

        Args:
            scope: of a call.
            target: the model.
            reader: of code.
        """
        lines = changed_facts(self.facts, scope, reader)
        lines += [
            f"{Path(_file_of(module) or module).name} was edited"
            for module, was in self.files.items()
            if _content_hash(module) != was
        ]
        now = attributes_of(target)
        return lines + [
            f"{name} was {self.attributes.get(name, 'not there')}, is {now.get(name, 'not there')}"
            for name in sorted(self.attributes.keys() | now)
            if self.attributes.get(name) != now.get(name)
        ]

    def to_bytes(self) -> bytes:
        """Return it as JSON; equal ones are equal bytes."""
        return json.dumps(vars(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Fingerprint:
        """Return what `to_bytes` wrote."""
        return cls(**json.loads(content))


def attributes_of(target: Target) -> dict[str, str]:
    """Return the plain attributes of a model's modules, by their names, as texts."""
    modules = [] if target.module is None else target.module.named_modules()
    found = {}
    for path, module in modules:
        for name, value in vars(module).items():
            if type(value) in _PLAIN and not name.startswith("_"):
                try:
                    found[f"{path}.{name}".lstrip(".")] = exact(value)
                except NotExactError:
                    continue  # it holds an object
    return found


def files_of(
    codes: Iterable[types.CodeType], others: Iterable[str], known: Collection[types.CodeType]
) -> tuple[dict[str, str], list[str]]:
    """Return the files that stand for code, and the code that none stands for.

    Args:
        codes: that was traced.
        others: modules of the classes and functions that were read.
        known: code that facts have digests of.

    Returns:
        Hashes of contents by module; what cannot be looked up again, a line each.
    """
    modules = {
        file: name
        for name, each in list(sys.modules.items())
        if (file := getattr(each, "__file__", None)) is not None
    }
    found, lost = {}, []
    for code in codes:
        file = code.co_filename
        if has_version(file) or modules.get(file) in found or code.co_name == "__create_fn__":
            continue
        digest = _content_hash(modules[file]) if file in modules else ""
        if digest and _is_as_imported(Path(file), code):
            found[modules[file]] = digest
        elif not digest and code not in known:
            lost.append(f"the code of {code.co_name} ({Path(file).name})")
        elif digest:
            lost.append(f"{Path(file).name}, which was edited after it was imported")
    for name in sorted(set(others) - set(found)):
        file = _file_of(name)
        if file and not has_version(file) and (digest := _content_hash(name)):
            found[name] = digest
    return found, list(dict.fromkeys(lost))


def _file_of(module: str) -> str | None:
    """Return the file of a module, which need not be imported yet."""
    if not module or module in sys.modules:
        return getattr(sys.modules.get(module), "__file__", None)
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if spec is None else spec.origin


def _content_hash(module: str) -> str:
    file = _file_of(module)
    try:
        return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def _is_as_imported(file: Path, code: types.CodeType) -> bool:
    """Return whether a file still holds some code; one that is older than this process does."""
    status = file.stat()
    if max(status.st_mtime, status.st_ctime) < _STARTED:
        return True
    return code_digest(code) in _digests_in(file, status.st_mtime_ns)


@cache
def _digests_in(file: Path, _: int) -> frozenset[str]:
    try:
        tree = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(map(code_digest, nested(tree)))
