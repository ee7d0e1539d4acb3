"""Lets ranks tell each other how a long task went, also in the background of training.

Ranks use no collective, because a failed rank or training in the foreground would block it: they exchange texts
through a connection of their own to the process group's store. A rank that ends is noticed at once (`runtime.lines`);
one that lives and does not come is waited for as long as the longest of the run's time limits says.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, final

import torch.distributed as dist

from torchloom._torch.distributed import hushed_store, own_store
from torchloom.errors import CheckpointError, PeerLostError, TorchloomError, first_line
from torchloom.exchange import Alone, Exchange, StoreExchange
from torchloom.runtime.lines import how_gone, longest_s

_FAREWELL_S = 5.0


@final
class RankTask:
    """One task of all ranks, as a `with` block.

    Args:
        rank: this process.
        world_size: how many take part.
        name: equal on all ranks, and used for nothing else.
    """

    def __init__(self, rank: int, world_size: int, name: str) -> None:
        self.rank, self.world_size = rank, world_size
        self._store: Any = None
        self._exchange: Exchange = Alone()
        if world_size > 1:
            store = self._store = dist.PrefixStore(f"torchloom/checkpoint/{name}", own_store())
            self._exchange = StoreExchange(
                rank=rank,
                world_size=world_size,
                prefix="texts",
                store=lambda: store,
                timeout_s=longest_s,
                late=_late,
                watch=self,
            )

    def __enter__(self) -> RankTask:
        return self

    @hushed_store()
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._store is None:
            return
        self._exchange = Alone()  # that of the store holds this object, and so a connection
        is_well = kind is None or issubclass(kind, CheckpointError)
        with contextlib.suppress(dist.DistError):  # all has been said
            if not is_well:
                self._store.set("left", str(self.rank))
            self._store.add("ended", 1)
            # The store may be in the process of rank 0, which waits until the others have read all.
            end = time.monotonic() + _FAREWELL_S
            while is_well and self.rank == 0 and time.monotonic() < end:
                if self._store.add("ended", 0) >= self.world_size:
                    break
                time.sleep(0.001)

    def together(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank; return what each returned, or raise on all if one failed.

        Args:
            what: what cannot be done if it fails, as the beginning of a message.
            action: returns what JSON can hold.

        Raises:
            CheckpointError: some rank failed; names ranks and reasons.
            PeerLostError: a rank has ended.
        """
        return answers(what, self.texts(attempt(action)))

    def texts(self, text: str) -> list[str]:
        """Return the text of every rank, by rank; all ranks must call in the same order.

        Raises:
            PeerLostError: a rank has ended, or left the work.
        """
        return self._exchange.texts("a save or load of all ranks", text)

    @hushed_store()
    def note(self, key: str, text: str | None = None) -> str | None:
        """Leave a word for ranks that look for it later, or return the word that was left, if one was."""
        with contextlib.suppress(
            dist.DistError
        ):  # the store has ended, which training notices by itself
            if self._store is not None and text is not None:
                self._store.set(f"note/{key}", text)
            elif self._store is not None and self._store.check([f"note/{key}"]):
                return bytes(self._store.get(f"note/{key}")).decode()
        return None

    @contextlib.contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """Say, as `RankWatch`, why the store is lost."""
        del what
        try:
            yield
        except dist.DistError as error:
            raise PeerLostError(
                "rank 0 has ended without a word, or the launcher that keeps the ranks' store; rank "
                f"{self.rank} lost it ({first_line(error)}) while the ranks saved or loaded a checkpoint. "
                "Look at the output of rank 0 and of the launcher"
            ) from error

    def look(self, missing: Callable[[], list[int]]) -> None:
        """Raise, as `RankWatch`, if a rank that is waited for has ended, or one has left the task."""
        gone = {rank: how for rank in range(self.world_size) if (how := how_gone(rank))}
        lost = gone.keys() & set(missing()) if gone else ()
        for rank in lost:
            raise PeerLostError(
                f"rank {rank} {gone[rank]}, while the ranks saved or loaded a checkpoint. Look at its "
                "output for the cause"
            )
        if self._store.check(["left"]):
            rank = bytes(self._store.get("left")).decode()
            raise PeerLostError(
                f"rank {rank} has left a save or load of all ranks: look at its output for an error, or for "
                "a call that only some ranks make"
            )


def _late(what: str, missing: list[int], timeout_s: float) -> Exception:
    return PeerLostError(
        f"ranks {missing} did not come to {what} within {timeout_s:.0f} s: look at their output, or raise "
        "timeouts.compile_s if their disks take so long"
    )


def attempt(action: Callable[[], Any]) -> str:
    """Run `action` and return how it went, as a text for the other ranks."""
    try:
        return json.dumps({"ok": action()})
    except TorchloomError as error:
        return json.dumps({"error": str(error)})
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return json.dumps({"error": f"{where}{error.strerror or error}"})
    except Exception as error:  # noqa: BLE001  the other ranks wait to hear of any failure
        return json.dumps({"error": f"{type(error).__name__}: {first_line(error)}"})


def answers(what: str, texts: list[str]) -> list[Any]:
    """Return what `attempt` returned on every rank, or raise if one failed.

    Raises:
        CheckpointError: some rank failed.
    """
    told = [json.loads(text) for text in texts]
    errors = {rank: each["error"] for rank, each in enumerate(told) if "error" in each}
    if not errors:
        return [each["ok"] for each in told]
    if len(errors) == len(told) and len(set(errors.values())) == 1:
        raise CheckpointError(f"{what}: {errors[0]}")
    shown = "; ".join(f"rank {rank}: {text}" for rank, text in list(errors.items())[:4])
    more = f"; and {len(errors) - 4} more ranks" if len(errors) > 4 else ""
    raise CheckpointError(f"{what}: {shown}{more}")
