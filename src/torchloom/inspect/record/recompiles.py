"""Says why Dynamo recompiled, and advises: the older entry, what it expected, what it got, what ends the recompiles.

Only an argument that the user's own code passes can be marked dynamic. What follows a graph break is handed values
that the compiled function made: then the advice is to compile the function that the user calls with dynamic sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from torchloom._torch import introspect
from torchloom.inspect.record.compiles import Compile
from torchloom.inspect.wording.english import source_in_words, without_addresses, without_values
from torchloom.inspect.wording.hider import Hider
from torchloom.inspect.wording.reasons import (
    ANOTHER,
    ANOTHER_LENGTH,
    APART,
    ATTRIBUTE_FIX,
    DYNAMIC_FIX,
    NAN,
    TYPES,
    constant_fix,
    reason_of,
)
from torchloom.records import Entry, Function, Guard, Recompile

_CLASS = re.compile(r"<class '([^']+)'>")


def parse_reasons(payload: str, hider: Hider) -> list[Recompile]:
    """Read one `recompile_reasons`: a text, or a JSON list of texts, one per older entry.

    Args:
        payload: as Dynamo logs it.
        hider: notes the keys that the texts name.
    """
    try:
        data = json.loads(payload)
    except ValueError:
        data = payload
    texts = data if isinstance(data, list) else [data]
    return [parse_reason(str(text), hider) for text in texts]


def parse_reason(text: str, hider: Hider | None = None) -> Recompile:
    """Read one reason, such as `0/0: tensor 'x' size mismatch at index 0. expected 10, actual 8`.

    Example:
        >>> r = parse_reason("0/0: tensor 'x' size mismatch at index 0. expected 10, actual 8")
        >>> r.entry, r.expected, r.actual
        ('0/0', 'size(0) == 10', '8')
    """
    entry, _, rest = text.partition(": ")
    if not re.fullmatch(r"[\d/]+", entry.strip()):
        entry, rest = "", text
    body = rest.partition("\nUser stack trace")[0].partition("  # ")[0].strip()
    if hider is not None:
        hider.note(body)
    body = without_values(body, keys_too=hider is None)
    reason = reason_of(body)
    return Recompile(
        entry=entry.strip(),
        source=reason.source,
        expected=reason.expected,
        actual=reason.actual,
        text=without_addresses(body),
        fix=reason.fix,
    )


_SIZE = re.compile(r"size\((\d+)\) == ")
_SIZES = re.compile(r"size=\[([^\]]*)\]")


def explain_recompiles(entry: Entry) -> None:
    """Add to each reason the value of the call, and whether the new entry fits other values as well."""
    if not entry.guards:
        return
    for each in entry.recompiles:
        found = _SIZE.match(each.expected)
        if found:
            _explain_size(entry, each, int(found.group(1)))
        elif each.actual in (ANOTHER, ANOTHER_LENGTH):
            _explain_value(entry, each)


def _explain_size(entry: Entry, reason: Recompile, index: int) -> None:
    lowest = _lowest(entry, reason.source, index)
    if lowest is None:
        return
    old = int(reason.expected.rpartition(" ")[2])
    if old < lowest:
        more = APART
    else:
        more = (
            f"torch._dynamo.mark_dynamic(tensor, {index}) before the first call saves this compile"
        )
    reason.fix = f"now dynamic: entry {entry.compile_id} serves sizes >= {lowest}; {more}"


def _explain_value(entry: Entry, reason: Recompile) -> None:
    """Add the value of the call if the new entry requires it; otherwise the entry fits other values too."""
    about = [g for g in entry.guards if source_in_words(g.source) == reason.source]
    if reason.actual == ANOTHER_LENGTH:
        lengths = (re.fullmatch(r"len\(.*\) == (.+)", guard.text) for guard in about)
        reason.actual = next((f"len {found.group(1)}" for found in lengths if found), reason.actual)
        return
    for guard in about:
        if guard.text.startswith(f"{guard.source} == "):
            reason.actual = guard.text.removeprefix(f"{guard.source} == ")
        elif guard.english.endswith(" is nan"):
            reason.actual, reason.fix = "nan", NAN
        elif guard.kind == "TYPE_MATCH" and reason.expected.startswith("== "):
            _explain_type(entry, reason, guard)


def _explain_type(entry: Entry, reason: Recompile, guard: Guard) -> None:
    """Add the type of the value in the call, or say that the new entry fits other values of that type."""
    named = _CLASS.search(guard.text)
    if named is None:
        return
    for name, words, number in (
        ("int", "integers", r"== -?\d+"),
        ("float", "floats", r"== (?:-?[\d.]+(?:e[+-]?\d+)?|-?inf|nan)"),
    ):
        if named.group(1) == name and re.fullmatch(number, reason.expected):
            reason.fix = f"now dynamic: entry {entry.compile_id} serves other {words} as well"
            return
    reason.actual, reason.fix = f"a `{named.group(1)}`", TYPES


def _lowest(entry: Entry, source: str, index: int) -> int | None:
    """Return the smallest size that an entry accepts for a dim; None if it accepts one size only."""
    for guard in entry.guards:
        if guard.kind != "TENSOR_MATCH" or source_in_words(guard.source) != source:
            continue
        sizes = _SIZES.search(guard.text)
        parts = [part.strip() for part in sizes.group(1).split(",")] if sizes else []
        if index >= len(parts) or parts[index] != "None":
            return None
        return _bound(entry, guard.source, index)
    return None


def _bound(entry: Entry, source: str, index: int) -> int:
    size = re.escape(f"{source}.size()[{index}]")
    lowest = 0
    for guard in entry.guards:
        for pattern in (rf"(\d+) <= {size}", rf"{size} >= (\d+)"):
            found = re.search(pattern, guard.text)
            if found:
                lowest = max(lowest, int(found.group(1)))
    return lowest


_CLOSURE_FIX = "a closure variable is a constant of the graph: pass it as an argument"


def name_sources(compile_: Compile) -> None:
    """Name closure variables, and the callable inside torch's wrapper function, in guards and reasons.

    Guards and reasons of the entry are changed in place.
    """
    code = compile_.code
    if code is None:
        return
    _name_arguments_of_forward(compile_)
    is_wrapped = compile_.wrapped is not None
    names = {"fn": "self"} if is_wrapped else {n: f"closure variable {n}" for n in code.co_freevars}
    for old, new in names.items():
        pattern = re.compile(rf"\bargument {re.escape(old)}(?!\w)")
        for guard in compile_.entry.guards:
            guard.english = pattern.sub(new, guard.english)
        for reason in compile_.entry.recompiles:
            if not pattern.match(reason.source):
                continue
            reason.source = pattern.sub(new, reason.source)
            if reason.fix in (DYNAMIC_FIX, ATTRIBUTE_FIX):
                value = reason.expected.removeprefix("== ")
                reason.fix = constant_fix(reason.source, value) if is_wrapped else _CLOSURE_FIX


def _name_arguments_of_forward(compile_: Compile) -> None:
    """Name arguments as the module's forward does: what torchloom puts in front takes `*args, **kwds`."""
    names = None if compile_.code is None else introspect.forward_arguments(compile_.code)
    if names is None:
        return

    def named(text: str) -> str:
        for i, name in enumerate(names):
            text = text.replace(f"args[{i}]", name)
        text = re.sub(r"kwds\['(\w+)'\]", r"\1", text)
        return re.sub(r"(?:argument )?\bcall\.__self__", "self", text)

    entry = compile_.entry
    own = ("args", "kwds", "call")
    entry.trigger = {named(k): v for k, v in entry.trigger.items() if k not in own}
    for guard in entry.guards:
        guard.english = named(guard.english)
    for reason in entry.recompiles:
        reason.source = named(reason.source)


