"""The door "see": what torch.compile did with a function, and what it would do with a call.

The parts, from the top down; `listen` and `record` do not know each other:

    api       what users call: watch, explain, explain_call, entries, expect, overhead, jit
    record    turns what a watch collected into a record
    listen    hooks that collect while the watched program runs
    collected the data that `listen` hands to `record`
    live      what torch.compile holds now: functions, entries, guards, continuations
    wording   guards, reasons and graphs in words; hides strings that may be secrets
    pseudo    bytecode as text to read
"""

from __future__ import annotations

from torchloom.inspect.api.entries import (
    CallReport,
    LiveEntry,
    Overhead,
    entries,
    explain_call,
    overhead,
)
from torchloom.inspect.api.jit import CompiledEntry, JitFunction, jit
from torchloom.inspect.api.watch import Explanation, Watch, expect, explain, watch

__all__ = [
    "CallReport",
    "CompiledEntry",
    "Explanation",
    "JitFunction",
    "LiveEntry",
    "Overhead",
    "Watch",
    "entries",
    "expect",
    "explain",
    "explain_call",
    "jit",
    "overhead",
    "watch",
]
