"""Makes readable text of any bytecode, and hides the values that the program put into it.

Dynamo writes objects and strings that were read while tracing into its code. Printing them would copy secrets
and tensors into a record, and run the `__repr__` of a user's class: only literals of the source are shown.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

from torchloom.inspect.pseudo.rewritten import CONTINUATION, GRAPH, statements

_ADDRESS = re.compile(r"(?<![^\W_])\d{12,}(?![^\W_])")
_GRAPH_ID = re.compile(r"(__compiled_fn_\d+)_[0-9a-f]{8}_[0-9a-f_]{27}")
_NUMBERS = (bool, type(None), type(...), float, complex)
_MAX_BITS = 256
"""Longer integers are hidden: Python refuses to print integers of some thousand digits."""
_MAX_CHARS = 200
_PLAIN_TORCH = ("dtype", "device", "layout", "memory_format")
_type_name = type.__dict__["__name__"].__get__


class Hidden:
    """Stands for a constant whose value is not shown."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def without_values(code: CodeType, original: CodeType | None = None) -> CodeType:
    """Return a copy of a code object in which only literals are left of its constants.

    Names lose the addresses that Dynamo puts into some.

    Args:
        code: any bytecode.
        original: the code of the source, whose strings are shown; default: those of `code`.
    """
    source = code if original is None else original
    known = {*words_of(source), *code.co_names, *code.co_varnames}
    return code.replace(
        co_consts=tuple(_shown(each, known) for each in code.co_consts),
        co_names=without_ids(code.co_names),
    )


def _shown(value: Any, known: Collection[str]) -> Any:  # noqa: PLR0911
    """Return a literal as it is, anything else as its type."""
    kind = type(value)
    # Types are compared by identity alone: a metaclass of the program may define `==`.
    if any(kind is each for each in (CodeType, *_NUMBERS, *_plain_torch())):
        return value
    if kind is int:
        return value if value.bit_length() <= _MAX_BITS else Hidden("<int>")
    if kind is str or kind is bytes:
        if (value if kind is str else value.decode("latin-1")) not in known:
            return Hidden(f"<{kind.__name__}>")
        return value if len(value) <= _MAX_CHARS else Hidden(f"{value[:_MAX_CHARS]!r}...")
    if kind is tuple or kind is frozenset:
        return kind(_shown(each, known) for each in value)
    if kind is slice:
        parts = (_shown(each, known) for each in (value.start, value.stop, value.step))
        return slice(*parts)
    return Hidden(f"<{_type_name(kind)}>")


def _plain_torch() -> list[type]:
    """Return torch's types whose values are words such as `torch.float32`, if torch is loaded."""
    torch = sys.modules.get("torch")
    return [] if torch is None else [getattr(torch, name) for name in _PLAIN_TORCH]


def words_of(code: CodeType) -> Iterator[str]:
    """Yield the names and the strings in a code object, those of nested functions included; bytes as text."""
    yield from (code.co_name, *code.co_names, *code.co_varnames)
    yield from (*code.co_freevars, *code.co_cellvars)
    yield from _words_in(code.co_consts)


def _words_in(constants: Iterable[Any]) -> Iterator[str]:
    for each in constants:
        # By exact type: Dynamo puts objects of the program among constants.
        kind = type(each)
        if kind is str:
            yield each
        elif kind is bytes:
            yield each.decode("latin-1")
        elif kind is CodeType:
            yield from words_of(each)
        elif kind is tuple or kind is frozenset:
            yield from _words_in(each)


def without_ids(names: Sequence[str]) -> tuple[str, ...]:
    """Return names without the addresses and the ids of graphs that Dynamo puts into some.

    Example:
        >>> without_ids(["___module_deque_140586701475392_c1", "x"])
        ('___module_deque_id1_c1', 'x')
    """
    seen: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return seen.setdefault(match[0], f"id{len(seen) + 1}")

    return tuple(_ADDRESS.sub(number, _GRAPH_ID.sub(r"\1", name)) for name in names)


_INDENT = "    "
_ENDS = (
    "RETURN_VALUE",
    "RETURN_CONST",
    "RAISE_",
    "RERAISE",
    "JUMP_FORWARD",
    "JUMP_ABSOLUTE",
    "JUMP_BACKWARD",
)
"""Instructions behind which the next one does not follow."""


