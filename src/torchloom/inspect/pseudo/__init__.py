"""Bytecode as text to read, for CPython 3.10 to 3.14; pure Python, without torch, and it never fails.

source      pseudo_source: what Dynamo wrote, or the user's own lines; bytecode_listing; hides the program's values
rewritten   code that Dynamo wrote: calls of graphs and of continuations, branches
"""

from __future__ import annotations

from torchloom.inspect.pseudo.rewritten import CONTINUATION, GRAPH
from torchloom.inspect.pseudo.source import bytecode_listing, pseudo_source

__all__ = ["CONTINUATION", "GRAPH", "bytecode_listing", "pseudo_source"]
