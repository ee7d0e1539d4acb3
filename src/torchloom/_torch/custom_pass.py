"""Base classes of what Inductor's hooks take; importing them imports the compiler."""

from __future__ import annotations

from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
