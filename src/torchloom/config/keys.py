"""Read a document along the schema, key by key, into its sections.

    {"zero_optimization": {"prefetch_bucket_size": "auto", "stag": 3}}
        -> "stage3_prefetch_bucket_size" is "auto"
           + error: unknown key zero_optimization.stag, did you mean zero_optimization.stage?

Aliases mean the schema's names, null counts as not given, and "auto" is the caller's value or a documented
default, or is derived by a later step. A value that its key does not take is an error and left out. A misspelt
key is an error, any other unknown key a warning; an unknown parameter of an optimizer, a schedule or torch.compile is
an error, because the constructor that receives it would reject it.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torchloom.config.fields import Key, Section, SectionT, asks
from torchloom.config.findings import Findings, nearest
from torchloom.config.kinds import Kind, show
from torchloom.config.schema import ConfigSchema
from torchloom.config.source import join

_HOMES = {
    **{f"{name}": f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")},
    "momentum": "optimizer.params.momentum",
    "learning_rate": "optimizer.params.lr",
    "batch_size": "train_batch_size",
    **{
        name: f"scheduler.params.{name}"
        for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    },
}


def tell_unknown(of: type[Section], name: str, parent: str, findings: Findings) -> None:
    """Add what is said of an unknown key.

    Args:
        of: the section in which it stands.
        name: the key.
        parent: the path of the section, as the user wrote it.
        findings: collects errors, notes and hints.
    """
    names = [each for key in of.keys.values() for each in (key.name, *key.aliases, *key.old)]
    if (meant := misspelt(name, names)) is not None:
        findings.error(join(parent, name), "unknown key", f"did you mean {join(parent, meant)}?")
        return
    close = nearest(name, of.keys)
    suggestion = join(parent, close) if close else _elsewhere(name)
    ending = f"did you mean {suggestion}?" if suggestion else "remove it or check its spelling"
    findings.warn(join(parent, name), f"unknown key, ignored: {ending}")


def without_dotted(tree: dict[str, object], findings: Findings) -> dict[str, object]:
    """Return the top level without dotted keys, which are ignored with a warning."""
    for name in tree:
        if "." in name:
            known = name if name in known_paths() else nearest(name, known_paths())
            nested = show(tree[name])
            for part in reversed((known or name).split(".")):
                nested = f"{{{show(part)}: {nested}}}"
            findings.warn(name, f"a dotted key is ignored, as DeepSpeed does; nest it: {nested}")
    return {name: value for name, value in tree.items() if "." not in name}


@functools.cache
def known_paths() -> tuple[str, ...]:
    """Return the dotted path of every key of the schema."""
    return tuple(_paths(ConfigSchema, ""))


def misspelt(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` misspells: one edit away, or two from 9 letters on.

    Example:
        >>> misspelt("zero_optimisation", ["zero_optimization"]), misspelt("notes", ["nodes_x"])
        ('zero_optimization', None)
    """
    if len(word) < 4:
        return None
    edits = 1 if len(word) < 9 else 2
    as_long = [name for name in known if abs(len(name) - len(word)) <= edits]
    cutoff = 1 - edits / len(word) - 1e-9
    return next(iter(difflib.get_close_matches(word.lower(), as_long, 1, cutoff)), None)


def _paths(of: type[Section], path: str) -> Iterator[str]:
    for key in of.keys.values():
        here = join(path, key.name)
        yield here
        if key.section is not None:
            yield from _paths(key.section, here)


def _elsewhere(name: str) -> str | None:
    """Return the known path that ends in this name, when the key only sits in the wrong place."""
    last_parts = {path.rpartition(".")[2]: path for path in reversed(known_paths())} | _HOMES
    close = nearest(name, last_parts) if name not in last_parts else name
    return last_parts[close] if close else None


AUTO = "auto"


