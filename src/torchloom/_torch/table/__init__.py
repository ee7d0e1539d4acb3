"""Private torch, row by row: names, patches, and facts about versions. Data alone, readable without torch.

Each private name that `torchloom._torch` uses has a row here; the tests of the table resolve every row on the
installed torch, and find each use by the syntax tree. `docs/versions.md` shows the rows.
"""

from __future__ import annotations

from torchloom._torch.table.aot import AOT
from torchloom._torch.table.bodies import BODIES
from torchloom._torch.table.core import CORE
from torchloom._torch.table.distributed import DISTRIBUTED
from torchloom._torch.table.dynamo import DYNAMO
from torchloom._torch.table.facts import FACTS as FACTS
from torchloom._torch.table.inductor import INDUCTOR
from torchloom._torch.table.inspection import INSPECTION
from torchloom._torch.table.patches import PATCHES as PATCHES
from torchloom._torch.table.records import Fact as Fact
from torchloom._torch.table.records import Patch as Patch
from torchloom._torch.table.records import PrivateName as PrivateName

AREAS = {
    "torch itself": CORE,
    "torch.distributed": DISTRIBUTED,
    "AOTAutograd, its partitioner, FX": AOT,
    "Bodies of equal layers": BODIES,
    "Inductor": INDUCTOR,
    "Dynamo, compiling and capturing": DYNAMO,
    "Dynamo, its live state": INSPECTION,
}
"""The rows of names by the part of torch that they are of."""

NAMES: tuple[PrivateName, ...] = tuple(row for rows in AREAS.values() for row in rows)
