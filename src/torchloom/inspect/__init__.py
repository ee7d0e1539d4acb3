"""The door "see": what torch.compile did with a function, and what it would do with a call."""

from __future__ import annotations

from torchloom.inspect.call import CallReport, explain_call
from torchloom.inspect.expect import expect
from torchloom.inspect.explain import Explanation, explain
from torchloom.inspect.jit import CompiledEntry, JitFunction, jit
from torchloom.inspect.live import LiveEntry, entries
from torchloom.inspect.overhead import Overhead, overhead
from torchloom.inspect.watch import Watch, watch

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
