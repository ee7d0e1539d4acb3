"""What changed from one record to another: for reviews and for CI."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchloom.records.model import Entry, Function, Session

_MIN_SECONDS = 0.5
_FACTOR = 1.5


@dataclass(kw_only=True, slots=True)
class RecordDiff:
    """Differences between two records, as lines of text by topic."""

    functions: list[str] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    times: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything but times differs."""
        return any(
            (self.functions, self.entries, self.breaks, self.guards, self.graphs, self.kernels)
        )

    def __str__(self) -> str:
        topics = {name: getattr(self, name) for name in self.__slots__}
        lines = [
            text
            for name, found in topics.items()
            if found
            for text in (f"{name}:", *(f"  {line}" for line in found))
        ]
        return "\n".join(lines) or "no difference"


def diff(before: Session, after: Session) -> RecordDiff:
    """Compare two records: new and lost functions, entries, breaks, guards, kernels, and times.

    Functions are matched by file and qualified name, those that share both and entries by their order. Times are told where they differ
    by more than half and by at least half a second.

    Example:
        >>> bool(diff(Session(), Session()))
        False
    """
    found = RecordDiff()
    old, new = _by_name(before), _by_name(after)
    found.functions = [
        *(f"- {name} is no longer compiled" for name in old.keys() - new.keys()),
        *(f"+ {name} is compiled now" for name in new.keys() - old.keys()),
    ]
    for name in sorted(old.keys() & new.keys()):
        _function(name, old[name], new[name], found)
    old_breaks = {f"{b.place}: {b.reason}" for b in before.breaks()}
    new_breaks = {f"{b.place}: {b.reason}" for b in after.breaks()}
    found.breaks = [
        *(f"- {text}" for text in sorted(old_breaks - new_breaks)),
        *(f"+ {text}" for text in sorted(new_breaks - old_breaks)),
    ]
    return found


def _function(name: str, old: Function, new: Function, found: RecordDiff) -> None:
    if len(old.entries) != len(new.entries):
        found.entries.append(f"{name}: {len(old.entries)} -> {len(new.entries)} entries")
    for index, (a, b) in enumerate(zip(old.entries, new.entries, strict=False)):
        _entry(f"{name}, entry {index}", a, b, found)


def _entry(where: str, old: Entry, new: Entry, found: RecordDiff) -> None:
    old_guards = {guard.english for guard in old.guards}
    new_guards = {guard.english for guard in new.guards}
    found.guards += [f"{where}: - {text}" for text in sorted(old_guards - new_guards)]
    found.guards += [f"{where}: + {text}" for text in sorted(new_guards - old_guards)]
    for kind in ("dynamo", "joint", "forward", "backward", "post_grad"):
        a, b = old.artifact(kind), new.artifact(kind)
        if a != b:
            sizes = [0 if text is None else len(text.splitlines()) for text in (a, b)]
            found.graphs.append(f"{where}: {kind} graph, {sizes[0]} -> {sizes[1]} lines")
    if len(old.kernels) != len(new.kernels):
        found.kernels.append(f"{where}: {len(old.kernels)} -> {len(new.kernels)} kernels")
    a_s, b_s = old.compile_s, new.compile_s
    if abs(a_s - b_s) >= _MIN_SECONDS and max(a_s, b_s) > _FACTOR * max(min(a_s, b_s), 1e-9):
        found.times.append(f"{where}: compile {a_s:.1f} s -> {b_s:.1f} s")


def _by_name(session: Session) -> dict[str, Function]:
    """Return functions by file and qualified name; those that share both are numbered."""
    found: dict[str, Function] = {}
    for function in session.all_functions():
        if function.entries:
            name = place = f"{function.file}:{function.qualname or function.name}"
            number = 1
            while name in found:
                number += 1
                name = f"{place} ({number})"
            found[name] = function
    return found
