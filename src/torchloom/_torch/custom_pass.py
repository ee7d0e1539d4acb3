"""Base classes of what Inductor's hooks take; importing them imports the compiler (2.11-2.15)."""

from __future__ import annotations

from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
