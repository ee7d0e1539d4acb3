"""Compares two records, for reviews and for CI.

Compares what torch compiled and what it gave up. Leaves out what depends on the process, the machine's load or
the length of the run: ids of compiles, calls served, phases, stacks, the arguments that happened to
come first; and what follows from what is compared: rewritten bytecode from pseudo-source, hits of the
trace's caches from graphs. Times, settings and cache outcomes are told, and are no difference by themselves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torchloom.records.entry import Entry
from torchloom.records.model import Function, Session, eager_reason

_MIN_SECONDS = 0.5
_FACTOR = 1.5
_GRAPHS = ("dynamo", "pre_grad", "joint", "forward", "backward", "inference", "post_grad")
_CODE = "output_code"
_CACHED = frozenset({"pre_grad", "post_grad", _CODE})
"""Kinds that are missing where a cache had the result."""
_LINE = re.compile(r":\d+ in ")
_CONTINUATION = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")


@dataclass(kw_only=True, slots=True)
class RecordDiff:
    """Differences between two records, as lines of text by topic."""

    functions: list[str] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)
    eager: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    guards: list[str] = field(default_factory=list)
    graphs: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)
    times: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything but times and settings differs."""
        return any(getattr(self, name) for name in self.__slots__ if name not in _NO_DIFFERENCE)

    def __str__(self) -> str:
        topics = {name: getattr(self, name) for name in self.__slots__}
        lines = [
            text
            for name, found in topics.items()
            if found
            for text in (f"{name}:", *(f"  {line}" for line in found))
        ]
        return "\n".join(lines) or "no difference"


_NO_DIFFERENCE = frozenset({"times", "settings"})


def diff(before: Session, after: Session) -> RecordDiff:
    """Compare two records: functions, entries, calls that ran eagerly, breaks, guards, graphs, kernels.

    Functions are matched by file and qualified name, those that share both and entries by their order.
    Numbers that Dynamo counts up, the order of sets and lines in comments are no differences. Times are
    told where they differ by more than half and by at least half a second.

    Example:
        >>> bool(diff(Session(), Session()))
        False
    """
    found = RecordDiff()
    old, new = _by_name(before), _by_name(after)
    for name in dict.fromkeys([*old, *new]):
        _function(name, old.get(name), new.get(name), found)
    _eager(
        "functions that could not be told",
        _unknown_calls(before.num_unknown_eager_calls),
        _unknown_calls(after.num_unknown_eager_calls),
        found,
    )
    found.breaks = _breaks(before, after)
    found.memory = _memory(before, after)
    found.settings = _changes(_settings(before), _settings(after))
    return found


def _function(name: str, old: Function | None, new: Function | None, found: RecordDiff) -> None:
    a, b = old.entries if old else [], new.entries if new else []
    if a and not b:
        found.functions.append(f"- {name} is no longer compiled")
    elif b and not a:
        found.functions.append(f"+ {name} is compiled now")
    elif len(a) != len(b):
        found.entries.append(f"{name}: {len(a)} -> {len(b)} entries")
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        _entry(f"{name}, entry {index}", one, other, found)
    _eager(name, eager_reason(old), eager_reason(new), found)


def _eager(name: str, old: str, new: str, found: RecordDiff) -> None:
    if same_names(old) != same_names(new):
        found.eager += [f"- {name}: {old}"] if old else []
        found.eager += [f"+ {name}: {new}"] if new else []


def _unknown_calls(number: int) -> str:
    return f"{number} calls that no entry fits ran eagerly" if number else ""


def _entry(where: str, old: Entry, new: Entry, found: RecordDiff) -> None:
    for what, a, b in (
        ("backend", old.backend, new.backend),
        ("status", old.status, new.status),
        ("made because", _reasons(old), _reasons(new)),
    ):
        if same_check(a) != same_check(b):
            found.entries.append(f"{where}: {what} {a or 'nothing'} -> {b or 'nothing'}")
    if same_check(_code(old)) != same_check(_code(new)):
        found.entries.append(f"{where}: what runs around its graph differs (pseudo_source)")
    _guards(where, old, new, found)
    for kind in _GRAPHS:
        _graphs(where, kind, old, new, found)
    _kernels(where, old, new, found)
    runs = [_passes(old), _passes(new)]
    if all(runs) or not _has_hit(old if not runs[0] else new):
        found.passes += [f"{where}: {line}" for line in _changes(*runs)]
    a_s, b_s = old.compile_s, new.compile_s
    if abs(a_s - b_s) >= _MIN_SECONDS and max(a_s, b_s) > _FACTOR * max(min(a_s, b_s), 1e-9):
        found.times.append(f"{where}: compile {a_s:.1f} s -> {b_s:.1f} s")
    uses = [", ".join(sorted(f"{use.cache} {use.outcome}" for use in e.caches)) for e in (old, new)]
    if uses[0] != uses[1]:
        found.times.append(f"{where}: caches {uses[0] or 'unused'} -> {uses[1] or 'unused'}")