def pseudo_source(
    code: CodeType, title: str | None = None, *, original: CodeType | None = None
) -> str:
    """Return readable text of a code object; never raises, and shows no objects.

    Of code that Dynamo wrote, these are its calls of graphs and of continuations, its branches and the user's
    lines at which they are; of other code the user's own lines. The rest is shown as its instructions.

    Args:
        code: any bytecode, as compiled or as rewritten by Dynamo.
        title: what to call the function; default: the code's own name.
        original: what Dynamo rewrote. Strings that it lacks are values of the program: not shown.
    """
    try:
        shown = without_values(code, code if original is None else original)
        is_rewritten = original is not None or any(
            name.startswith((GRAPH, CONTINUATION)) for name in code.co_names
        )
        lines = None if is_rewritten else _user_lines(shown)
        if lines is None:
            lines = statements(shown, _reached(shown, handlers=False), user_texts(shown))
        start = (
            "async def"
            if code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
            else "def"
        )
        head = f"{start} {title or code.co_name}{_parameters(shown)}:"
        return "\n".join([head, *(_INDENT + line for line in lines)])
    except Exception as error:  # noqa: BLE001  bytecode of any later Python: a listing is better than nothing
        return _listed(code, original, error)


def bytecode_listing(code: CodeType, original: CodeType | None = None) -> str:
    """Return the instructions of a code object, one per line; constants as in `pseudo_source`."""
    shown = without_values(code, original)
    consts = tuple(
        Hidden(f"<code {each.co_name}>") if isinstance(each, CodeType) else each
        for each in shown.co_consts
    )
    return dis.Bytecode(shown.replace(co_consts=consts)).dis()


def _listed(code: CodeType, original: CodeType | None, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}"
    try:
        listing = bytecode_listing(code, original)
    except Exception:  # noqa: BLE001  `dis` on code that it does not know: nothing is left to show
        return f"# not readable ({reason})"
    return f"# not readable as source ({reason}); bytecode:\n{listing}"


def _parameters(code: CodeType) -> str:
    cells = tuple(CellType() for _ in code.co_freevars)
    return str(inspect.signature(FunctionType(code, {}, closure=cells or None)))


def user_texts(code: CodeType) -> dict[int, str]:
    """Return the source of each line that begins in a code object, by the offset of its first instruction."""
    texts = {
        at: linecache.getline(code.co_filename, line).strip()
        for at, line in dis.findlinestarts(code)
        if line and line > code.co_firstlineno
    }
    return {at: text for at, text in texts.items() if text}


def _user_lines(code: CodeType) -> list[str] | None:
    """Return the source of the lines that a code object can reach; None where there is no source."""
    reached, at = _reached(code, handlers=True), 0
    lines: dict[int, bool] = {}
    starts = dict(dis.findlinestarts(code))
    for ins in dis.get_instructions(code):
        at = starts.get(ins.offset) or at
        if at > code.co_firstlineno and ins.opname not in ("RESUME", "NOP", "CACHE"):
            lines[at] = lines.get(at, False) or ins.offset in reached
    shown = [line for line in lines if lines[line]]
    if not shown:
        return None
    # A line without instructions, such as `else:`, goes with the lines around it.
    wanted = (line for line in range(min(shown), max(shown) + 1) if lines.get(line, True))
    texts = [linecache.getline(code.co_filename, line).rstrip() for line in wanted]
    return textwrap.dedent("\n".join(texts)).splitlines() if any(texts) else None


def _reached(code: CodeType, *, handlers: bool) -> set[int]:
    """Return the offsets of the instructions that can run, with or without handlers of exceptions."""
    bytecode = dis.Bytecode(code)
    instructions = list(bytecode)
    index = {ins.offset: i for i, ins in enumerate(instructions)}
    ranges = getattr(bytecode, "exception_entries", ()) if handlers else ()
    found: set[int] = set()
    todo = [0]
    while todo:
        at = todo.pop()
        if at in found or at not in index:
            continue
        found.add(at)
        ins = instructions[index[at]]
        if not ins.opname.startswith(_ENDS) and index[at] + 1 < len(instructions):
            todo.append(instructions[index[at] + 1].offset)
        jumps = ins.opcode in dis.hasjrel or ins.opcode in dis.hasjabs
        if jumps and (handlers or not ins.opname.startswith("SETUP_")):
            todo.append(ins.argval)
        todo += [each.target for each in ranges if each.start <= at < each.end]
    return found
