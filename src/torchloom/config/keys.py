"""Replace the keys that users write by the keys of the schema.

    {"zero_optimization": {"prefetch_bucket_size": "auto", "stag": 3}}
        -> {"zero_optimization": {}}
           + "stage3_prefetch_bucket_size" is "auto"
           + error: unknown key zero_optimization.stag, did you mean zero_optimization.stage?

Aliases are replaced by the schema's names, misspelt keys are errors, other unknown keys give warnings, and null
counts as not given.
"auto" is replaced by the caller's value or a documented default, or is derived by a later step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torchloom.config.fields import Key, Section, keys_of
from torchloom.config.findings import Findings, misspelt, nearest
from torchloom.config.jsonc import join
from torchloom.config.kinds import show
from torchloom.config.schema import ConfigSchema

AUTO = "auto"
_HOMES = {
    **{
        name: f"optimizer.params.{name}"
        for name in ("lr", "betas", "eps", "weight_decay", "momentum")
    },
    **{
        name: f"scheduler.params.{name}"
        for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    },
    "learning_rate": "optimizer.params.lr",
    "batch_size": "train_batch_size",
}


@dataclass(slots=True)
class Written:
    """Facts about what was written that the cleaned tree no longer shows."""

    auto: set[str] = field(default_factory=set)
    """Paths that are "auto" without a value from the caller; their values are derived later."""
    null: set[str] = field(default_factory=set)
    """Paths given as null."""
    renamed: dict[str, str] = field(default_factory=dict)
    """From the schema's path to the path that the user wrote."""

    def path(self, path: str) -> str:
        """Return a schema path as the user wrote it."""
        for ours, theirs in self.renamed.items():
            if path == ours or path.startswith((f"{ours}.", f"{ours}[")):
                return theirs + path[len(ours) :]
        return path


@dataclass(frozen=True, slots=True)
class Cleaner:
    """Walks a document along the schema; `values` are the caller's for "auto"."""

    values: Mapping[str, object]
    findings: Findings
    written: Written

    def clean(self, tree: dict[str, object]) -> dict[str, object]:
        """Return the document with the schema's keys only."""
        return self._section(ConfigSchema, self._without_dotted(tree), "", "")

    def _without_dotted(self, tree: dict[str, object]) -> dict[str, object]:
        for name in tree:
            if "." not in name:
                continue
            known = name if name in known_paths() else nearest(name, known_paths())
            nested = _nested(known or name, tree[name])
            self.findings.warn(
                name, f"a dotted key is ignored, as DeepSpeed does; nest it: {nested}"
            )
        return {name: value for name, value in tree.items() if "." not in name}

    def _section(
        self, of: type[Section], tree: Mapping[str, object], ours: str, theirs: str
    ) -> dict[str, object]:
        names = _names_of(of)
        cleaned: dict[str, object] = {}
        for name, value in tree.items():
            given = join(theirs, name)
            key = names.get(name)
            if key is None:
                self._unknown(given, name, of, theirs)
                continue
            path = join(ours, key.name)
            if path != given:
                self.written.renamed[path] = given
            if name in key.old:
                self.findings.warn(given, f"a deprecated name; write {join(theirs, key.name)}")
            if key.name in cleaned and cleaned[key.name] != value:
                fix = f"keep {join(theirs, key.name)} alone"
                self.findings.error(given, "the same setting is given under two names", fix)
            self._entry(cleaned, key, value, path, given)
        return cleaned

    def _entry(
        self, cleaned: dict[str, object], key: Key, value: object, path: str, given: str
    ) -> None:
        if value is None:
            self.written.null.add(path)
        elif value == AUTO and key.section is None:
            if (resolved := self._auto(key, path, given)) is not None:
                cleaned[key.name] = resolved
        elif key.section is not None and isinstance(value, Mapping):
            cleaned[key.name] = self._section(key.section, value, path, given)
        elif key.free_form and isinstance(value, Mapping):
            cleaned[key.name] = self._free_form(value, path, given)
        else:
            cleaned[key.name] = value

    def _auto(self, key: Key, path: str, given: str) -> object:
        """Return the value that "auto" takes, None when it has none yet."""
        if (value := self._from_caller(path, given)) is not None:
            return value
        if key.auto == "derive":
            self.written.auto.add(path)
        elif key.auto == "refuse":
            self.findings.leave_open(path)
        elif key.treatment == "used":
            shown = "not set" if key.default is None else show(key.default)
            self.findings.info(given, f'"auto" became the default: {shown}')
        return None

    def _free_form(self, tree: Mapping[str, object], path: str, given: str) -> dict[str, object]:
        """Resolve the "auto" of free-form keys with the caller's values alone."""
        resolved = {}
        for name, value in tree.items():
            caller = None
            if value == AUTO:
                caller = self._from_caller(join(path, name), join(given, name))
            resolved[name] = value if caller is None else caller
        return resolved

    def _from_caller(self, path: str, given: str) -> object:
        value = self.values.get(given, self.values.get(path))
        if value == AUTO:
            return None
        if value is not None:
            self.findings.info(given, f'"auto" became {show(value)}, given by the caller')
        return value

    def _unknown(self, given: str, name: str, of: type[Section], theirs: str) -> None:
        if (meant := misspelt(name, _names_of(of))) is not None:
            self.findings.error(given, "unknown key", f"did you mean {join(theirs, meant)}?")
            return
        close = nearest(name, keys_of(of))
        suggestion = join(theirs, close) if close else _elsewhere(name)
        ending = f"did you mean {suggestion}?" if suggestion else "remove it or check its spelling"
        self.findings.warn(given, f"unknown key, ignored: {ending}")


@functools.cache
def known_paths() -> tuple[str, ...]:
    """Return the dotted path of every key of the schema."""
    return tuple(_paths(ConfigSchema, ""))


def _paths(of: type[Section], path: str) -> Iterator[str]:
    for key in keys_of(of).values():
        here = join(path, key.name)
        yield here
        if key.section is not None:
            yield from _paths(key.section, here)


@functools.cache
def _names_of(of: type[Section]) -> Mapping[str, Key]:
    """Return the keys of a section under all their names."""
    keys = keys_of(of).values()
    return {name: key for key in keys for name in (key.name, *key.aliases, *key.old)}


def _elsewhere(name: str) -> str | None:
    """Return the known path that ends in this name, when the key only sits in the wrong place."""
    last_parts = {path.rpartition(".")[2]: path for path in reversed(known_paths())} | _HOMES
    close = nearest(name, last_parts) if name not in last_parts else name
    return last_parts[close] if close else None


def _nested(path: str, value: object) -> str:
    head, _, tail = path.partition(".")
    inner = _nested(tail, value) if tail else show(value)
    return f"{{{show(head)}: {inner}}}"
