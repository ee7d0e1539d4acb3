"""The public functions of this room, one module each.

`watch` opens the hooks of `listen` and has `record` make the record; `explain` and `expect` are watches.
`entries`, `explain_call`, `overhead` and `jit` read what torch holds now, and compile nothing by themselves.
"""

from __future__ import annotations
