"""The schedule of passes that a user writes, checked before anything runs.

    schedule = [(0, ["zero3_compile"]), (5, ["zero3_compile", "prefetch", (mine, "2GB")])]

An entry is due at the first step that is not below its number, so a run that resumes at a later step
also runs it. Before the first entry the stage's preset runs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from torchloom.config.budget import parse_budget
from torchloom.config.compiling import PHASES
from torchloom.config.kinds import RefusedError
from torchloom.errors import PassError, PassOrderError
from torchloom.graph import STAGES, GraphPass
from torchloom.graph.contract import Stage
from torchloom.log import get_logger
from torchloom.memory.measure import device_bytes
from torchloom.passes import PASSES
from torchloom.pipeline.registry import (
    ALIASES,
    BASIS,
    COMMUNICATION,
    FUNCTIONS,
    PRESETS,
    REGISTRY,
    SECOND_HALF,
    PassRegistry,
)

logger = get_logger(__name__)

PassItem: TypeAlias = "str | GraphPass | Callable[..., Any] | tuple[Any, Any]"
"""A name, a pass, a function, or a pair of one of them and a memory budget or its options."""
_GRAPHS: Mapping[Stage, str] = {"joint": "joint graphs", "lowered": "the split graphs"}
Schedule: TypeAlias = "Sequence[tuple[int, Sequence[PassItem]]]"


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """Passes that run from a step on."""

    step: int
    passes: tuple[GraphPass, ...]


@dataclass(frozen=True, slots=True)
class Timetable:
    """The entries of a schedule, by step."""

    entries: tuple[ScheduleEntry, ...]

    def due(self, step: int) -> ScheduleEntry:
        """Return the entry that holds at a step."""
        return next(entry for entry in reversed(self.entries) if entry.step <= step)

    @property
    def all_passes(self) -> tuple[GraphPass, ...]:
        """Passes of all entries, some more than once."""
        return tuple(each for entry in self.entries for each in entry.passes)

    @property
    def names_throughout(self) -> frozenset[str]:
        """Names of the passes that run at every step."""
        names = [frozenset(each.name for each in entry.passes) for entry in self.entries]
        return frozenset.intersection(*names)


class _Item(NamedTuple):
    """One entry of a user's list of passes."""

    what: Any
    """A name, a pass or a function."""
    budget_bytes: int | None
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """As the user gave it; "" for a function."""
        named = self.what.name if isinstance(self.what, GraphPass) else self.what
        return named if isinstance(named, str) else ""


def _item(given: Any, total_bytes: int, where: str) -> _Item:
    budget_bytes, options = None, {}
    if isinstance(given, tuple | list):
        if len(given) != 2:
            raise PassOrderError(
                f"{where}{given!r} is not a pair: write (pass, memory budget) or (pass, {{option: value}})"
            )
        given, more = given
        if isinstance(more, Mapping):
            options = dict(more)
        else:
            try:
                budget_bytes = parse_budget(more).resolve(total_bytes)
            except RefusedError as refusal:
                raise PassOrderError(f"{where}{refusal.what}; {refusal.fix}") from None
    # DeepSpeed's functions edit graphs with other operators: the pass of that name stands for one.
    if str(getattr(given, "__module__", "")).startswith("deepspeed.compile.passes."):
        name = getattr(given, "__name__", repr(given))
        given = FUNCTIONS.get(name, name)
    return _Item(given, budget_bytes, options)


