"""Programs on disk: signed entries, and the objects that they name by their hash.

`folder` is the store itself, and `signing_key` says who wrote an entry. `program_key` tells one program from another.
`saved` looks a program up and saves one; `entries` turns a program into plain data and back, `stored_pieces` its
compiled pieces. `misses` says why none fits.
"""

from __future__ import annotations