@dataclass(slots=True)
class Written:
    """Facts about what was written that the sections do not show."""

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
class Reader:
    """Reads a document into sections; `values` are the caller's for "auto"."""

    values: Mapping[str, object]
    findings: Findings
    written: Written

    def section(
        self, of: type[SectionT], tree: Mapping[str, object], path: str = "", theirs: str = ""
    ) -> SectionT:
        """Return a section filled from `tree`.

        Args:
            of: the schema of the section.
            tree: what the user wrote.
            path: of the section; "" for the whole document.
            theirs: the path as the user wrote it.
        """
        names = {
            name: key for key in of.keys.values() for name in (key.name, *key.aliases, *key.old)
        }
        seen: dict[str, object] = {}
        taken: dict[str, object] = {}
        for name, value in tree.items():
            if (key := names.get(name)) is None:
                tell_unknown(of, name, theirs, self.findings)
                continue
            here, given = join(path, key.name), join(theirs, name)
            if here != given:
                self.written.renamed[here] = given
            if name in key.old:
                self.findings.warn(given, f"a deprecated name; write {join(theirs, key.name)}")
            if key.name in seen and seen[key.name] != value:
                fix = f"keep {join(theirs, key.name)} alone"
                self.findings.error(given, "the same setting is given under two names", fix)
            seen[key.name] = value
            if value is None:
                self.written.null.add(here)
            elif (found := self._value(key, value, here, given)) is not None:
                taken[key.name] = found
        return of(**taken)

    def _value(self, key: Key, value: object, path: str, given: str) -> object:
        """Return what a key is set to; None if it has no value, or a wrong one."""
        if key.section is not None and isinstance(value, Mapping):
            return self.section(key.section, value, path, given)
        if value == AUTO and key.section is None:
            value = self._auto(key, path, given)
        elif key.free_form and isinstance(value, Mapping):
            value = {
                name: self._from_caller(join(path, name), join(given, name), item)
                for name, item in value.items()
            }
        taken = None if value is None else self.findings.take(key.take, value, path)
        if taken is not None and key.treatment != "used":
            _tell(key, taken, path, self.findings)
        return taken

    def _auto(self, key: Key, path: str, given: str) -> object:
        """Return the value that "auto" takes, None when it has none yet."""
        if (value := self._from_caller(path, given, AUTO)) != AUTO:
            return value
        if key.auto == "derive":
            self.written.auto.add(path)
        elif key.auto == "refuse":
            self.findings.leave_open(path)
        elif key.treatment == "used":
            shown = "not set" if key.default is None else show(key.default)
            self.findings.info(given, f'"auto" became the default: {shown}')
        return None

    def _from_caller(self, path: str, given: str, value: object) -> object:
        """Return the caller's value for an "auto", else the value itself."""
        theirs = self.values.get(given, self.values.get(path))
        if value != AUTO or theirs in (None, AUTO):
            return value
        self.findings.info(given, f'"auto" became {show(theirs)}, given by the caller')
        return theirs


def _tell(key: Key, value: object, path: str, findings: Findings) -> None:
    """Add the hint, warning or error of a key that does not simply take effect."""
    if key.treatment == "hint" and key.instead:
        if key.name == "overlap_comm" and value is False:  # the opposite happens
            findings.warn(path, f"{show(value)} has no effect: {key.instead}")
        else:
            findings.hint(path, asked=value, used=None, why=key.instead)
    elif key.treatment == "no effect" and asks(value, key):
        findings.warn(path, f"no effect ({key.doc}): {key.instead}")
    elif key.treatment == "refused" and asks(value, key):
        findings.error(path, f"asks for {key.doc}, which this release does not have", key.instead)


NO_AUTO: Mapping[str, object] = {}


def check_params(
    given: Mapping[str, object],
    table: Mapping[str, Kind],
    path: str,
    findings: Findings,
    *,
    auto: Mapping[str, object] = NO_AUTO,
) -> dict[str, object]:
    """Return the parameters that passed; the others are errors in `findings`.

    Args:
        given: what the user wrote; null counts as not given.
        table: the kinds by name.
        path: where the parameters are.
        findings: collects what is wrong.
        auto: what "auto" means, by name; None leaves the parameter out.
    """
    taken = {}
    for name, value in given.items():
        here = f"{path}.{name}"
        if name not in table:
            close = nearest(name, table)
            known = f"did you mean {close}?" if close else f"known: {', '.join(table)}"
            findings.error(here, "unknown parameter", known)
            continue
        if value == AUTO:
            if name not in auto:
                findings.leave_open(here)
                continue
            value = auto[name]
            findings.info(here, f'"auto" became {"the default" if value is None else show(value)}')
        if value is None:
            continue
        if (read := findings.take(table[name], value, here)) is not None:
            taken[name] = read
    return taken