@dataclass(frozen=True, slots=True)
class Resolver:
    """Turns names into passes for models of one ZeRO stage."""

    stage: int
    registry: PassRegistry = REGISTRY
    disabled: tuple[str, ...] = ()
    total_bytes: int = field(default_factory=device_bytes)
    """Memory of the device, of which budgets given as fractions are a part."""
    extra: tuple[str, ...] = ()
    """Names of passes that run last of their stage, unless they are among the others."""
    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Options of passes by their names; those that a schedule gives a pass win."""

    def passes(
        self, asked: Sequence[PassItem] | None = None, where: str = ""
    ) -> tuple[GraphPass, ...]:
        """Return a checked list of passes.

        Args:
            asked: what to run; None is the preset.
            where: which part of a schedule this is, for messages.

        Raises:
            PassOrderError: an unknown name, a missing requirement, or a conflict.
        """
        known = self.registry.known()
        asked = PRESETS[self.stage] if asked is None else _as_list(asked, where)
        items = [_item(each, self.total_bytes, where) for each in asked]
        said = {each.name for each in items}
        chosen: list[GraphPass] = []
        for item in items:
            found = self._resolved(item, known, where)
            others = {each.name for each in chosen} | (said & {"bucket", "chunk_loss"})
            chosen += [each for each in found if len(found) == 1 or each.name not in others]
        extra = [_lookup(name, known, where) for name in self.extra]
        extra.sort(key=lambda each: list(known).index(each.name))
        chosen = _with_extra(chosen, extra, known)
        disabled = [name for name in self.disabled if name not in PHASES]
        without = {_lookup(name, known, where).name for name in disabled}
        passes = tuple(self._bound(each) for each in chosen if each.name not in without)
        if any(name in ALIASES and name not in ("z1", "z2", "z3") for name in said):
            passes = _in_order_of_preset(passes, self.stage)
        check_order(passes, known, where)
        return passes

    def timetable(self, schedule: Schedule) -> Timetable:
        """Return a checked schedule.

        Raises:
            PassOrderError: it is not a list of steps and lists of passes, or a list is wrong.
        """
        entries = []
        for index, entry in enumerate(_as_list(schedule, "schedule")):
            is_pair = isinstance(entry, tuple | list) and len(entry) == 2
            if not is_pair or isinstance(entry[0], bool) or not isinstance(entry[0], int):
                raise PassOrderError(
                    f"schedule[{index}] is {entry!r}: write (step, [pass, ...]) with a whole number"
                )
            step, asked = entry
            if step < 0 or step in {each.step for each in entries}:
                what = "is negative" if step < 0 else "is given twice"
                raise PassOrderError(f"schedule[{index}]: step {step} {what}")
            if entries and step < entries[-1].step:
                raise PassOrderError(
                    f"schedule[{index}]: step {step} comes behind step {entries[-1].step}: list the entries "
                    "in the order in which they take effect"
                )
            entries.append(ScheduleEntry(step, self.passes(asked, f"schedule step {step}: ")))
        if not entries or entries[0].step > 0:
            entries.insert(0, ScheduleEntry(0, self.passes()))
        return Timetable(tuple(entries))

    def _resolved(
        self, item: _Item, known: Mapping[str, GraphPass], where: str
    ) -> tuple[GraphPass, ...]:
        what, options = item.what, item.options
        if isinstance(what, GraphPass):
            found: tuple[GraphPass, ...] = (what,)
        elif isinstance(what, str):
            found = self._named(what, known, where)
        elif callable(what):
            found = (self.registry.of_function(what),)
        else:
            raise PassOrderError(
                f"{where}{what!r} is no pass: give a name, a function, a GraphPass, or a pair of "
                "one of them and a memory budget or a dict of its options"
            )
        if options and len(found) != 1:
            raise PassOrderError(
                f"{where}{what!r} stands for several passes: give options to one of them"
            )
        if options:
            try:
                found = (found[0].with_options(**options),)
            except PassError as error:
                raise PassOrderError(f"{where}{error}") from None
        if item.budget_bytes is None:
            return found
        return tuple(replace(each, memory_budget_bytes=item.budget_bytes) for each in found)

    def _bound(self, each: GraphPass) -> GraphPass:
        """Return a pass with the options that settings give it, under those that it has."""
        given = self.options.get(each.name, {})
        return each.with_options(**{**given, **dict(each.options)}) if given else each

    def _named(
        self, name: str, known: Mapping[str, GraphPass], where: str
    ) -> tuple[GraphPass, ...]:
        if name in PHASES:
            logger.info("%spass %r does nothing here", where, name)
            return ()
        if name.endswith("_compile") and name in ALIASES:
            whole = (*BASIS, ALIASES[name], *COMMUNICATION[ALIASES[name]])
            return tuple(known[each] for each in whole)
        return (_lookup(name, known, where),)


def resolve_passes(
    stage: int,
    asked: Sequence[PassItem] | None = None,
    disabled: Iterable[str] = (),
    options: Mapping[str, Mapping[str, object]] | None = None,
) -> tuple[GraphPass, ...]:
    """Turn a user's choice into a checked list of passes.

    Args:
        stage: ZeRO stage, which chooses the preset.
        asked: names, passes or functions to run instead of the preset.
        disabled: names to leave out.
        options: options of passes by their names.

    Raises:
        PassOrderError: an unknown name, a missing requirement, or a conflict.
    """
    return Resolver(stage, disabled=tuple(disabled), options=options or {}).passes(asked)


def validate_schedule(schedule: Schedule, registry: PassRegistry | None = None) -> None:
    """Check a schedule without running anything.

    Args:
        schedule: `[(step, [pass, (pass, memory budget), ...]), ...]`.
        registry: passes by name; default: the built-in ones and those registered for the process.

    Raises:
        PassOrderError: an unknown name, a missing requirement, or a conflict; the text says which
            pass, at which step, what it lacks, what came before, and which pass would provide it.

    Example:
        >>> validate_schedule([(0, ["zero3_compile"]), (5, ["zero3_compile", "prefetch"])])
    """
    Resolver(3, registry or REGISTRY).timetable(schedule)


def check_order(
    passes: Sequence[GraphPass], known: Mapping[str, GraphPass], where: str = ""
) -> None:
    """Check what passes need, what they exclude, and that joint ones come first.

    Args:
        passes: in the order in which they run.
        known: all registered passes by name, to suggest one that provides what is missing.
        where: the beginning of messages, e.g. the step of a schedule.

    Raises:
        PassOrderError: something is missing, excluded, or in the wrong place.
    """
    provided: set[str] = set()
    names: list[str] = []
    stage_seen = STAGES[0]
    for each in passes:
        missing = each.requires - provided
        if missing:
            need = ", ".join(sorted(missing))
            givers = [p.name for p in known.values() if p.provides & missing]
            raise PassOrderError(
                f"{where}pass {each.name!r} needs {need!r}, which no earlier pass provides: put "
                f"{' or '.join(map(repr, givers)) or 'a pass that provides it'} before it, or "
                f"disable {each.name!r} (so far: {', '.join(names) or 'nothing'})"
            )
        clash = sorted(p.name for p in passes if p.name in each.conflicts_with and p is not each)
        if clash:
            raise PassOrderError(
                f"{where}passes {each.name!r} and {clash[0]!r} exclude each other: drop one "
                f"(so far: {', '.join(names) or 'nothing'})"
            )
        if STAGES.index(each.stage) < STAGES.index(stage_seen):
            raise PassOrderError(
                f"{where}pass {each.name!r} works on the {each.stage} graph and must come before "
                f"{names[-1]!r}, which works on {_GRAPHS[stage_seen]}"
            )
        if each.name in names:
            raise PassOrderError(f"{where}pass {each.name!r} is listed twice: keep one")
        stage_seen = each.stage
        provided |= each.provides
        names.append(each.name)


def _lookup(name: str, known: Mapping[str, GraphPass], where: str = "") -> GraphPass:
    found = known.get(ALIASES.get(name, name))
    if found is None:
        near = difflib.get_close_matches(name, [*known, *ALIASES], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PassOrderError(
            f"{where}unknown pass {name!r}{hint or '.'} Known passes: {', '.join(known)}"
        )
    return found


def _with_extra(
    chosen: list[GraphPass], extra: list[GraphPass], known: Mapping[str, GraphPass]
) -> list[GraphPass]:
    """Add passes that settings enable, except those whose requirements the user's list does not provide."""
    halves = [SECOND_HALF.get(each.name) for each in (*chosen, *extra)]
    for each in (*extra, *(known[name] for name in halves if name is not None)):
        provided = frozenset[str]().union(*(other.provides for other in chosen))
        if not each.requires <= provided or any(each.name == other.name for other in chosen):
            continue
        own = STAGES.index(each.stage)
        later = (at for at, other in enumerate(chosen) if STAGES.index(other.stage) > own)
        chosen.insert(next(later, len(chosen)), each)
    return chosen


def _in_order_of_preset(passes: tuple[GraphPass, ...], stage: int) -> tuple[GraphPass, ...]:
    """Sort built-in passes as in the preset; each other pass stays behind the pass that it followed.

    DeepSpeed's names say nothing about stages: its `selective_gather` may come last.
    """
    order = {name: index for index, name in enumerate(PRESETS[stage])}
    place, keys = -1, []
    for each in passes:
        is_built_in = PASSES.get(each.name) is not None and each.name in order
        place = max(place, order[each.name]) if is_built_in else place
        keys.append((STAGES.index(each.stage), order[each.name] if is_built_in else place))
    return tuple(each for _, each in sorted(zip(keys, passes, strict=True), key=lambda k: k[0]))


def _as_list(value: Any, where: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise PassOrderError(
            f"{where or 'passes: '}{value!r} is not a list: write [pass, ...]"
            if where != "schedule"
            else f"schedule is {value!r}: write [(step, [pass, ...]), ...]"
        )
    return value
