"""The command `torchloom calibrate`: measure, print, save.

    torchloom calibrate                  this device: products, memory, AdamW, link to the host
    torchloom calibrate --nproc 2        also collectives between two ranks of this host
    torchrun ... -m torchloom calibrate  the same with the ranks that torchrun starts
    torchloom calibrate --show           what is known already

All ranks measure at the same time, as they train, and the slowest result counts. Nothing else should
run on the machine. Collectives carry several tensors and follow products without a barrier, as in a step: between 2 gloo
ranks one of 3 MB takes 3.6 ms so, and 1.1 to 1.2 ms with one tensor, of ranks that a barrier has just woken. Two transports are timed, as compiled steps use them: messages (`all_gather`), and shared memory
if the ranks can share it (`shm_all_gather`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from torchloom import envs
from torchloom.cli.processes import begin_worker
from torchloom.cli.terminal import print_table
from torchloom.costs import (
    CORE_SHARE,
    CostTable,
    calibrate_device,
    find_device,
    load_figure,
    load_table,
    machine_facts,
    save_table,
    shared_table,
    table_path,
)
from torchloom.costs.store import table_to_json
from torchloom.errors import PlanError
from torchloom.launch.groups import ensure_process_group
from torchloom.runtime import Communicator, get_communicator

_STOPPING = "stopping"


def calibrate(
    device: Annotated[str, typer.Option(help="Device to measure: cpu, cuda or cuda:N.")] = "cpu",
    nproc: Annotated[
        int,
        typer.Option(
            min=1, help="Ranks to start, to measure collectives; not used under torchrun."
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="JSON file to write.", show_default="this machine's own cost table"),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Do not measure; print the saved table.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Use small operands, to try the command; saved only with --out."
        ),
    ] = False,
) -> None:
    """Measure the speed of this machine, for plans and other choices that depend on it."""
    _check_writable(out)
    if show:
        _show(device, out, as_json)
    elif envs.is_launched() or nproc == 1:
        if envs.is_launched():
            begin_worker()
        _measure(device, out, as_json, quick)
    else:
        from torchloom.cli.launcher import launch  # imports torch's elastic agent

        find_device(device)  # a bad name gives one error here, not one per rank
        flags = [*(["--json"] if as_json else []), *(["--quick"] if quick else [])]
        where = [] if out is None else ["--out", str(out)]
        argv = ["calibrate", "--device", device, *where, *flags]
        raise typer.Exit(launch(argv, nproc, _STOPPING, on_hangup=None))


def _show(device: str, path: Path | None, as_json: bool) -> None:
    where = path or table_path(find_device(device))
    if not where.exists():
        raise PlanError(f"nothing was measured yet ({where} is not there): run torchloom calibrate")
    _print(load_table(path=where), where, as_json)


def _measure(device_name: str, path: Path | None, as_json: bool, quick: bool) -> None:
    device = find_device(device_name)
    launch = envs.launch()
    started = time.perf_counter()
    table = load_table(device)
    if launch.world_size > 1:
        join_ranks(device)
    table.device, figures = calibrate_device(device, quick)
    table.figures |= figures
    if launch.world_size > 1:
        table.collectives |= measure_collectives(device, quick)
        if device.type == "cpu":
            table.figures[load_figure("gloo")] = measure_load(device, quick)
            table.figures[CORE_SHARE] = measure_core_share(quick)
    table = shared_table(table, "max")
    if launch.rank == 0:
        table.figures["calibrated_in_s"] = time.perf_counter() - started
        where = None
        if path is not None or not quick:  # results of small operands would mislead plans
            try:
                where = save_table(table, device, path)
            except OSError as error:
                raise PlanError(f"the cost table cannot be written: {error}") from error
        _print(table, where, as_json)


def _check_writable(path: Path | None) -> None:
    """Refuse a bad path before measuring, which takes minutes."""
    if path is not None and path.is_dir():
        raise PlanError(f"--out {path} is a folder: name a file, e.g. {path / 'costs.json'}")
    if path is not None and not path.parent.is_dir():
        raise PlanError(f"--out {path}: the folder {path.parent} does not exist: make it first")


def _print(table: CostTable, where: Path | None, as_json: bool) -> None:
    """Print a table and the path of its file.

    Args:
        table: the measured figures.
        where: its file; None if it was not saved.
        as_json: print JSON instead.
    """
    if as_json:
        typer.echo(table_to_json(table, machine_facts()).rstrip())
        return
    print_table(_rows(table))
    if table.collectives:
        _print_collectives(table)
    typer.echo(f"{len(table.ops)} operators and products measured one by one")
    typer.echo("not kept: --quick is for trying the command" if where is None else str(where))


def _rows(table: CostTable) -> Iterator[tuple[str, str]]:
    row = table.device
    yield "device", row.name
    for dtype, rate in sorted(row.gemm_flops.items()):
        yield f"products, {dtype}", f"{rate / 1e9:,.0f} GFLOP/s"
    yield "attention", f"{100 * row.attention_fraction:.0f} % of the rate of products"
    yield "memory", f"{row.memory_bytes_per_s / 1e9:,.1f} GB/s read and written"
    yield "launch", f"{row.launch_us:.1f} us"
    yield "fused AdamW", f"{row.adamw_params_per_s / 1e9:.2f} G parameters/s"
    yield "host to device", f"{row.h2d_bytes_per_s / 1e9:.1f} GB/s"
    both = ", both at once at full rate" if row.full_duplex else ""
    yield "device to host", f"{row.d2h_bytes_per_s / 1e9:.1f} GB/s{both}"
    for name, value in sorted(table.figures.items()):
        yield name, f"{value:,.4g}"


def _print_collectives(table: CostTable) -> None:
    """Print microseconds by size, one column for each kind and number of ranks."""
    kinds = sorted(table.collectives)
    # Line breaks in the header keep the columns narrow.
    headers = [kind.replace("_", "_\n", 1).replace("/", "\nranks: ") for kind in kinds]
    sizes = sorted({size for points in table.collectives.values() for size, _ in points})
    rows = []
    for size in sizes:
        found = [dict(table.collectives[kind]).get(size) for kind in kinds]
        rows.append((f"{size:,}", *("-" if us is None else f"{us:,.0f}" for us in found)))
    print_table(rows, "bytes", *headers, title="collectives, us")


SIZES = tuple(1 << power for power in range(10, 27, 2))
"""Sizes of the whole tensors in bytes, together: 1 KiB to 64 MiB."""
_QUICK_SIZES = (1 << 10, 1 << 16)

_NUM_TENSORS = 7
"""What a collective carries: a layer of a decoder has seven matrices."""

Collective = Callable[[list[Tensor], list[Tensor]], object]


def join_ranks(device: torch.device) -> None:
    """Create the process group; on CUDA each rank takes the device of its local rank."""
    if device.type == "cuda":
        torch.cuda.set_device(envs.launch().local_rank)
    ensure_process_group()


def measure_collectives(
    device: torch.device, quick: bool = False
) -> dict[str, list[tuple[int, float]]]:
    """Time each collective over the default process group; all ranks must call.

    Args:
        device: where the tensors are.
        quick: time two small sizes only.

    Returns:
        (bytes, median microseconds) by kind and number of ranks, e.g. `"all_gather/2"`.
    """
    world_size = dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None, "there are ranks"
    found: dict[str, list[tuple[int, float]]] = {}
    for kind, collective in _collectives(group, device).items():
        points = []
        for size in _QUICK_SIZES if quick else SIZES:
            numel = -(
                -size // 4 // world_size // _NUM_TENSORS
            )  # every rank has an equal part of each
            wholes = [torch.randn(numel * world_size, device=device) for _ in range(_NUM_TENSORS)]
            parts = [torch.randn(numel, device=device) for _ in range(_NUM_TENSORS)]
            num_bytes = sum(whole.nbytes for whole in wholes)
            points.append((num_bytes, _median_us(collective, wholes, parts)))
        found[f"{kind}/{world_size}"] = points
    return found


_LOAD_BYTES = 16 << 20
"""Whole tensors of the collectives that run beside products."""


def measure_load(device: torch.device, quick: bool = False) -> float:
    """Return the part of a collective's time that products beside it lose, from 0 to 1; all ranks must call.

    With a core for each rank alone it is nearly 1: what carries the messages runs on the cores that compute.

    Args:
        device: where the tensors are.
        quick: use small operands.
    """
    world_size, side = dist.get_world_size(), 64 if quick else 512
    group = dist.group.WORLD
    assert group is not None, "there are ranks"
    comm, f32 = get_communicator(group), torch.float32
    numel = (_QUICK_SIZES[-1] if quick else _LOAD_BYTES) // 4 // world_size
    whole, part = (torch.randn(n, device=device) for n in (numel * world_size, numel))
    products = _products(device, 40, side)  # a few times as long as the transfers

    def transfers(beside: Callable[[], None] = lambda: None) -> None:
        gather = comm.begin_gather([part], f32, ("probe",))
        reduce = comm.begin_reduce([whole], [numel], f32, f32, ("probe",))
        beside()
        comm.wait(gather)
        comm.wait(reduce)

    calls = transfers, products, lambda: transfers(products)
    rounds = [[_once_us(call) for call in calls] for _ in range(8)][1:]
    alone_us, products_us, both_us = (statistics.median(each) for each in zip(*rounds, strict=True))
    return min(1.0, max(0.0, (both_us - products_us) / alone_us))


def measure_core_share(quick: bool = False) -> float:
    """Return the part of a core that a rank has while all ranks compute; all ranks must call.

    3 ranks on 2 cores have two thirds each. Operators are timed by their thread's own clock, which does not see that.
    """
    if torch.get_num_threads() > 1:
        return 1.0  # timed by the wall clock
    products = _products(torch.device("cpu"), 10 if quick else 200)
    dist.barrier()
    started, began = time.perf_counter(), time.thread_time()
    products()
    share = torch.tensor((time.thread_time() - began) / (time.perf_counter() - started))
    dist.all_reduce(
        share
    )  # over a second the scheduler favours one rank; its mean is what a long run gets
    return min(1.0, share.item() / dist.get_world_size())


def _once_us(call: Callable[[], None]) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - started)


def _collectives(group: dist.ProcessGroup, device: torch.device) -> dict[str, Collective]:
    """Return collectives of whole tensors and this rank's parts of them, by kind."""
    found = _of_torchloom(get_communicator(group))
    if device.type == "cpu":
        shared = get_communicator(group, symmetric_memory=True)
        if shared.shares_memory:
            found |= {f"shm_{kind}": call for kind, call in _of_torchloom(shared).items()}
    return found


