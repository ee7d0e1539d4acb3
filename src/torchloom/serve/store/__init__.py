"""Programs on disk: signed entries, and the objects that they name by their hash.

`folder` is the store itself, and `signing_key` says who wrote an entry. `entries` writes a program as an entry and its
objects, and makes it runnable again. `misses` tells one program from another, and says why none fits.
"""

from __future__ import annotations
