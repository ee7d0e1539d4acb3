"""What operators, copies and collectives cost, in microseconds.

    collectives  a model of the network, and what was measured of it
    roofline     FLOPs and bytes of an operator against the rates of a device: no measurement
    table        measured figures where there are any, the roofline where there are none
    stopwatch    code that runs on tensors without data, such as an optimizer's step

Rates are data (`hardware`): a new device is one row. Nothing here runs a user's graph.
"""

from __future__ import annotations

from torchloom.costs.calibrate import calibrate_device, find_device
from torchloom.costs.collectives import NETWORKS, CollectiveKind, Network, collective_us
from torchloom.costs.hardware import DEVICES, Device, device_row
from torchloom.costs.roofline import node_flops, node_traffic_bytes, roofline_us
from torchloom.costs.share import shared_table
from torchloom.costs.signature import node_key
from torchloom.costs.stopwatch import Stopwatch
from torchloom.costs.store import load_table, machine_facts, save_table, table_path
from torchloom.costs.table import (
    CORE_SHARE,
    CostTable,
    graph_us,
    link_us,
    load_figure,
    measured_us,
    node_us,
    over_network,
)

__all__ = [
    "CORE_SHARE",
    "DEVICES",
    "NETWORKS",
    "CollectiveKind",
    "CostTable",
    "Device",
    "Network",
    "Stopwatch",
    "calibrate_device",
    "collective_us",
    "device_row",
    "find_device",
    "graph_us",
    "link_us",
    "load_figure",
    "load_table",
    "machine_facts",
    "measured_us",
    "node_flops",
    "node_key",
    "node_traffic_bytes",
    "node_us",
    "over_network",
    "roofline_us",
    "save_table",
    "shared_table",
    "table_path",
]