def _guards(where: str, old: Entry, new: Entry, found: RecordDiff) -> None:
    a, b = ({(same_check(g.english), same_check(g.text)): g for g in e.guards} for e in (old, new))
    words = [{english for english, _ in each} for each in (a, b)]
    for sign, mine, others in (("-", a, b), ("+", b, a)):
        for key in sorted(mine.keys() - others.keys()):
            english, text = mine[key].english, mine[key].text
            # In words, some checks read the same although they are not.
            said = f"{english} ({text})" if all(key[0] in each for each in words) else english
            found.guards.append(f"{where}: {sign} {said}")


def _graphs(where: str, kind: str, old: Entry, new: Entry, found: RecordDiff) -> None:
    texts = [_artifacts(kind, each) for each in (old, new)]
    if _is_cached(kind, texts, (old, new)):
        return
    if [same_graph(each) for each in texts[0]] != [same_graph(each) for each in texts[1]]:
        sizes = [sum(len(text.splitlines()) for text in each) for each in texts]
        found.graphs.append(f"{where}: {kind} graph, {sizes[0]} -> {sizes[1]} lines")


def _kernels(where: str, old: Entry, new: Entry, found: RecordDiff) -> None:
    texts = [_artifacts(_CODE, each) for each in (old, new)]
    if _is_cached(_CODE, texts, (old, new)):
        return
    if len(old.kernels) != len(new.kernels):
        found.kernels.append(f"{where}: {len(old.kernels)} -> {len(new.kernels)} kernels")
        return
    differ = [
        a.name
        for a, b in zip(old.kernels, new.kernels, strict=True)
        if (a.name, same_kernel(a.source)) != (b.name, same_kernel(b.source))
    ]
    if differ:
        found.kernels.append(f"{where}: other code in {', '.join(differ)}")
    elif [same_graph(each) for each in texts[0]] != [same_graph(each) for each in texts[1]]:
        found.kernels.append(f"{where}: other code around the kernels")


def _is_cached(kind: str, texts: Sequence[list[str]], entries: Sequence[Entry]) -> bool:
    """Return whether one entry lacks an artifact since a cache had what would have been made of it."""
    return kind in _CACHED and any(
        not text and _has_hit(entry) for text, entry in zip(texts, entries, strict=True)
    )


def _has_hit(entry: Entry) -> bool:
    return any(use.outcome == "hit" for use in entry.caches)


def _artifacts(kind: str, entry: Entry) -> list[str]:
    return [each.text for each in entry.artifacts if each.kind == kind]


def _code(entry: Entry) -> str:
    """Return what an entry does around its graph, and behind its break."""
    parts = [entry.pseudo_source, *(each.source for each in entry.continuations)]
    return _CONTINUATION.sub(r"\1", "\n".join(parts))


def _reasons(entry: Entry) -> str:
    return "; ".join(each.sentence for each in entry.recompiles)


def _passes(entry: Entry) -> Counter[str]:
    return Counter(
        f"pass {each.name} on {each.graph} ({each.stage}), {each.num_edits} edits"
        for each in entry.passes
    )


def _breaks(before: Session, after: Session) -> list[str]:
    """Compare breaks by function and reason: that lines above them move changes nothing."""
    counts, shown = [], {}
    for session in (before, after):
        keys = []
        for each in session.breaks():
            key = f"{_LINE.sub(' in ', each.place)}: {same_names(each.reason)}"
            keys.append(key)
            shown.setdefault(key, f"{each.place}: {each.reason}")
        counts.append(Counter(keys))
    return [f"{line[:2]}{shown[line[2:]]}" for line in _changes(*counts)]


