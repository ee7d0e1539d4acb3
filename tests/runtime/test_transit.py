"""What collectives hold while they are under way, against the allocator."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_ranks
from support.traffic import collectives_of, held_bytes
from torchloom.memory import measure_peak
from torchloom.runtime import get_communicator, mover_of, refresh_bytes, transit_bytes

SMALL, LARGE = 3_000, 80_000
NUMELS = ((LARGE,), (SMALL,), (SMALL,) * 40, (SMALL, LARGE, 2 * SMALL, 0, LARGE))
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_graphs_do_not_show(world_size: int) -> None:
    def fn(rank):
        handle = get_communicator(dist.group.WORLD).handle
        rows = []
        for numels in NUMELS:
            for dtype, wire in ((F32, F32), (BF16, F32), (F32, BF16)):
                full = [n * world_size for n in numels]
                for start, args in collectives_of(full, dtype, wire, world_size, handle):
                    predicted = transit_bytes(start, args)
                    dist.barrier()
                    measured = held_bytes(start, args, handle)
                    rows.append((str(start), numels, wire, predicted, measured))
        return rows

    for rows in run_ranks(world_size, fn):
        for start, numels, wire, predicted, measured in rows:
            # Sums of another dtype than the wire's are taken in two temporary tensors at the end.
            room = 64 + (2 * 4 * sum(numels) if wire is BF16 else 0)  # and a few scalars
            assert predicted <= measured <= predicted + room, (start, numels, wire)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 16 << 20])
def test_what_gathering_resident_weights_anew_holds(bucket_bytes: int, on_host: bool) -> None:
    def fn(rank):
        comm, mover = get_communicator(dist.group.WORLD), mover_of(torch.device("cpu"))
        comm.residents.bucket_bytes = bucket_bytes
        rows = []
        for numels in ((SMALL,), (SMALL, 2 * SMALL, SMALL // 3), (SMALL, LARGE, SMALL, 77)):
            for dtype in (F32, BF16):
                comm.residents.clear()
                shards = [torch.randn(n) for n in numels]
                if on_host:
                    shards = mover.begin_offload(shards)
                    mover.wait(shards)
                names = [f"w{i}" for i in range(len(shards))]

                def read(shards=shards, names=names, dtype=dtype):
                    return [
                        measure_peak(lambda p=p, n=n: comm.residents.get(p, dtype, n)).peak_bytes
                        for p, n in zip(shards, names, strict=True)
                    ]

                read()
                comm.residents.invalidate()
                predicted = refresh_bytes([(p, dtype, comm.handle, on_host) for p in shards])
                dist.barrier()
                rows.append((numels, dtype, predicted, read(), sum(predicted)))
        return rows

    for rows in run_ranks(2, fn):
        assert any(total for *_, total in rows)
        for numels, dtype, predicted, measured, _ in rows:
            for want, got in zip(predicted, measured, strict=True):
                assert want <= got <= want + 64, (numels, dtype, predicted, measured)
