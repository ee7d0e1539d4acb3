"""Hooks that are in place while a watched program runs: the trace, lookups, calls of entries.

They copy and count. None raises into the program, and all are removed when the block ends. What they
collected is handed on as the data in `torchloom.inspect.heard`.
"""

from __future__ import annotations
