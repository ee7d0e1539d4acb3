"""Tables on disk, and one table for all ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torchloom.costs import DEVICES, CostTable, load_table, save_table, shared_table, table_path
from torchloom.costs.share import slowest
from torchloom.costs.store import machine_facts, table_from_json, table_to_json
from torchloom.errors import AgreementError, PlanError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHLOOM_CACHE_DIR", str(tmp_path))
    return tmp_path


def table(**ops: float) -> CostTable:
    device = dataclasses.replace(DEVICES["cpu"], gemm_flops={"float32": 7e10}, capacity_bytes=5)
    return CostTable(device=device, ops=ops, collectives={"all_reduce/2": [(8, 1.5), (16, 2.0)]})


def test_a_table_survives_the_disk() -> None:
    assert load_table().ops == {}  # nothing there yet: modelled
    path = save_table(table(a=1.25, b=3.0))
    assert path == table_path()
    assert load_table() == table(a=1.25, b=3.0)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing half written
    assert load_table(path=path) == load_table()


def test_figures_stay_until_they_are_replaced_on_purpose() -> None:
    save_table(table(a=1.0))
    save_table(table(a=9.0, b=2.0))  # another process measured `a`, too
    assert load_table().ops == {"a": 1.0, "b": 2.0}
    save_table(table(a=9.0), replace=True)
    assert load_table().ops == {"a": 9.0, "b": 2.0}


def test_machines_do_not_share_figures(monkeypatch) -> None:
    paths = {table_path()}
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    paths.add(table_path())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    paths.add(table_path())
    assert len(paths) == 3
    assert machine_facts()["threads"] == "77"


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"format": 0}', '{"format": 1}', '{"format": 1, "device": {"name": 3}}']
)
def test_damaged_files(text: str, caplog) -> None:
    path = table_path()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert load_table() == CostTable()  # our own file: a warning
    assert path.name in caplog.text
    with pytest.raises(PlanError, match="is not a cost table"):
        load_table(path=path)  # one that was named: an error
    save_table(table(a=1.0))
    assert load_table().ops == {"a": 1.0}


def test_the_slowest_of_all_ranks() -> None:
    slow = dataclasses.replace(
        table(a=1.0, b=5.0),
        device=dataclasses.replace(DEVICES["cpu"], launch_us=99.0, full_duplex=True),
        collectives={"all_reduce/2": [(8, 1.0), (32, 9.0)]},
    )
    merged = slowest([table(a=2.0, c=1.0), slow])
    assert merged.ops == {"a": 2.0, "b": 5.0, "c": 1.0}
    assert merged.collectives == {"all_reduce/2": [(8, 1.5), (16, 2.0), (32, 9.0)]}
    assert merged.device.flops_of("float32") == 7e10
    assert merged.device.launch_us == 99.0
    assert merged.device.full_duplex is False
    assert merged.device.capacity_bytes == 5
    assert merged == slowest([slow, table(a=2.0, c=1.0)])


def share_both_ways(rank: int):
    own = table(a=1.0 + rank, **{f"only{rank}": 4.0})
    first = shared_table(own)
    largest = shared_table(own, "max")
    return first.ops, table_to_json(largest)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_hold_one_table(run_ranks, world_size: int) -> None:
    results = run_ranks(world_size, share_both_ways)
    assert all(result == results[0] for result in results)
    first, largest = results[0]
    assert first == {"a": 1.0, "only0": 4.0}
    assert table_from_json(largest).ops == {
        "a": float(world_size),
        **{f"only{rank}": 4.0 for rank in range(world_size)},
    }


def test_a_rank_that_does_not_come_is_named(run_ranks) -> None:
    def fn(rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(AgreementError, match=r"ranks \[1\] did not give the cost table") as e:
            shared_table(table(a=1.0), "max", timeout_s=0.5)
        return str(e.value)

    assert "within 0.5 s" in run_ranks(2, fn)[0]
