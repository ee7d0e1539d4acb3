"""A graph in pieces, each compiled once.

`split` cuts a graph, by layers (which `regions` finds) and operators that stay as they are, into each `piece`,
which is named by what it computes.
`lower` compiles a piece, with `inductor_options` and passes of the user's (`named_pass`).
"""

from __future__ import annotations
