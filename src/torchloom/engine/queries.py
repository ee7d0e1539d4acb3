"""The engine answers questions about its settings, its ranks, its optimizer and its last step, by DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch

from torchloom import envs
from torchloom.config import thawed_map
from torchloom.engine.state import EngineState
from torchloom.loop.precision import dtype_of
from torchloom.runtime import CommStats, MoveStats, mover_of
from torchloom.shard import default_threshold, layout_of


class Queries(EngineState):
    """Part of `Engine`: what it tells of its settings."""

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.world.device

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.world.rank

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.world.world_size

    global_rank = rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its host."""
        return envs.launch().local_rank

    dp_world_size = seq_dp_world_size = world_size

    @property
    def mp_world_size(self) -> int:
        """Number of ranks that share one forward pass: 1, as neither layers nor sequences are divided."""
        return 1

    sequence_parallel_size = mp_world_size

    def get_data_parallel_rank(self) -> int:
        """Return this process's rank among the data-parallel ranks."""
        return self.world.rank

    def get_tensor_parallel_rank(self) -> int:
        """Return 0: layers are not divided over ranks."""
        return 0

    get_model_parallel_rank = get_tensor_parallel_rank

    @property
    def loss_scale(self) -> float:
        """The factor that multiplies the loss before backward (1.0 unless fp16)."""
        return self.scaler.scale

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale of fp16 follows overflows."""
        return (
            self.config.precision.scales_loss and not self.config.precision.loss_scale.static_scale
        )

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [] if self.optimizer is None else [g["lr"] for g in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of each parameter group; a schedule sets it again after its next step."""
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each parameter group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def optimizer_name(self) -> str | None:
        """Return the class of the optimizer, in lower case."""
        return None if self.optimizer is None else type(self.optimizer).__name__.lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return the arguments of the configured optimizer; None without one."""
        section = self.config.optimizer
        return None if section is None else thawed_map(section.params)

    def scheduler_name(self) -> str | None:
        """Return the name of the configured schedule; None without one."""
        return None if self.config.scheduler is None else self.config.scheduler.name

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return the arguments of the configured schedule; None without one."""
        section = self.config.scheduler
        return None if section is None else thawed_map(section.params)

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

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the batch size over all ranks, that of one forward pass, and the accumulation steps."""
        batch = self.config.batch
        return batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-steps; otherwise each `step()` updates the weights."""
        return self.config.batch.is_managed

    def gradient_clipping(self) -> float:
        """Return the greatest gradient norm; 0 does not clip."""
        return self.config.gradient_clipping

    def steps_per_print(self) -> float | None:
        """Return the steps from one line of progress to the next."""
        return self.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        """Whether lines of progress tell times."""
        return self.config.wall_clock_breakdown

    def zero_optimization(self) -> bool:
        """Whether anything is sharded by default: the stage is not 0."""
        return self.config.zero.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded: stages 2 and 3."""
        return self.config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are gathered for each use: stage 3."""
        return self.config.zero.stage == 3

    def zero_param_persistence_threshold(self) -> int:
        """Return the elements from which on a parameter is sharded."""
        asked = self.config.zero.param_persistence_threshold
        if asked is not None:
            return asked
        return default_threshold(spec.numel for spec in layout_of(self.module))

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether a framework's save gathers whole weights."""
        return self.config.zero.gather_16bit_weights_on_model_save

    def torch_autocast_enabled(self) -> bool:
        """Whether `torch_autocast` is on."""
        return self.config.precision.autocast is not None

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of `torch_autocast`; None if it is off."""
        autocast = self.config.precision.autocast
        return None if autocast is None else dtype_of(autocast.dtype)

    def amp_enabled(self) -> bool:
        """Return False: apex is not used."""
        return False

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return dtype_of(self.config.precision.reduce_dtype)

    @property
    def skipped_steps(self) -> int:
        """Number of optimizer steps skipped because a gradient was not finite."""
        return self.scaler.num_skipped

    @property
    def should_stop(self) -> bool:
        """Whether `non_finite: stop` has skipped a step, so that the run should end; equal on all ranks."""
        return self._update.stop_reason is not None

    @property
    def stop_reason(self) -> str | None:
        """The skipped step and the gradient that was not finite, as text; None unless `should_stop`."""
        return self._update.stop_reason

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        return self._boundary.is_next(self.micro_steps)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next `step()` updates the weights, instead of counting micro-steps.

        Raises:
            EngineError: `managed_gradient_accumulation` is false, so that each `step()` updates them.
        """
        self._boundary.force(is_boundary)

    def get_global_grad_norm(self) -> float | None:
        """Return the global gradient norm of the last step, before clipping; None if it was not computed.

        The engine computes it in each step that it does not skip, unless clipping is off and
        `bf16.check_grad_overflow` is false.
        """
        norm = self._update.norm
        return None if norm is None else float(norm)

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the weights."""
        return self._step_applied

    def comm_stats(self) -> CommStats:
        """Return how many collectives this rank has started, and the bytes of their full tensors."""
        return self.world.comm.stats().since(self._comm_before)

    def move_stats(self) -> MoveStats:
        """Return the bytes that this engine moved between device and host, and its host memory in bytes."""
        return mover_of(self.world.device).stats(self._account)
