"""A world of N equal ranks of which one exists: its groups, its transport, and what the others say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, final

from torchloom.errors import PlanError
from torchloom.runtime import Communicator
from torchloom.runtime.base import GroupRef
from torchloom.runtime.channel import CHANNELS, Channel
from torchloom.runtime.communicators import standing_in
from torchloom.runtime.transports.c10d import C10dCollectives
from torchloom.runtime.transports.gloo import GlooCollectives


@final
class SimulatedGroup(GroupRef):
    """A process group whose size and rank are known, and which refuses to communicate."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0

    def __call__(self) -> NoReturn:
        """Refuse: there is nobody to communicate with.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "a simulated rank was asked to communicate: a model whose forward calls collectives of its own "
            "cannot be simulated"
        )

    def refers_to(self, group: Any) -> bool:
        """Return False: no process group is this one."""
        del group
        return False


@final
class _NcclCollectives(C10dCollectives):
    """What NCCL holds and sends: several tensors travel by one collective without being packed."""

    coalesces = True


@final
class EqualRanks:
    """The exchange of a rank whose peers run the same program: all of them say what it says."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def texts(self, what: str, text: str) -> list[str]:
        """Return this rank's text for each rank."""
        del what
        return [text] * self.world_size

    def tell(self, what: str, text: str) -> None:
        """Tell nobody."""

    def hear(self, what: str, rank: int) -> str:
        """Refuse: what one rank alone says is made by rank 0, which this is."""
        raise AssertionError(f"a simulated rank 0 was asked what rank {rank} says of {what!r}")


_TRANSPORTS = {"gloo": GlooCollectives, "nccl": _NcclCollectives}


@contextmanager
def simulated_world(world_size: int, transport: str, copies: int = 1) -> Iterator[Communicator]:
    """Let graphs that are traced in the block communicate over ranks that do not exist.

    Args:
        world_size: number of ranks, which share one copy of the weights.
        transport: "nccl" or "gloo": whose buffers count as memory in flight.
        copies: of the weights, which other ranks share.
    """
    make = _TRANSPORTS[transport]
    groups = SimulatedGroup(world_size), SimulatedGroup(copies)
    channels = [
        Channel(name, tuple(range(group.size)))
        for name, group in zip(("simulated", "simulated copies"), groups, strict=True)
    ]
    shard, between = (make(*each) for each in zip(groups, channels, strict=True))
    comm = (
        Communicator(f"{world_size}x{copies}#0", groups[0], groups[1], shard, between)
        if copies > 1
        else Communicator(f"{world_size}x1#0", groups[0], None, shard, None)
    )
    try:
        with standing_in(comm):
            yield comm
    finally:
        for channel in channels:
            CHANNELS.pop(channel.name, None)  # ranks compare the channels that they have
