"""Hooks that run inside the watched program: on the trace, on Dynamo's lookups, on calls of entries.

They copy and count, never raise into the program, and are removed when the block ends. `collector` opens all of
them and returns what they collected as a `torchloom.inspect.collected.Collected`.
"""

from __future__ import annotations
