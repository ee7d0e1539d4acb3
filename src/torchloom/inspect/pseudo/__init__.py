"""Readable pseudo-source of bytecode: what the code that Dynamo wrote does.

For display alone. Whatever the bytecode, the answer is text: an instruction that is not known
becomes a comment. Pure Python, without torch, for CPython 3.10 to 3.14.
"""

from __future__ import annotations

from torchloom.inspect.pseudo.printer import bytecode_listing, pseudo_source

__all__ = ["bytecode_listing", "pseudo_source"]
