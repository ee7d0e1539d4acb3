"""The engine: one training step after another over a sharded model.

    loss = engine(batch)       forward, with inputs cast to the compute dtype
    engine.backward(loss)      scaled by loss scale and accumulation; gradients are averaged
    engine.step()              at the accumulation boundary: clip, step, publish, schedule, zero

The calls and their names are DeepSpeed's. The engine holds no weights of its own: the model is the
caller's, sharded in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchloom import _torch
from torchloom.compiler.support import check_supported
from torchloom.config import Config
from torchloom.engine import checkpoint, export
from torchloom.engine.agreement import Agreement
from torchloom.engine.groups import World
from torchloom.engine.local import LocalParams
from torchloom.engine.loss import check_loss
from torchloom.engine.precision import cast_inputs, dtype_of
from torchloom.engine.scaling import LossScaler
from torchloom.engine.stream import make_stream
from torchloom.engine.timers import Timers
from torchloom.engine.update import Update
from torchloom.engine.weave import build_session, start_compiled
from torchloom.errors import EngineError
from torchloom.graph import GraphPass
from torchloom.log import get_logger
from torchloom.pipeline import CompileReport, CompileSession
from torchloom.runtime import CommStats, MoveStats, mover_of
from torchloom.shard import layout_of, owners_of, sync_in_backward, unshard

logger = get_logger(__name__)


class Engine:
    """Drives forward, backward and step of one sharded model; made by `torchloom.initialize`."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        world: World,
        local: LocalParams,
        optimizer: Optimizer | None,
        lr_scheduler: Any,
        agreement: Agreement,
    ) -> None:
        self.module = model
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader: Any = None
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.world = world
        self.local = local
        self._agreement = agreement
        self.scaler = LossScaler(
            config.precision.loss_scale if config.precision.dtype == "fp16" else None
        )
        self._session: CompileSession | None = None
        self.stream = make_stream(config.offload, optimizer, world.device)
        self._update = Update(config, local, world.comm, self.scaler, self.stream)
        self._boundary: bool | None = None
        self._num_backwards = 0
        self._step_applied = False
        self._timers = Timers(config.wall_clock_breakdown, world.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; floating-point inputs are cast to the compute dtype."""
        dtype = dtype_of(self.config.precision.dtype)
        if dtype is not torch.float32:
            args, kwargs = cast_inputs(args, dtype), cast_inputs(kwargs, dtype)
        with self._timers.measure("forward"):
            return self.module(*args, **kwargs)

    forward = __call__

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute gradients of a scalar loss; they add up until the accumulation boundary.

        Args:
            loss: a tensor with one element, made by this engine's model.
            retain_graph: keep the autograd graph for another backward.
            scale_wrt_gas: divide by the accumulation steps, so that accumulated gradients are a
                mean over micro-steps.

        Returns:
            The loss as it was handed in, divided by the accumulation steps if asked.

        Raises:
            EngineError: the loss is not a scalar, or does not depend on the model's parameters.
        """
        check_loss(loss)
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        scaled = loss * self.scaler.scale if self.scaler.scale != 1.0 else loss
        with self._timers.measure("backward"):
            scaled.backward(retain_graph=retain_graph)
        self._num_backwards += 1
        self.global_samples += self.config.batch.micro_batch_size * self.world.world_size
        return loss

    def step(self) -> None:
        """Finish a micro-step; at the accumulation boundary, update the weights.

        At the boundary gradients are clipped to `gradient_clipping`, the optimizer and the schedule
        step, and gradients are dropped. A step whose gradients are not finite is skipped on all
        ranks, counted (`skipped_steps`) and logged.

        Raises:
            EngineError: no backward pass since the last step, or there is no optimizer.
        """
        if self._num_backwards == 0:
            raise EngineError(
                "step() was called without backward(): call engine.backward(loss) first, then "
                "engine.step(), once per micro-batch"
            )
        if self.optimizer is None:
            raise EngineError(
                "step() needs an optimizer: pass optimizer= to torchloom.initialize, or name one "
                "in the config"
            )
        is_boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._step_applied = False
        self._num_backwards = 0
        if is_boundary:
            owners_of(self.module)  # a parameter added since initialize would never be stepped
            with self._timers.measure("step"):
                self._step_applied = self._update.apply(
                    self.optimizer,
                    self.lr_scheduler,
                    reduce=self._reduces_at_boundary(),
                    step=self.global_steps,
                )
            self.global_steps += 1
            self._timers.step = self.global_steps
            self._print_progress()

    def _reduces_at_boundary(self) -> bool:
        layout = layout_of(self.module)
        return layout.stage < 2 and all(spec.mode != "synced" for spec in layout)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of micro-steps inside unsynchronised; they add up locally.

        Raises:
            EngineError: gradients are sharded (stages 2, 3) or averaged inside compiled graphs.
        """
        if not self._reduces_at_boundary():
            raise EngineError(
                "no_sync() needs whole local gradients: stages 2 and 3 shard them, and a compiled "
                "stage 0 or 1 without accumulation averages them in its graph. Set "
                "gradient_accumulation_steps in the config instead"
            )
        before, self._boundary = self._boundary, False
        try:
            yield
        finally:
            self._boundary = before

    def zero_grad(self) -> None:
        """Drop all gradients that have accumulated."""
        self.local.zero_grad()

    def compile(
        self,
        backend: str | Callable[..., Any] | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        passes: Sequence[str | GraphPass] | None = None,
        schedule: Sequence[tuple[int, Sequence[str | GraphPass]]] | None = None,
    ) -> None:
        """Compile the model in place, with sharding and communication woven into its graphs.

        Args:
            backend: "inductor" (default), "aot_eager", "eager", any registered backend, a path
                "package.module.function", or a callable `(gm, example_inputs) -> callable`.
            compile_kwargs: more arguments for `torch.compile`, e.g. `{"dynamic": True}`.
            passes: names or passes to run instead of the stage's preset.
            schedule: `[(0, passes)]`, another way to say `passes`.

        Raises:
            CompileError: torch.compile does not work here.
            ConfigError: the backend cannot be found.
            EngineError: the engine is compiled already.
            PassOrderError: the passes are unknown, contradict each other, or lack what they need.
            AgreementError: the ranks were given different passes or options.
        """
        check_supported()
        if self._session is not None:
            if self.config.compile.enabled and not (
                backend or compile_kwargs or passes or schedule
            ):
                return  # initialize() has done it, as the config asked
            raise EngineError(
                "this engine is compiled already: call engine.compile() once, with all options"
                + (", or drop compile.enabled" if self.config.compile.enabled else "")
            )
        if self.gradient_accumulation_steps() == 1:
            sync_in_backward(self.module, True)
        session, kwargs = build_session(
            self.config,
            layout_of(self.module),
            backend=backend,
            compile_kwargs=compile_kwargs,
            passes=passes,
            schedule=schedule,
        )
        self._agreement.check("what engine.compile() weaves", session.key)
        session.agree = self._agreement.check
        start_compiled(self.module, session, **kwargs)
        self._session = session

    @property
    def is_compiled(self) -> bool:
        """Whether `compile()` has been called."""
        return self._session is not None

    def compile_report(self) -> CompileReport:
        """Return what was captured, woven, taken from caches or left eager so far."""
        return CompileReport() if self._session is None else self._session.report

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def rank(self) -> int:
        """This process's rank among all."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.world.world_size

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps left out because gradients were not finite."""
        return self.scaler.num_skipped

    @property
    def loss_scale(self) -> float:
        """The factor on the loss (1.0 unless fp16)."""
        return self.scaler.scale

    def train(self, mode: bool = True) -> Engine:
        """Put the model into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the model into evaluation mode."""
        return self.train(False)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the model's parameters (shards, where sharded)."""
        return self.module.parameters()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next `step()` updates the weights, instead of counting micro-steps."""
        self._boundary = is_boundary

    def get_global_grad_norm(self) -> float | None:
        """Return the norm before clipping of the last step; None if nothing asked for it.

        It is computed when `gradient_clipping` is on or a 16-bit dtype checks for overflow.
        """
        norm = self._update.norm
        return None if norm is None else float(norm)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [] if self.optimizer is None else [g["lr"] for g in self.optimizer.param_groups]

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights."""
        return self._step_applied

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.config.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward pass of one rank."""
        return self.config.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per optimizer step."""
        return self.config.batch.accumulation_steps

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self.config.zero.stage

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.config.precision.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.config.precision.dtype == "bf16"

    def comm_stats(self) -> CommStats:
        """Return how many collectives this rank has begun, and the bytes of their full tensors."""
        return self.world.comm.stats()

    def move_stats(self) -> MoveStats:
        """Return what this rank has moved between device and host, and its host memory, in bytes."""
        return mover_of(self.world.device).stats()

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        exclude_frozen_parameters: bool = False,
    ) -> str:
        """Write weights, optimizer, schedule, counters and RNG; all ranks must call.

        Args:
            save_dir: folder of all checkpoints of the run.
            tag: the checkpoint's own folder name; default `global_step<N>`.
            client_state: JSON-able values of the caller's, given back by `load_checkpoint`.
            exclude_frozen_parameters: leave parameters that need no gradient out.

        Returns:
            The path of the checkpoint, which appears under this name only when complete.
        """
        return checkpoint.save(
            self,
            Path(save_dir),
            tag or f"global_step{self.global_steps}",
            dict(client_state or {}),
            exclude_frozen=exclude_frozen_parameters,
        )

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> tuple[str, dict[str, Any]]:
        """Continue from a checkpoint, also one saved by another number of ranks or another stage.

        Args:
            load_dir: folder of all checkpoints of the run.
            tag: which one; default: the newest complete one.
            load_module_strict: the checkpoint must hold exactly this model's parameters.
            load_optimizer_states: load the optimizer's states as well.
            load_lr_scheduler_states: load the schedule's position as well.

        Returns:
            The checkpoint's path and the caller's `client_state`.

        Raises:
            CheckpointError: nothing to load, or it belongs to another model; on every rank.
        """
        return checkpoint.load(
            self,
            Path(load_dir),
            tag,
            strict=load_module_strict,
            optimizer_states=load_optimizer_states,
            scheduler_states=load_lr_scheduler_states,
        )

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "model.safetensors"
    ) -> str:
        """Write the whole weights in 16 bit to one file, from rank 0; all ranks must call.

        Args:
            save_dir: target folder.
            save_filename: `*.safetensors`, or any other suffix for `torch.save`.
        """
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16
        return export.save_weights(self.module, Path(save_dir) / save_filename, dtype)

    def destroy(self) -> None:
        """Let go of compiled code and gradients. The model stays sharded and usable."""
        self.local.zero_grad()
        self._session = None
        _torch.forget_compiled_call(self.module)

    def unshard(self) -> nn.Module:
        """Give the model back whole; all ranks must call. The engine is of no use afterwards."""
        self.destroy()
        return unshard(self.module)

    def _print_progress(self) -> None:
        every = self.config.steps_per_print
        if every and every != float("inf") and self.global_steps % int(every) == 0:
            rates = ", ".join(f"{lr:.3g}" for lr in self.get_lr())
            logger.info(
                "step %d, skipped %d, lr %s%s",
                self.global_steps,
                self.skipped_steps,
                rates,
                self._timers.report(),
            )