_MARK = re.compile(r"torch\._dynamo\.(?:decorators\.)?mark_(?:dynamic|unbacked)\(tensor, (\d+)\)")
_CALL = re.compile(r"(.+):\d+ in (.+)")


def advise(roots: Sequence[Function]) -> None:
    """Name the argument to mark in each advice, in place, or say what else ends all recompiles of a call."""
    groups: dict[int, list[tuple[Function, Function, Recompile]]] = {}
    for root in roots:
        called = _called_by_user(root, roots)
        for function in root.walk():
            rows = groups.setdefault(id(called), [])
            rows += [(called, function, each) for each in _about_sizes(function)]
    for rows in groups.values():
        # A mark does not outlive a graph break: it helps where all is one graph.
        is_alone = all(function is called for called, function, _ in rows)
        for called, _, each in rows:
            is_marked = is_alone and _is_argument(each)
            name = each.source.removeprefix("argument ") if is_marked else ""
            each.fix = _advice(each.fix, name, called.name)


def _about_sizes(function: Function) -> Iterator[Recompile]:
    for entry in function.entries:
        yield from (each for each in entry.recompiles if _MARK.search(each.fix))


def _is_argument(each: Recompile) -> bool:
    """Return whether the value is an argument that the source names: torch hands on others as `___stack0`."""
    return each.source.startswith("argument ") and "___" not in each.source


def _advice(fix: str, argument: str, name: str) -> str:
    """Return advice about calls of the function `name`.

    Args:
        fix: says to mark `tensor`.
        argument: the one to mark; "" where a mark does not help.
        name: of the function.
    """
    mark = _MARK.search(fix)
    if mark is None:
        return fix
    before, is_first = fix[: mark.start()], "first call" in fix
    if argument:
        call = mark[0].replace("(tensor,", f"({argument},")
        when = f" before the first call of {name}" if is_first else f" before the call of {name}"
        return f"{before}{call}{when}{fix[mark.end() :].removeprefix(' before the first call')}"
    if is_first:
        return f"{before}compiling {name} with dynamic=True saves this compile"
    if before:  # sizes 0 and 1, which stay apart
        return before.removesuffix(", or ")
    return f"compile {name} with dynamic=True, or pad to one size"


def _called_by_user(function: Function, roots: Sequence[Function]) -> Function:
    """Return the outermost function of the record in whose call another one was compiled."""
    known = {(each.file, each.name.rpartition(".")[2]): each for each in roots}
    stack = next((entry.stack for entry in function.entries if entry.stack), [])
    calls = (known.get((call[1], call[2])) for each in stack if (call := _CALL.fullmatch(each)))
    return next((each for each in calls if each is not None), function)
