"""Saves and loads the checkpoints of one engine: requests that all ranks make alike, one save at a time.

A save in the background lets training wait only for the copy to host memory, which is kept for the next save. A
thread on each rank does the rest and uses no collective. The interpreter waits for the thread before it exits.

All ranks raise a failure after the same step: when rank 0 finds at the end of a step that the save has
failed, it notes that ranks raise after the next step. No rank can end that step without rank 0, which has
noted it before.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchloom.checkpoints import snapshot
from torchloom.checkpoints.engine_values import Counters, Trained
from torchloom.checkpoints.folder import check_tag
from torchloom.checkpoints.lock import FOLDERS
from torchloom.checkpoints.rank_task import RankTask, answers, attempt
from torchloom.checkpoints.restore import Loaded, LoadOptions, load
from torchloom.checkpoints.snapshot import EngineSnapshot
from torchloom.checkpoints.write import Request, write
from torchloom.errors import CheckpointError
from torchloom.exchange import Agreement
from torchloom.log import get_logger

logger = get_logger(__name__)


class _Pending(NamedTuple):
    """A save in the background."""

    done: Future[None]
    ranks: RankTask


def _write_in_background(
    state: EngineSnapshot, request: Request, owner: object, ranks: RankTask
) -> None:
    try:
        with ranks:
            write(state, request, owner, ranks)
    except BaseException as error:  # raised where training can hear of it, which may never come
        logger.error("%s", error)
        raise


class Checkpoints:
    """Saves and loads one engine.

    Args:
        agreement: how the ranks tell each other what they were asked for.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._owner = object()
        weakref.finalize(self, FOLDERS.release, self._owner)
        self._staging: dict[str, Tensor] = {}
        """Host memory for copies of what is saved."""
        self._pending: _Pending | None = None

    def save(
        self,
        engine: Trained,
        request: Request,
        counters: Counters,
        client_state: Mapping[str, Any],
        *,
        exclude_frozen: bool,
        in_background: bool,
    ) -> str:
        """Write a checkpoint; see `Engine.save_checkpoint`.

        Args:
            engine: whose state is written.
            request: folder, tag, and how many checkpoints to keep.
            counters: the engine's steps and samples.
            client_state: the caller's values.
            exclude_frozen: leave out parameters that need no gradient.
            in_background: return once the state is copied to host memory.

        Returns:
            The path that the checkpoint has once it is complete.

        Raises:
            CheckpointError: this save failed, or the one before it, in the background.
        """
        if type(request.tag) is int:
            request = replace(request, tag=str(request.tag))
        taken: list[EngineSnapshot] = []

        def take() -> dict[str, Any]:
            self.wait()
            tag, keep_last = check_tag(request.tag), request.keep_last
            if keep_last is not None and (isinstance(keep_last, bool) or keep_last < 1):
                raise CheckpointError(
                    f"keep_last={keep_last!r}: pass the number to keep, at least 1"
                )
            with torch.inference_mode(False):  # copies made in it could not be written again
                state = snapshot.take(engine, counters, client_state, exclude_frozen=exclude_frozen)
                taken.append(self._staged(state) if in_background else state)
            asked = {**asdict(request), "root": str(request.root), "tag": tag}
            return {**asked, "frozen": exclude_frozen, "background": in_background}

        ranks = self._together("the checkpoint to save", request.failure, take)
        placed = replace(request, root=request.root.absolute())
        if in_background:
            thread = ThreadPoolExecutor(1, f"checkpoint {request.tag}")
            done = thread.submit(_write_in_background, taken.pop(), placed, self._owner, ranks)
            thread.shutdown(wait=False)  # it ends after this save
            self._pending = _Pending(done, ranks)
        else:
            with ranks:
                write(taken[0], placed, self._owner, ranks)
        return str(request.root / request.tag)

    def load(self, engine: Trained, root: Path, tag: object, options: LoadOptions) -> Loaded:
        """Continue from a checkpoint; see `Engine.load_checkpoint`.

        Args:
            engine: receives the weights and states.
            root: folder of all checkpoints.
            tag: a name or number; None takes the newest that verifies.
            options: what to take from it.

        Raises:
            CheckpointError: nothing to load, or it does not fit; the engine is as it was.
        """
        names: list[str | None] = []

        def look() -> dict[str, Any]:
            self.wait()
            names.append(None if tag is None else check_tag(tag))
            asked = {**vars(options), "custom_load_fn": options.custom_load_fn is not None}
            return {**asked, "root": str(root), "tag": names[0]}

        failure = f"no checkpoint can be loaded from {str(root)!r}"
        ranks = self._together("the checkpoint to load", failure, look)
        with ranks, torch.inference_mode(False):
            return load(engine, root, names[0], options, ranks)

    def in_step(
        self,
        what: str,
        failure: str,
        look: Callable[[], dict[str, Any]],
        action: Callable[[], Any],
    ) -> list[Any]:
        """Run an action on all ranks at once; return what each returned, by rank.

        Args:
            what: names the action, to compare ranks.
            failure: the beginning of the error's message.
            look: returns what was asked for, which must be equal on all ranks.
            action: runs on every rank and returns what JSON can hold.

        Raises:
            CheckpointError: it failed on a rank, or ranks were asked for different ones.
        """
        with self._together(what, failure, look) as ranks:
            return ranks.together(failure, action)

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: it has failed.
        """
        pending, self._pending = self._pending, None  # whatever it raises, that save is over
        if pending is not None:
            pending.done.result()

    def after_step(self, step: int) -> None:
        """Raise, at the end of an optimizer step, if a save in the background has failed.

        Raises:
            CheckpointError: it has; on all ranks after the same step.
        """
        if self._pending is None:
            return
        done, ranks = self._pending
        is_over = done.done()
        if is_over and (ranks.world_size == 1 or done.exception() is None):
            self.wait()
            return
        last = ranks.note("last step")
        if last is None and is_over and ranks.rank == 0:
            ranks.note("last step", str(step + 1))
        if last is not None and step >= int(last):
            self.wait()

    def close(self) -> None:
        """Wait for a save in the background, and let other runs write into the folders.

        Raises:
            CheckpointError: the save has failed.
        """
        try:
            self.wait()
        finally:
            FOLDERS.release(self._owner)

    def _staged(self, state: EngineSnapshot) -> EngineSnapshot:
        """Return the snapshot of copies in host memory, in that of the save before where it fits."""
        before, self._staging = self._staging, {}
        devices: set[torch.device] = set()

        def copied(key: str, tensor: Tensor) -> Tensor:
            if tensor.device.type == "cuda":
                devices.add(tensor.device)  # which need not be the current one
            place = before.get(key)
            if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
                is_cuda = tensor.device.type == "cuda"  # from pinned memory alone copies overlap
                place = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
            self._staging[key] = place
            return place.copy_(tensor, non_blocking=True)

        staged = state.staged(copied)
        for device in devices:
            torch.cuda.synchronize(device)
        return staged

    def _together(self, what: str, failure: str, action: Callable[[], dict[str, Any]]) -> RankTask:
        """Let all ranks ask for the same; return what they go on with.

        Raises:
            CheckpointError: a rank cannot, or asks for something else.
        """
        agreement = self._agreement
        name = secrets.token_hex(8)
        texts = agreement.texts(what, attempt(lambda: {"name": name, "asked": action()}))
        told = answers(failure, texts)
        first = told[0]["asked"]
        for rank, each in enumerate(told):
            differ = [key for key, value in each["asked"].items() if first[key] != value]
            if differ:
                sides = "; ".join(
                    f"rank {r}: " + ", ".join(f"{key}={told[r]['asked'][key]!r}" for key in differ)
                    for r in (0, rank)
                )
                raise CheckpointError(
                    f"{failure}: the ranks were asked for different ones ({sides}): pass the same "
                    "arguments on every rank"
                )
        return RankTask(agreement.rank, agreement.world_size, told[0]["name"])
