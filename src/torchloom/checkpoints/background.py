"""A checkpoint that is written while training goes on.

Training waits only for the copy to host memory. A thread on each rank does the rest and uses no collective.
The memory of the copies is kept for the next save. The interpreter waits for the thread before it exits.

All ranks raise a failure after the same step: when rank 0 finds at the end of a step that the save has
failed, it stores that ranks raise after the next step. No rank can end that step without rank 0, which has
stored it before.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from torchloom.checkpoints.lock import FolderLock
from torchloom.checkpoints.snapshot import EngineSnapshot
from torchloom.checkpoints.together import SaveExchange
from torchloom.checkpoints.write import Request, write
from torchloom.errors import CheckpointError, TorchloomError
from torchloom.log import get_logger

logger = get_logger(__name__)

_STOP = "stop"


class Staging:
    """Host memory for copies of what is saved, kept from one save to the next."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copy(self, snapshot: EngineSnapshot) -> EngineSnapshot:
        """Return the snapshot of copies in host memory."""
        used: dict[str, Tensor] = {}

        def copied(key: str, tensor: Tensor) -> Tensor:
            place = self._held.get(key)
            if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                is_cuda = tensor.device.type == "cuda"  # from pinned memory alone copies overlap
                place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
            used[key] = place
            return place.copy_(tensor, non_blocking=True)

        staged = snapshot.staged(copied)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._held = used
        return staged


class PendingSave:
    """One save under way."""

    def __init__(
        self, snapshot: EngineSnapshot, request: Request, lock: FolderLock, ranks: SaveExchange
    ) -> None:
        self._snapshot: EngineSnapshot | None = snapshot
        self._request, self._lock, self._ranks = request, lock, ranks
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name=f"checkpoint {request.tag}")
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end.

        Raises:
            TorchloomError: the save has failed.
        """
        self._thread.join()
        if isinstance(self._error, TorchloomError):
            raise self._error
        if self._error is not None:
            raise CheckpointError(
                f"{self._request.failure}: {type(self._error).__name__}: {self._error}"
            ) from self._error

    def settled_after(self, step: int) -> bool:
        """Say whether the save is over, as far as the end of an optimizer step may tell.

        Raises:
            TorchloomError: it has failed; on all ranks after the same step.
        """
        is_over = self.is_over  # asked once: the thread may end in between
        if is_over and (self._error is None or self._ranks.world_size == 1):
            self.wait()
            return True
        if self._ranks.rank == 0 and is_over and not self._told:
            self._ranks.tell(_STOP, str(step + 1))
            self._told = True
        word = self._ranks.heard(_STOP)
        if word is not None and step >= int(word):
            self.wait()
        return False

    def _run(self) -> None:
        assert self._snapshot is not None
        try:
            with self._ranks:
                write(self._snapshot, self._request, self._lock, self._ranks)
        except BaseException as error:  # noqa: BLE001  raised where training can hear of it
            self._error = error
            logger.error("%s", error)
        finally:
            self._snapshot = None
