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

from torchloom.inspect.api.entries import LiveEntry, entries
from torchloom.inspect.api.expect import expect
from torchloom.inspect.api.explain import Explanation, explain
from torchloom.inspect.api.explain_call import CallReport, explain_call
from torchloom.inspect.api.jit import CompiledEntry, JitFunction, jit
from torchloom.inspect.api.overhead import Overhead, overhead
from torchloom.inspect.api.watch import Watch, watch

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
