"""One table, one choice for all ranks, through the process group's key-value store.

No collective is used, which would hang if one rank were missing: a rank that waits too long gets
an error that names who did not come. All ranks must call in the same order.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist

from torchloom import _torch
from torchloom.costs.hardware import Device
from torchloom.costs.store import table_from_json, table_to_json
from torchloom.costs.table import CostTable
from torchloom.errors import AgreementError

TIMEOUT_S = 600.0
"""How long rank 0 may measure while the others wait."""

_SERIAL = itertools.count()


def share_text(what: str, make: Callable[[], str], timeout_s: float = TIMEOUT_S) -> str:
    """Return rank 0's text on every rank; without a process group, the own one.

    Args:
        what: what is shared, for messages.
        make: makes the text; called on rank 0 alone. What it raises is raised on all ranks.
        timeout_s: how long the other ranks wait.

    Raises:
        AgreementError: rank 0 did not come, or failed.
    """
    if not _is_distributed():
        return make()
    store = _next_store()
    if dist.get_rank() == 0:
        return _make_for_all(store, "0", make)
    return _answer(_wait(store, [0], what, timeout_s)[0], what)


def _make_for_all(store: Any, own: str, make: Callable[[], str]) -> str:
    try:
        text = make()
    except Exception as error:
        store.set(own, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    store.set(own, json.dumps({"text": text}))
    return text


def _answer(told: str, what: str) -> str:
    answer = json.loads(told)
    if "error" in answer:
        raise AgreementError(f"another rank could not give {what}: {answer['error']}")
    return answer["text"]


def shared_table(
    table: CostTable,
    how: Literal["rank0", "max"] = "rank0",
    timeout_s: float = TIMEOUT_S,
) -> CostTable:
    """Return a table that is equal on all ranks; without a process group, `table` itself.

    Args:
        table: this rank's figures.
        how: "rank0" takes rank 0's; "max" the slowest of all ranks, figure by figure. A figure
            that only some ranks have measured is the slowest of theirs.
        timeout_s: how long to wait for other ranks.

    Raises:
        AgreementError: a rank did not come within the timeout.
    """
    if not _is_distributed():
        return table
    if how == "rank0":
        text = share_text("the cost table", lambda: table_to_json(table), timeout_s)
        return table_from_json(text)
    store = _next_store()
    store.set(str(dist.get_rank()), table_to_json(table))
    ranks = list(range(dist.get_world_size()))
    texts = _wait(store, ranks, "the cost table", timeout_s)
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


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _next_store() -> Any:
    return dist.PrefixStore(f"torchloom/costs/{next(_SERIAL)}", _torch.default_store())


def _wait(store: Any, ranks: list[int], what: str, timeout_s: float) -> list[str]:
    texts, missing = _torch.texts_of(store, ranks, timeout_s)
    if missing:
        raise AgreementError(
            f"ranks {missing} did not give {what} within {timeout_s:g} s: look at their output "
            "for an error, or for a branch that only some ranks take"
        )
    return list(texts.values())
