"""Guards, reasons, graph breaks and graphs in words, and hiding what may be a secret.

Text in, text or plain values out: what torch prints is read here and nowhere else in this room. A sentence of
torch that no rule knows is shown as torch wrote it.
"""

from __future__ import annotations
