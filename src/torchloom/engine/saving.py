"""The engine's checkpoints, and its weights in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from torchloom.checkpoints import LoadOptions
from torchloom.checkpoints import save_model as export
from torchloom.checkpoints.folder import root_of
from torchloom.checkpoints.write import Request
from torchloom.engine.state import EngineState


class Saving(EngineState):
    """Part of `Engine`: it writes and reads checkpoints."""

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        async_save: bool | None = None,
        keep_last: int | None = None,
    ) -> str:
        """Write all that a run needs to continue exactly; all ranks must call. See docs/checkpoints.md.

        Args:
            save_dir: folder of all checkpoints of the run, shared by all ranks.
            tag: name of the checkpoint's own folder; an existing one is replaced atomically. Default:
                `global_step<N>`.
            client_state: the caller's plain values and tensors, which `load_checkpoint` returns.
            save_latest: allow a load without a tag to choose this checkpoint.
            exclude_frozen_parameters: leave out parameters that need no gradient.
            async_save: return once all is copied to host memory. A failure is raised by a later
                `step`, `save_checkpoint`, `load_checkpoint` or `wait_for_checkpoint`. Default: the
                config's `checkpoint.async_save`.
            keep_last: number of checkpoints with `save_latest` to keep; older ones are removed
                afterwards. Default: the config's `checkpoint.keep_last`.

        Returns:
            The path of the checkpoint, which appears under this name only when complete.

        Raises:
            CheckpointError: the checkpoint cannot be written, or a value in it cannot be saved; every
                rank raises. A previous checkpoint of this tag stays, and training can go on.

        Example:
            >>> engine.save_checkpoint("runs/a", client_state={"epoch": 3})  # doctest: +SKIP
            'runs/a/global_step100'
        """
        engine: Any = self
        defaults = self.config.checkpoint
        keep = defaults.keep_last if keep_last is None else keep_last
        name = f"global_step{self.global_steps}" if tag is None else tag
        return self._checkpoints.save(
            engine,
            Request(root_of(save_dir), name, save_latest, keep),
            engine._counters(),
            client_state or {},
            exclude_frozen=exclude_frozen_parameters,
            in_background=defaults.async_save if async_save is None else async_save,
        )

    def wait_for_checkpoint(self) -> None:
        """Wait until the save in the background, if there is one, is complete.

        Raises:
            CheckpointError: it could not be written; every rank raises.
        """
        self._checkpoints.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Continue from a checkpoint, which another number of ranks or another stage may have saved.

        The engine verifies all files and reads what it needs before it changes anything.

        Args:
            load_dir: folder of all checkpoints of the run.
            tag: name of the checkpoint; default: the newest whose files are intact.
            load_module_strict: the checkpoint must hold exactly this model's parameters.
            load_optimizer_states: load the optimizer's states as well.
            load_lr_scheduler_states: load the schedule's position as well.
            load_module_only: load only weights and buffers; counters, random generators and the rest
                keep their state.
            custom_load_fn: called as `fn(src=..., dst=...)` instead of loading parameters by name;
                `src` is a dict of whole weights, `dst` the model with whole weights.

        Returns:
            The checkpoint's path and the caller's `client_state`.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged or of another model. Every rank
                raises, and the engine is unchanged.
        """
        options = LoadOptions(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            custom_load_fn,
        )
        engine: Any = self
        with self._account.charged():
            loaded = self._checkpoints.load(engine, root_of(load_dir), tag, options)
        engine._after_load(loaded.counters)
        return loaded.path, loaded.client_state

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "model.safetensors"
    ) -> str:
        """Gather the weights and let rank 0 write them in 16 bit to one file; all ranks must call.

        Args:
            save_dir: target folder.
            save_filename: `*.safetensors`; any other suffix is written by `torch.save`.

        Returns:
            The path of the file.

        Raises:
            CheckpointError: the file cannot be written; every rank raises.
        """
        dtype = torch.float16 if self.config.precision.dtype == "fp16" else torch.bfloat16
        path = root_of(save_dir) / save_filename
        return export.save_file(self.module, path, dtype, self._checkpoints)

    save_fp16_model = save_16bit_model
