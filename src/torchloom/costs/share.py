"""Give all ranks one cost table: they exchange texts outside of collectives.

A rank that waits too long gets an error that names who did not come. All ranks must call in the same
order.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist

from torchloom._torch.distributed import default_store
from torchloom.costs.hardware import Device
from torchloom.costs.store import table_from_json, table_to_json
from torchloom.costs.table import CostTable
from torchloom.errors import AgreementError
from torchloom.exchange import Alone, Exchange, StoreExchange

TIMEOUT_S = 600.0
"""How long rank 0 may measure while the others wait."""

_TABLE = "the cost table"

_SERIAL = itertools.count()


def shared_table(
    table: CostTable,
    how: Literal["rank0", "max"] = "rank0",
    timeout_s: float = TIMEOUT_S,
    exchange: Exchange | None = None,
) -> CostTable:
    """Return a table that is equal on all ranks; without a process group, `table` itself.

    Args:
        table: this rank's figures.
        how: "rank0" takes rank 0's; "max" the slowest of all ranks, figure by figure. A figure
            that only some ranks have measured is the slowest of theirs.
        timeout_s: how long to wait for other ranks, in seconds.
        exchange: between whom, with a time limit of its own; default: all ranks of the process group.

    Raises:
        AgreementError: a rank did not come within the timeout.
    """
    exchange = exchange or _all_ranks(timeout_s)
    if exchange.world_size == 1:
        return table
    is_sent = how == "max" or exchange.rank == 0
    texts = exchange.texts(_TABLE, table_to_json(table) if is_sent else "")
    if how == "rank0":
        return table_from_json(texts[0])
    return slowest([table_from_json(text) for text in texts])


def slowest(tables: list[CostTable]) -> CostTable:
    """Merge tables to the slowest figures among them, as a step waits for its slowest rank."""
    first = tables[0]
    collectives: dict[str, list[tuple[int, float]]] = {}
    for key in sorted({key for each in tables for key in each.collectives}):
        points = [dict(each.collectives[key]) for each in tables if key in each.collectives]
        collectives[key] = sorted(_largest(points).items())
    return CostTable(
        device=_slowest_device([each.device for each in tables]),
        network=first.network,
        ops=_largest([each.ops for each in tables]),
        collectives=collectives,
        figures=first.figures,
    )


_LEAST = (
    *("memory_bytes_per_s", "attention_fraction", "h2d_bytes_per_s", "d2h_bytes_per_s"),
    *("full_duplex", "adamw_params_per_s"),
)
_MOST = ("launch_us", "link_latency_us", "link_load")


def _slowest_device(devices: list[Device]) -> Device:
    dtypes = sorted({dtype for each in devices for dtype in each.gemm_flops})
    capacities = [each.capacity_bytes for each in devices if each.capacity_bytes is not None]
    return replace(
        devices[0],
        name=devices[0].name if len({d.name for d in devices}) == 1 else "slowest of the ranks",
        gemm_flops={dtype: min(each.flops_of(dtype) for each in devices) for dtype in dtypes},
        capacity_bytes=min(capacities, default=None),
        **{name: min(getattr(each, name) for each in devices) for name in _LEAST},
        **{name: max(getattr(each, name) for each in devices) for name in _MOST},
    )


def _largest(figures: list[Any]) -> dict[Any, float]:
    merged: dict[Any, float] = {}
    for each in figures:
        for key, value in each.items():
            merged[key] = max(value, merged.get(key, value))
    return dict(sorted(merged.items()))


def _all_ranks(timeout_s: float) -> Exchange:
    """Return an exchange between the ranks of the default process group, if there is one."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return Alone()
    return StoreExchange(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        prefix=f"torchloom/costs/{next(_SERIAL)}",
        store=default_store,
        timeout_s=lambda: timeout_s,
        late=_did_not_give,
    )


def _did_not_give(what: str, missing: list[int], timeout_s: float) -> Exception:
    return AgreementError(
        f"ranks {missing} did not give {what} within {timeout_s:g} s: look at their output "
        "for an error, or for a branch that only some ranks take"
    )
