"""Private torch, row by row: names, patches, and facts about versions. Data alone, readable without torch.

The tests of the table resolve each name on the installed torch, and find each use by the syntax tree.
`docs/versions.md` shows patches and facts.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchloom._torch.table.names import NEEDED, USEFUL
from torchloom._torch.table.patches import FACTS as FACTS
from torchloom._torch.table.patches import PATCHES as PATCHES
from torchloom._torch.table.patches import Fact as Fact
from torchloom._torch.table.patches import Patch as Patch
from torchloom._torch.table.patches import PrivateName as PrivateName


def _rows() -> Iterator[PrivateName]:
    for texts, is_needed in ((NEEDED, True), (USEFUL, False)):
        for without, text in texts.items():
            for line in text.strip().splitlines():
                names, _, since = line.partition(" since=")
                owner, *words = names.split()
                start = owner if owner.endswith(":") else f"{owner}."
                for word in words:
                    name = start + word
                    yield PrivateName(name=name, without=without, is_needed=is_needed, since=since)


NAMES = tuple(_rows())
