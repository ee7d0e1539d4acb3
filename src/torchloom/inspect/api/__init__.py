"""The public functions of this room.

`watch` opens the hooks of `listen` and has `record` make the record; `explain` and `expect` are watches.
`entries` (with `explain_call` and `overhead`) reads what torch holds now, as `jit` does of its functions.
"""

from __future__ import annotations
