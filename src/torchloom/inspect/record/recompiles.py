"""Says why Dynamo recompiled, and advises: the older entry, what it expected, what it got, what ends the recompiles.

Only an argument that the user's own code passes can be marked dynamic. What follows a graph break is handed values
that the compiled function made: then the advice is to compile the function that the user calls with dynamic sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from torchloom._torch import introspect
from torchloom.inspect.record.compiles import Compile
from torchloom.inspect.wording.english import (
    check_in,
    source_in_words,
    value_in_words,
    without_addresses,
)
from torchloom.inspect.wording.hider import without_values
from torchloom.inspect.wording.reasons import (
    ANOTHER,
    ANOTHER_LENGTH,
    BRANCH,
    NAN,
    TYPES,
    reason_of,
)
from torchloom.records import Entry, Function, Recompile


def parse_reasons(payload: str, shown: Callable[[str], str]) -> list[Recompile]:
    """Read one `recompile_reasons`: a text, or a JSON list of texts, one per older entry.

    Args:
        payload: as Dynamo logs it.
        shown: as for `parse_reason`.
    """
    try:
        data = json.loads(payload)
    except ValueError:
        data = payload
    texts = data if isinstance(data, list) else [data]
    return [parse_reason(str(text), shown) for text in texts]


def parse_reason(text: str, shown: Callable[[str], str] = without_values) -> Recompile:
    """Read one reason, such as `0/0: tensor 'x' size mismatch at index 0. expected 10, actual 8`.

    Args:
        text: as Dynamo logs it.
        shown: returns what may be shown of a check.

    Example:
        >>> r = parse_reason("0/0: tensor 'x' size mismatch at index 0. expected 10, actual 8")
        >>> r.entry, r.expected, r.actual
        ('0/0', 'size(0) == 10', '8')
    """
    entry, _, rest = text.partition(": ")
    if not re.fullmatch(r"[\d/]+", entry.strip()):
        entry, rest = "", text
    body = shown(check_in(rest))
    reason = reason_of(body)
    return Recompile(
        entry=entry.strip(),
        source=reason.source,
        expected=reason.expected,
        actual=reason.actual,
        text=without_addresses(body),
        fix=reason.fix,
    )


def explain_recompiles(entry: Entry) -> None:
    """Add to each reason the value of the call, and whether the new entry fits other values as well."""
    for each in entry.recompiles:
        if entry.guards and each.actual in (ANOTHER, ANOTHER_LENGTH):
            _explain_value(entry, each)


def _explain_value(entry: Entry, reason: Recompile) -> None:
    """Add the value of the call if the new entry requires it; otherwise the entry fits other values too."""
    about = [g for g in entry.guards if source_in_words(g.source) == reason.source]
    if reason.actual == ANOTHER_LENGTH:
        lengths = (re.fullmatch(r"len\(.*\) == (.+)", guard.text) for guard in about)
        reason.actual = next((f"len {found.group(1)}" for found in lengths if found), reason.actual)
        return
    for guard in about:
        said = value_in_words(guard)
        if guard.english.endswith(" is nan"):
            reason.actual, reason.fix = "nan", NAN
        elif guard.kind == "TYPE_MATCH" and reason.expected.startswith("== "):
            _explain_type(entry, reason, said)
        elif said and guard.kind != "TYPE_MATCH":
            reason.actual = said.removeprefix("== ")


_DYNAMIC = (
    ("an `int`", r"== -?\d+", "integers"),
    ("a `float`", r"== (?:-?[\d.]+(?:e[+-]?\d+)?|-?inf|nan)", "floats"),
)


def _explain_type(entry: Entry, reason: Recompile, said: str) -> None:
    """Add the type of the value in the call, or say that the new entry fits other values of that type."""
    for named, number, words in _DYNAMIC:
        if said == named and re.fullmatch(number, reason.expected):
            reason.actual = re.sub("^an? ", "another ", said)
            reason.fix = f"now dynamic: entry {entry.compile_id} serves other {words} as well"
            return
    if "`" in said:
        reason.actual, reason.fix = said, TYPES


def name_sources(compile_: Compile) -> None:
    """Name closure variables, the callable inside torch's wrapper function, and the arguments of a module's forward.

    What torchloom puts in front of a module takes `*args, **kwds`. Guards, reasons and arguments of the entry are
    changed in place.
    """
    code, entry = compile_.code, compile_.entry
    if code is None:
        return
    renames: list[tuple[str, str]] = []
    names = introspect.forward_arguments(code)
    if names is not None:
        own = ("args", "kwds", "call")
        entry.trigger = {name: value for name, value in entry.trigger.items() if name not in own}
        renames += [(rf"args\[{i}\]", name) for i, name in enumerate(names)]
        renames += [(r"kwds\['(\w+)'\]", r"\1"), (r"(?:argument )?\bcall\.__self__", "self")]
    if compile_.wrapped is not None:
        renames.append((r"\bargument fn\b", "self"))
    else:
        renames += [(rf"\bargument {n}\b", f"closure variable {n}") for n in code.co_freevars]

    def named(text: str) -> str:
        for old, new in renames:
            text = re.sub(old, new, text)
        return text

    entry.trigger = {named(name): value for name, value in entry.trigger.items()}
    for guard in entry.guards:
        guard.english = named(guard.english)
    for reason in entry.recompiles:
        reason.source = named(reason.source)


_CALL = re.compile(r"(.+):\d+ in (.+)")


def advise(roots: Sequence[Function]) -> None:
    """Add to each reason what ends the recompiles of a constant or a size that changes, in place.

    Only here is all known that it depends on: names, the new entry, the function that the user calls.
    """
    groups: dict[int, list[tuple[Function, Function, Entry, Recompile]]] = {}
    for root in roots:
        called = _called_by_user(root, roots)
        rows = ((f, e, each) for f in root.walk() for e in f.entries for each in e.recompiles)
        for function, entry, each in rows:
            if each.expected.startswith("== "):
                each.fix = each.fix or constant_fix(each.source, each.expected[3:])
            elif _SIZE.fullmatch(each.expected):
                groups.setdefault(id(called), []).append((called, function, entry, each))
    for group in groups.values():
        # A mark does not outlive a graph break: it helps where all is one graph.
        is_alone = all(function is called for called, function, _, _ in group)
        for called, _, entry, each in group:
            # torch hands on what the compiled function made as `___stack0`.
            is_argument = each.source.startswith("argument ") and "___" not in each.source
            each.fix = _size_fix(entry, each, called.name, is_alone and is_argument)


_NUMBER = r"-?[\d.]+(?:e[+-]?\d+)?|-?inf|nan"
_GLOBAL = "a global is a constant of the graph: pass it as an argument"
_CONSTANTS = (
    ("global .*", _NUMBER, f"{_GLOBAL}, as a tensor"),
    ("global .*", ".*", _GLOBAL),
    (
        "self.*",
        _NUMBER,
        "an attribute of a module is a constant of the graph: make it a buffer, or an argument",
    ),
    (
        "self.*",
        ".*",
        "an attribute of a module is a constant of the graph: keep it, or pass it as an argument",
    ),
    (
        "closure variable .*",
        r"-?\d+",
        "a closure variable is a constant of the graph: pass it as an argument",
    ),
    # Of a name alone nothing tells whether it is a module whose attribute this is.
    (r"\w* ?\w+", r"-?\d+", "pass it as a tensor, or compile with dynamic=True"),
    (
        ".*",
        r"-?\d+",
        "pass it as a tensor, or as an argument of its own; dynamic=True does not help where it is an "
        "attribute of a module",
    ),
    (".*", _NUMBER, "pass it as a tensor"),
    (".*", ".*", BRANCH),
)
"""A value in words, what was expected of it as code, and what ends the recompiles; the first row that fits counts."""


def constant_fix(source: str, value: str) -> str:
    """Return the advice that ends recompiles for a constant that changes.

    Args:
        source: in words. Only numbers among the arguments themselves can become dynamic.
        value: as code.
    """
    rows = ((each, fix) for where, each, fix in _CONSTANTS if re.fullmatch(where, source, re.S))
    return next(fix for each, fix in rows if re.fullmatch(each, value, re.S))


_SIZE = re.compile(r"size\((\d+)\) == (\d+)")
_APART = "sizes 0 and 1 are compiled apart, also with dynamic=True"


def _size_fix(entry: Entry, each: Recompile, name: str, can_mark: bool) -> str:
    """Return the advice that ends recompiles for a size that changes, in calls of the function `name`."""
    index, old = map(int, _SIZE.findall(each.expected)[0])
    tensor = each.source.removeprefix("argument ")
    marked = f"({tensor}, {index}) before the {{}}call of {name}"
    lowest = _lowest(entry, each.source, index)
    if lowest is not None:
        saves = f"compiling {name} with dynamic=True saves this compile"
        if old < lowest:
            saves = _APART
        elif can_mark:
            saves = f"torch._dynamo.mark_dynamic{marked.format('first ')} saves this compile"
        return f"now dynamic: entry {entry.compile_id} serves sizes >= {lowest}; {saves}"
    if {str(old), each.actual} & {"0", "1"}:
        unbacked = f", or torch._dynamo.decorators.mark_unbacked{marked.format('')}"
        return f"{_APART}: pad to 2 or more{unbacked if can_mark else ''}"
    if can_mark:
        return f"torch._dynamo.mark_dynamic{marked.format('')}, dynamic=True, or pad to one size"
    return f"compile {name} with dynamic=True, or pad to one size"


_SIZES = re.compile(r"size=\[([^\]]*)\]")


def _lowest(entry: Entry, source: str, index: int) -> int | None:
    """Return the smallest size that an entry accepts for a dim; None if it accepts one size only."""
    of = (g for g in entry.guards if g.kind == "TENSOR_MATCH")
    guard = next((g for g in of if g.english.startswith(f"{source} is a")), None)
    sizes = _SIZES.search(guard.text) if guard else None
    parts = [part.strip() for part in sizes[1].split(",")] if sizes else []
    if guard is None or index >= len(parts) or parts[index] != "None":
        return None
    size = re.escape(f"{guard.source}.size()[{index}]")
    bounds = re.compile(rf"(\d+) <= {size}|{size} >= (\d+)")
    found = (bounds.search(each.text) for each in entry.guards)
    return max((int(match[1] or match[2]) for match in found if match), default=0)


def _called_by_user(function: Function, roots: Sequence[Function]) -> Function:
    """Return the outermost function of the record in whose call another one was compiled."""
    known = {(each.file, each.name.rpartition(".")[2]): each for each in roots}
    stack = next((entry.stack for entry in function.entries if entry.stack), [])
    calls = (known.get((call[1], call[2])) for each in stack if (call := _CALL.fullmatch(each)))
    return next((each for each in calls if each is not None), function)
