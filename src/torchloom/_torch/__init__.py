"""The only door to private torch: `table` lists each name, one module per area uses it."""

from __future__ import annotations

from torchloom.last_words import show_last_words

show_last_words()  # every part that uses torch imports this one