def _of_torchloom(comm: Communicator) -> dict[str, Collective]:
    f32 = torch.float32

    def all_gather(wholes: list[Tensor], parts: list[Tensor]) -> None:
        comm.wait(comm.begin_gather(parts, f32, ("probe",)))

    def reduce_scatter(wholes: list[Tensor], parts: list[Tensor]) -> None:
        numels = [part.numel() for part in parts]
        comm.wait(comm.begin_reduce(wholes, numels, f32, f32, ("probe",)))

    def all_reduce(wholes: list[Tensor], parts: list[Tensor]) -> None:
        comm.wait(comm.begin_sync(wholes, f32, f32, ("probe",)))

    return {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce}


def _median_us(collective: Collective, wholes: list[Tensor], parts: list[Tensor]) -> float:
    """Time a collective; the number of repeats depends on the size alone, equal on all ranks."""
    repeats = max(5, min(21, (8 << 20) // sum(whole.nbytes for whole in wholes)))
    device = wholes[0].device
    products = _products(device, 4)
    samples = []
    for index in range(repeats + 1):
        products()  # no barrier: ranks come to a collective of a step as their products end
        _wait(device)
        started = time.perf_counter()
        collective(wholes, parts)
        _wait(device)
        if index:  # the first one opens connections
            samples.append(1e6 * (time.perf_counter() - started))
    return statistics.median(samples)


def _products(device: torch.device, count: int, side: int = 512) -> Callable[[], None]:
    operand = torch.randn(side, side, device=device)

    def run() -> None:
        for _ in range(count):
            torch.mm(operand, operand)

    return run


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
