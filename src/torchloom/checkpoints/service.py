"""The checkpoints of one engine: requests that all ranks make alike, one save at a time."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torchloom.checkpoints import snapshot
from torchloom.checkpoints.background import PendingSave, Staging
from torchloom.checkpoints.folder import check_tag
from torchloom.checkpoints.lock import FolderLock
from torchloom.checkpoints.restore import Loaded, LoadOptions, load
from torchloom.checkpoints.snapshot import EngineSnapshot
from torchloom.checkpoints.together import SaveExchange, answers, attempt
from torchloom.checkpoints.trained import Counters, Trained
from torchloom.checkpoints.write import Request, write
from torchloom.errors import CheckpointError
from torchloom.exchange import Agreement


@dataclass
class Checkpoints:
    """Saves and loads one engine.

    Args:
        agreement: how the ranks tell each other what they were asked for.
    """

    agreement: Agreement
    _lock: FolderLock = field(default_factory=FolderLock)
    _staging: Staging = field(default_factory=Staging)
    _pending: PendingSave | None = None

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
        taken: list[tuple[EngineSnapshot, Request]] = []

        def take() -> dict[str, Any]:
            self.wait()
            tag, keep_last = check_tag(request.tag), request.keep_last
            if keep_last is not None and (isinstance(keep_last, bool) or keep_last < 1):
                raise CheckpointError(
                    f"keep_last={keep_last!r}: pass the number to keep, at least 1"
                )
            with torch.inference_mode(False):  # copies made in it could not be written again
                state = snapshot.take(engine, counters, client_state, exclude_frozen=exclude_frozen)
                if in_background:
                    state = self._staging.copy(state)
            taken.append((state, replace(request, root=request.root.absolute())))
            asked = {**asdict(request), "root": str(request.root), "tag": tag}
            return {**asked, "frozen": exclude_frozen, "background": in_background}

        ranks = self._together("the checkpoint to save", request.failure, take)
        state, placed = taken[0]
        if in_background:
            self._pending = PendingSave(state, placed, self._lock, ranks)
        else:
            with ranks:
                write(state, placed, self._lock, ranks)
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

        def look() -> dict[str, Any]:
            self.wait()
            asked = {**vars(options), "custom_load_fn": options.custom_load_fn is not None}
            return {**asked, "root": str(root), "tag": None if tag is None else check_tag(tag)}

        failure = f"no checkpoint can be loaded from {str(root)!r}"
        ranks = self._together("the checkpoint to load", failure, look)
        with ranks, torch.inference_mode(False):
            return load(engine, root, None if tag is None else check_tag(tag), options, ranks)

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
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def after_step(self, step: int) -> None:
        """Raise, at the end of an optimizer step, if a save in the background has failed.

        Raises:
            CheckpointError: it has; on all ranks after the same step.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            if pending.settled_after(step):
                self._pending = None
        except Exception:  # whatever failed, that save is over
            self._pending = None
            raise

    def close(self) -> None:
        """Wait for a save in the background, and let other runs write into the folders.

        Raises:
            CheckpointError: the save has failed.
        """
        try:
            self.wait()
        finally:
            self._lock.release()

    def _together(
        self, what: str, failure: str, action: Callable[[], dict[str, Any]]
    ) -> SaveExchange:
        """Let all ranks ask for the same; return what they go on with.

        Raises:
            CheckpointError: a rank cannot, or asks for something else.
        """
        agreement = self.agreement
        name = secrets.token_hex(8)
        texts = agreement.texts(what, attempt(lambda: {"name": name, "asked": action()}))
        told = answers(failure, texts)
        for rank, each in enumerate(told):
            differ = [key for key, value in each["asked"].items() if told[0]["asked"][key] != value]
            if differ:
                sides = "; ".join(
                    f"rank {r}: " + ", ".join(f"{key}={told[r]['asked'][key]!r}" for key in differ)
                    for r in (0, rank)
                )
                raise CheckpointError(
                    f"{failure}: the ranks were asked for different ones ({sides}): pass the same "
                    "arguments on every rank"
                )
        return SaveExchange(agreement.rank, agreement.world_size, told[0]["name"])
