"""Read a document along the schema, key by key, into its sections.

    {"zero_optimization": {"prefetch_bucket_size": "auto", "stag": 3}}
        -> "stage3_prefetch_bucket_size" is "auto"
           + error: unknown key zero_optimization.stag, did you mean zero_optimization.stage?

Aliases mean the schema's names, null counts as not given, and "auto" is the caller's value or a documented
default, or is derived by a later step. A value that its key does not take is an error and left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchloom.config.fields import Key, SectionT, asks
from torchloom.config.findings import Findings
from torchloom.config.jsonc import join
from torchloom.config.kinds import show
from torchloom.config.unknown_keys import tell_unknown

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
