"""What torch.compile holds now: the function behind a callable, its entries, guards and continuations.

Nothing here compiles, runs or resets anything.
"""

from __future__ import annotations
