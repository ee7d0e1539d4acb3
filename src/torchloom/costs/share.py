"""One table, one choice for all ranks: they exchange texts outside of collectives.

A rank that waits too long gets an error that names who did not come. All ranks must call in the same
order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist

from torchloom._torch.distributed import default_store
from torchloom.costs.hardware import Device
from torchloom.costs.store import table_from_json, table_to_json
from torchloom.costs.table import CostTable
from torchloom.errors import AgreementError
from torchloom.exchange import Alone, Exchange, StoreExchange, text_from

TIMEOUT_S = 600.0
"""How long rank 0 may measure while the others wait."""

_TABLE = "the cost table"

_SERIAL = itertools.count()


def share_text(
    what: str,
    make: Callable[[], str],
    timeout_s: float = TIMEOUT_S,
    exchange: Exchange | None = None,
) -> str:
    """Return rank 0's text on every rank; without a process group, the own one.

    Args:
        what: what is shared, for messages.
        make: makes the text; called on rank 0 alone. What it raises is raised on all ranks.
        timeout_s: how long the other ranks wait, in seconds.
        exchange: between whom, with a time limit of its own; default: all ranks of the process group.

    Raises:
        AgreementError: rank 0 did not come, or failed.
    """
    return text_from(exchange or _all_ranks(timeout_s), 0, what, make)


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
    if how == "rank0":
        text = text_from(exchange, 0, _TABLE, lambda: table_to_json(table))
        return table_from_json(text)
    texts = exchange.texts(_TABLE, table_to_json(table))
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


def _slowest_device(devices: list[Device]) -> Device:
    first = devices[0]
    dtypes = sorted({dtype for each in devices for dtype in each.gemm_flops})
    return Device(
        name=first.name if len({each.name for each in devices}) == 1 else "slowest of the ranks",
        gemm_flops={dtype: min(each.flops_of(dtype) for each in devices) for dtype in dtypes},
        memory_bytes_per_s=min(each.memory_bytes_per_s for each in devices),
        launch_us=max(each.launch_us for each in devices),
        attention_fraction=min(each.attention_fraction for each in devices),
        h2d_bytes_per_s=min(each.h2d_bytes_per_s for each in devices),
        d2h_bytes_per_s=min(each.d2h_bytes_per_s for each in devices),
        link_latency_us=max(each.link_latency_us for each in devices),
        full_duplex=all(each.full_duplex for each in devices),
        link_load=max(each.link_load for each in devices),
        adamw_params_per_s=min(each.adamw_params_per_s for each in devices),
        capacity_bytes=min(
            (each.capacity_bytes for each in devices if each.capacity_bytes is not None),
            default=None,
        ),
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
