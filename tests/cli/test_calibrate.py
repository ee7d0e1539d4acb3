"""`torchloom calibrate`: what it measures, keeps, shows and refuses."""

from __future__ import annotations

import json
import os

import pytest
import torch
import typer
from typer.testing import CliRunner

from torchloom.cli.calibrate import calibrate, measure_collectives, measure_core_share, measure_load
from torchloom.costs import (
    NETWORKS,
    CostTable,
    collective_us,
    load_table,
    save_table,
    table_path,
)
from torchloom.errors import PlanError

app = typer.Typer()
app.command()(calibrate)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHLOOM_CACHE_DIR", str(tmp_path))
    return tmp_path


def run(*args: str):
    return CliRunner().invoke(app, list(args))


def test_a_device_is_measured_and_kept(tmp_path) -> None:
    state = torch.random.get_rng_state()
    out = tmp_path / "costs.json"
    save_table(CostTable(ops={"matmul f32 1x2x3 nn blas": 4.0}), path=out)
    result = run("--quick", "--json", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert torch.equal(torch.random.get_rng_state(), state)
    record = json.loads(result.output)
    assert record["device"]["gemm_flops"]["float32"] != CostTable().device.flops_of("float32")
    assert record["machine"]["torch"] == torch.__version__
    kept = load_table(path=out)
    assert kept.device.memory_bytes_per_s == record["device"]["memory_bytes_per_s"]
    assert 0 < kept.device.attention_fraction <= 1
    assert kept.ops == {"matmul f32 1x2x3 nn blas": 4.0}  # other figures stay
    shown = run("--show", "--out", str(out))
    assert "products, float32" in shown.output
    assert str(out) in shown.output.replace("\n", "")


def test_trying_out_is_not_kept() -> None:
    assert "not kept" in run("--quick").output
    assert not table_path().exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--device", "tpu"], "'tpu' is not a device: write cpu, cuda"),
        (["--device", "tpu", "--nproc", "2"], "'tpu' is not a device"),
        (["--device", "mps"], "a mps device cannot be calibrated"),
        (["--device", "cuda:99"], "there is no cuda:99 here"),
        (["--show"], "nothing was measured yet"),
        (["--out", "no/such/folder/x.json"], "the folder no/such/folder does not exist"),
    ],
)
def test_bad_input_is_one_clear_error(args, words) -> None:
    result = run("--quick", *args)
    assert isinstance(result.exception, PlanError)
    assert words in str(result.exception)


def test_a_folder_as_file(tmp_path) -> None:
    result = run("--out", str(tmp_path))
    assert "is a folder: name a file" in str(result.exception)


def test_no_ranks_is_refused() -> None:
    assert run("--nproc", "0").exit_code == 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_are_timed_on_all_ranks(run_ranks, world_size: int) -> None:
    results = run_ranks(
        world_size, lambda rank: measure_collectives(torch.device("cpu"), quick=True)
    )
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    for found in results:
        assert sorted(found) == sorted(
            f"{prefix}{kind}/{world_size}" for kind in kinds for prefix in ("", "shm_")
        )
        for network in (NETWORKS["gloo"], NETWORKS["shared-memory"]):
            table = CostTable(network=network, collectives=found)
            for kind in kinds:
                (small, small_us), (large, large_us) = found[f"{network.prefix}{kind}/{world_size}"]
                assert 1024 <= small < 1100
                assert 65536 <= large < 66000
                assert min(small_us, large_us) > 1
                assert collective_us(kind, small, world_size, table) == small_us


def test_what_compute_loses_to_collectives_is_a_part_of_their_time(run_ranks) -> None:
    loads = run_ranks(2, lambda rank: measure_load(torch.device("cpu"), quick=True))
    assert all(0.0 <= each <= 1.0 for each in loads)


def test_ranks_on_one_core_have_a_part_of_it(run_ranks) -> None:
    def share(rank: int) -> float:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})
        torch.set_num_threads(1)
        try:
            return measure_core_share()
        finally:
            os.sched_setaffinity(0, cores)

    one, other = run_ranks(2, share)
    assert one == other < 0.7  # a half, less where others run


def test_ranks_write_one_table(monkeypatch, tmp_path, capfd) -> None:
    """The command itself, with the launcher's ranks."""
    out = tmp_path / "two.json"
    result = run("--nproc", "2", "--quick", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "all_gather/2" in load_table(path=out).collectives
    assert 0.0 <= load_table(path=out).figures["gloo_load"] <= 1.0
    assert capfd.readouterr().out.count("fused AdamW") == 1  # rank 0 speaks for the run
