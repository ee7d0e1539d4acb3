"""What torch.compile holds now: the function behind a callable, its entries, guards and continuations.

Nothing here compiles, runs or resets anything. Attributes of the user's objects are read statically, since a
class may run code of its own in `__getattr__`.
"""

from __future__ import annotations
