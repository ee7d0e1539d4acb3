"""The functions, entries and graph breaks of a record under the names that addresses of views use."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from posixpath import commonpath, dirname
from urllib.parse import quote

from torchloom.records import Break, Entry, Function, Session
from torchloom.report.page.elements import link


@dataclass(kw_only=True, eq=False)
class EntryItem:
    """An entry under its address."""

    entry: Entry
    owner: FunctionItem
    id: str
    name: str

    def link(self) -> list[str]:
        """Return a link to its view."""
        return link(f"entry/{_quoted(self.id)}", self.name)

    @property
    def compile_s(self) -> float:
        """Seconds as torch's metrics tell them; graphs captured to be served have spans alone."""
        if "compile_s" in self.entry.metrics:
            return self.entry.compile_s
        return sum(span.end - span.start for span in nested(self.entry) if not span.lane)

    @property
    def calls(self) -> str:
        """Calls are counted at graphs; of an entry without one the number may not be known."""
        return str(self.entry.num_hits) if self.entry.is_counted else "not counted"


@dataclass(kw_only=True, eq=False)
class FunctionItem:
    """A function under its address."""

    fn: Function
    parent: FunctionItem | None
    depth: int
    id: str
    entries: list[EntryItem] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name; that of what it continues where it is the rest of a function."""
        return rest_name(self.fn.name, self.fn.line)

    def link(self) -> list[str]:
        """Return a link to its view."""
        return link(f"fn/{_quoted(self.id)}", self.name)


@dataclass(kw_only=True)
class BreakItem:
    """A graph break at one place, with the function and the entry that met it first."""

    each: Break
    owner: FunctionItem
    item: EntryItem | None
    count: int = 0


@dataclass(kw_only=True)
class Lane:
    """A compile span, on the lane of what it lies inside of; times in seconds."""

    name: str
    start: float
    end: float
    lane: int
    own_s: float
    """Without the spans inside it."""


class Index:
    """What a record holds, by the names of the page."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.functions: list[FunctionItem] = []
        self.entries: list[EntryItem] = []
        self._taken: set[str] = set()
        for function in session.functions:
            self._add(function, None, 0)
        self.breaks = self._breaks()
        paths = [i.fn.file for i in self.functions if i.fn.file.startswith("/")]
        own = [dirname(path) for path in paths if "/site-packages/" not in path]
        root = commonpath(own) if own else "/"
        self._root = f"{root}/" if root != "/" else ""

    def short(self, place: str) -> str:
        """Return a path without the folder that all files share; of one elsewhere, its end."""
        if self._root and place.startswith(self._root):
            return place.removeprefix(self._root)
        installed = re.sub(r"^.*/site-packages/", "", place)
        return re.sub(r"^/.*?((?:/[^/]+){3})$", r"…\1", installed)

    def place(self, function: Function) -> str:
        """Return where a function is defined."""
        return f"{self.short(function.file)}:{function.line}" if function.file else ""

    def _add(self, function: Function, parent: FunctionItem | None, depth: int) -> None:
        address = self._unique("fn", function.name)
        item = FunctionItem(fn=function, parent=parent, depth=depth, id=address)
        self.functions.append(item)
        for entry in function.entries:
            name = entry.compile_id + (f"@{entry.epoch}" if entry.epoch else "")
            address = self._unique("entry", name.replace("/", "-"))
            item.entries.append(EntryItem(entry=entry, owner=item, id=address, name=name))
        self.entries += item.entries
        for child in function.children:
            self._add(child, item, depth + 1)

    def _unique(self, what: str, name: str) -> str:
        found, number = name, 2
        while f"{what}/{found}" in self._taken:
            found, number = f"{name}~{number}", number + 1
        self._taken.add(f"{what}/{found}")
        return found

    def _breaks(self) -> list[BreakItem]:
        found: dict[tuple[str, str], BreakItem] = {}
        for owner in self.functions:
            rows: list[tuple[list[Break], EntryItem | None]] = [(owner.fn.breaks, None)]
            rows += [(item.entry.breaks, item) for item in owner.entries]
            for each, item in ((each, item) for breaks, item in rows for each in breaks):
                key = (each.gb_type or each.reason, each.place)
                seen = found.setdefault(key, BreakItem(each=each, owner=owner, item=item))
                seen.count += each.count
        return sorted(found.values(), key=lambda each: -each.count)


def nested(entry: Entry) -> list[Lane]:
    """Return the compile spans of an entry by what lies inside what.

    The recorded depth is that of torch's events, some of which may be missing.
    """
    found: list[Lane] = []
    around: list[Lane] = []
    for span in sorted(entry.spans, key=lambda each: (each.start_us, -each.duration_us)):
        start, long = span.start_us / 1e6, span.duration_us / 1e6
        while around and around[-1].end <= start + 1e-9:
            around.pop()
        if around:
            around[-1].own_s -= max(0.0, min(start + long, around[-1].end) - start)
        around.append(
            Lane(name=span.name, start=start, end=start + long, lane=len(around), own_s=long)
        )
        found.append(around[-1])
    return found


def rest_name(name: str, line: int) -> str:
    """Return the name of a function: torch_dynamo_resume_in_f_at_3 is the rest of f behind a graph break."""
    rest = re.match(r"torch_dynamo_resume_in_(.+)_at_(\d+)$", name)
    return f"{rest[1]}, from line {line or rest[2]} on" if rest else name


def _quoted(text: str) -> str:
    return quote(text, safe="~()*!.'", errors="replace")
