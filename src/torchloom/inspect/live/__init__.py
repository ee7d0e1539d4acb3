"""What torch.compile holds now: the function behind a callable, its entries, guards and continuations.

Nothing here compiles, runs or resets anything, and nothing of the program is asked: an object of the user may
answer to any attribute with code of its own.
"""

from __future__ import annotations
