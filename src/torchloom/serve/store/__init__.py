"""Programs on disk: signed entries, and the objects that they name by their hash.

`folder` is the store itself, and `signing_key` says who wrote an entry. `entries` turns a program into plain data and back.
`misses` tells one program from another, and says why none fits.
"""

from __future__ import annotations
