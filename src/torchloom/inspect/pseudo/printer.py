"""The entry points: pseudo-source and a listing of any bytecode."""

from __future__ import annotations

import dis
from types import CodeType

from torchloom.inspect.pseudo.constants import Hidden, without_values
from torchloom.inspect.pseudo.flow import MAX_LINES, Flow
from torchloom.inspect.pseudo.names import Scope, names_in

_INDENT = "    "


def pseudo_source(
    code: CodeType, title: str | None = None, *, original: CodeType | None = None
) -> str:
    """Return readable pseudo-source of a code object; never raises, and shows no objects.

    Args:
        code: any bytecode, as compiled or as rewritten by Dynamo.
        title: what to call the function; default: the code's own name.
        original: what Dynamo rewrote. Strings that it lacks are values of the program: not shown.

    Example:
        >>> print(pseudo_source((lambda x: x + 1).__code__, "f"))
        def f(x):
            return x + 1
    """
    try:
        source = code if original is None else original
        shown = without_values(code, source)
        flow = Flow(shown, Scope(shown, names_in(shown)), lambda each: without_values(each, source))
        head, lines = flow.text()
        start = "async def" if code.co_flags & 0x280 else "def"
        lines = [f"{start} {title or code.co_name}({', '.join(head)}):", *lines]
        if len(lines) > MAX_LINES:
            lines[MAX_LINES:] = [f"{_INDENT}# ... (more than {MAX_LINES} lines: cut)"]
        return "\n".join(lines)
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
