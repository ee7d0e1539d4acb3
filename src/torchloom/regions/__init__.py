"""Equal parts of a captured graph, such as the layers of a decoder, compiled as one body.

Files in the order in which they work: `checkpoints` and `normalize` make layers look equal, `labels` says which nodes
do the same, `repeats` finds labels that follow upon each other again and again, `find` cuts them into parts whose data
flows in the same way, `outline` puts calls in their place, `body` traces what the calls stand for, `halves` splits that
into forward and backward. Serving uses `find` and `labels`, too. README.md tells it in one page.
"""

from __future__ import annotations

from torchloom.regions.body import RegionBody
from torchloom.regions.find import MIN_REPEATS, Found, Part, find_regions
from torchloom.regions.halves import SplitBody
from torchloom.regions.outline import Outlined, RegionCalls, outline

__all__ = [
    "MIN_REPEATS",
    "Found",
    "Outlined",
    "Part",
    "RegionBody",
    "RegionCalls",
    "SplitBody",
    "find_regions",
    "outline",
]