def _memory(before: Session, after: Session) -> list[str]:
    """Compare predicted bytes of the graphs that both records tell of."""
    a, b = _predicted(before), _predicted(after)
    return [
        f"{what}: {a[what]} -> {b[what]} bytes" for what in a if b.get(what, a[what]) != a[what]
    ]


def _predicted(session: Session) -> dict[str, int]:
    found = {f"peak of {each.phase} of {each.graph}": each.peak_bytes for each in session.peaks}
    standing = enumerate(session.standing, 1)
    return {**found, **{f"standing ({n})": each.base_bytes for n, each in standing}}


def _settings(session: Session) -> Counter[str]:
    versions = ("torchloom", "torch", "python", "device", "world_size")
    lines = [f"{name} {getattr(session, name)}" for name in versions]
    for name, changed in session.config.items():
        lines += [f"{name}.{each}" for each in changed] if isinstance(changed, list) else []
    return Counter(lines)


def _changes(old: Counter[str], new: Counter[str]) -> list[str]:
    return [
        *(f"- {text}" for text in sorted((old - new).elements())),
        *(f"+ {text}" for text in sorted((new - old).elements())),
    ]


def _by_name(session: Session) -> dict[str, Function]:
    """Return functions by file and qualified name; those that share both are numbered."""
    found: dict[str, Function] = {}
    for place, function in _named(session.functions):
        name, number = place, 1
        while name in found:
            number += 1
            name = f"{place} ({number})"
        found[name] = function
    return found


def _named(functions: Sequence[Function], whole: str = "") -> Iterator[tuple[str, Function]]:
    """Yield functions with names that hold no line: what follows a break goes by what it continues."""
    for function in functions:
        own = function.qualname or function.name
        name = f"{function.file}:{own}"
        match = _CONTINUATION.search(own)
        if match:
            name = f"{whole or f'{function.file}:{match.group(1)}'}, behind a break"
        yield name, function
        yield from _named(function.children, name if not match else whole)


_COUNTED = re.compile(
    # `__builtins_dict___3`, `__compiled_fn_4`: a counter of the process stands behind.
    r"(_{2,3}(?:builtins_dict__|compiled_fn|resume_at_\d+|context_manager_\d+|gen_rand_values"
    r"|warnings_warn_wrapper|comprehension_\w+_at_\d+))_\d+"
    # An object's number and the compile's behind it.
    r"|(__\w+?)_(?:\d{5,}|<id>)_c\d+[/_]\d+"
)
_ADDRESS = re.compile(r"(___check_(?:obj|type)_id\(.*?), \d+\)")
_MACHINE = re.compile(r"('backend_hash': )'\w+'")
_SET = re.compile(r"""b?(?P<quote>['"])(?:\\.|(?!(?P=quote)).)*(?P=quote)|\{(?P<inner>[^{}]*)\}""")


def same_names(text: str) -> str:
    """Return a text without the numbers that Dynamo and the process count up.

    Example:
        >>> same_names("G['__builtins_dict___7']['len']")
        "G['__builtins_dict__']['len']"
    """
    return _ADDRESS.sub(r"\1)", _COUNTED.sub(lambda m: m.group(1) or m.group(2), text))


def same_check(text: str) -> str:
    """Return a guard, in code or in words, with the elements of sets in one order.

    Example:
        >>> same_check("L['s'] == {'b', 'a'}")
        "L['s'] == {'a', 'b'}"
    """
    return _SET.sub(_in_order, same_names(text))


def same_graph(text: str) -> str:
    """Return a graph, or generated code, without comments, which name lines and paths."""
    lines = (line.rstrip() for line in same_names(text).splitlines())
    kept = (line for line in lines if line and not line.lstrip().startswith("#"))
    return _MACHINE.sub(r"\1''", "\n".join(kept))


def same_kernel(text: str) -> str:
    """Return a kernel's source without what belongs to the machine that it was written on."""
    lines = (line for line in text.splitlines() if not line.startswith(("#include", "# ")))
    return _MACHINE.sub(r"\1''", "\n".join(lines))


def _in_order(braces: re.Match[str]) -> str:
    """Return a set with its parts sorted, also those of texts with commas; dicts keep their order, which counts."""
    inner = braces["inner"]
    return (
        braces[0]
        if inner is None or ": " in inner
        else f"{{{', '.join(sorted(inner.split(', ')))}}}"
    )
