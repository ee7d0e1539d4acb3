"""Ranks tell each other how a long task went, also in the background of training.

The exchange uses no collective, because a failed rank or training in the foreground would block it. Ranks
send texts through a separate connection to the process group's store. Work on a disk may take any time, so
it has no time limit: each rank stores a sign of life once a second, and a rank that stops doing so is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

import torch.distributed as dist

from torchloom._torch.distributed import default_store
from torchloom._torch.hush import hushed_store
from torchloom.checkpoints.manifest import first_line
from torchloom.errors import CheckpointError, PeerLostError, TorchloomError
from torchloom.runtime.lines import how_gone, patience_s

BEAT_S = 1.0
LOST_AFTER_S = 8.0
"""A rank that says nothing for so long is lost: eight beats, for machines that are very busy."""
_FAREWELL_S = 5.0


@final
class SaveExchange:
    """One task of all ranks, as a `with` block.

    Args:
        rank: this process.
        world_size: how many take part.
        name: equal on all ranks, and used for nothing else.
    """

    def __init__(self, rank: int, world_size: int, name: str) -> None:
        self.rank, self.world_size = rank, world_size
        self._store: Any = None
        if world_size > 1:
            self._store = dist.PrefixStore(f"torchloom/checkpoint/{name}", default_store().clone())
        self._ordinal = itertools.count()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._beats: dict[int, tuple[bytes, float]] = {}

    def __enter__(self) -> SaveExchange:
        if self._store is not None:
            self._thread = threading.Thread(target=self._beat, daemon=True, name="checkpoint beat")
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._store is not None:
            self._take_leave(waits=kind is None or issubclass(kind, CheckpointError))
        self._over.set()
        if self._thread is not None:
            self._thread.join(BEAT_S)

    @hushed_store()
    def texts(self, what: str, text: str) -> list[str]:
        """Return the text of every rank, by rank; all ranks must call in the same order.

        Raises:
            PeerLostError: a rank has ended, or left the work.
        """
        if self._store is None:
            return [text]
        store = dist.PrefixStore(str(next(self._ordinal)), self._store)
        try:
            store.set(str(self.rank), text)
            for rank in range(self.world_size):
                self._await(store, rank, what)
            return [bytes(store.get(str(rank))).decode() for rank in range(self.world_size)]
        except dist.DistError as error:
            raise PeerLostError(
                "rank 0 has ended without a word, or the launcher that keeps the ranks' store; rank "
                f"{self.rank} lost it ({first_line(error)}) while the ranks told each other {what}. "
                "Look at the output of rank 0 and of the launcher"
            ) from error

    def together(self, what: str, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank; return what each returned, or raise on all if one failed.

        Args:
            what: what cannot be done if it fails, as the beginning of a message.
            action: returns what JSON can hold.

        Raises:
            CheckpointError: some rank failed; names ranks and reasons.
            PeerLostError: a rank has ended.
        """
        return answers(what, self.texts(what, attempt(action)))

    @hushed_store()
    def tell(self, key: str, text: str) -> None:
        """Leave a word for ranks that look for it later."""
        if self._store is not None:
            with contextlib.suppress(dist.DistError):  # no rank is left to hear it
                self._store.set(f"word/{key}", text)

    @hushed_store()
    def heard(self, key: str) -> str | None:
        """Return the word under a key, if it has been left."""
        if self._store is None:
            return None
        try:
            if not self._store.check([f"word/{key}"]):
                return None
            return bytes(self._store.get(f"word/{key}")).decode()
        except dist.DistError:
            return None  # the store has ended with rank 0, which training notices by itself

    def _await(self, store: Any, rank: int, what: str) -> None:
        pause = 0.0005
        while not store.check([str(rank)]):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            how = how_gone(rank)
            if how and not store.check([str(rank)]):
                raise PeerLostError(
                    f"rank {rank} {how}, before it said {what!r}. Look at its output for the cause"
                )
            if pause == 0.05 and self._is_lost(rank) and not store.check([str(rank)]):
                raise PeerLostError(
                    f"rank {rank} has left before it said {what!r}: look at its output for an error, "
                    "or for a save or load that only some ranks call"
                )

    def _is_lost(self, rank: int) -> bool:
        if self._store.check([f"left/{rank}"]):
            return True
        now = time.monotonic()
        seen, since = self._beats.get(rank, (b"", now))
        beat = f"beat/{rank}"
        current = bytes(self._store.get(beat)) if self._store.check([beat]) else b""
        if current != seen or rank not in self._beats:
            self._beats[rank] = (current, now)
            return False
        # A rank that C code keeps from its interpreter, or that is suspended, gives no sign of life. If
        # it has ended, its line says so.
        return now - since > (patience_s() or LOST_AFTER_S)

    @hushed_store()
    def _beat(self) -> None:
        for number in itertools.count():
            try:
                self._store.set(f"beat/{self.rank}", str(number))
            except dist.DistError:
                return  # the store has ended with rank 0; whoever waits for it says so
            if self._over.wait(BEAT_S):
                return

    @hushed_store()
    def _take_leave(self, *, waits: bool) -> None:
        """Tell the others; rank 0, in whose process the store is, may wait until they have read all."""
        try:
            self._store.set(f"left/{self.rank}", "")
            end = time.monotonic() + _FAREWELL_S
            others = [f"left/{rank}" for rank in range(self.world_size)]
            while (
                waits
                and self.rank == 0
                and time.monotonic() < end
                and not self._store.check(others)
            ):
                time.sleep(0.001)
        except dist.DistError:
            return  # all has been said


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
