"""The settings that the rest of torchloom reads: frozen, with every "auto" resolved.

A component receives its own part (`config.zero`, `config.precision`, ...), not the whole. `load_config`
creates these records; this module does not parse or check anything.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from torchloom.config.budget import MemoryBudget
from torchloom.config.findings import Hint, Note
from torchloom.config.frozen import FrozenMap, thaw
from torchloom.config.monitors import MonitorsConfig

MIB = 1 << 20
UNSHARDED_BELOW = 100_000
"""Elements below which a parameter stays whole unless a configuration says it; DeepSpeed's default."""
PassName = str | tuple[str, MemoryBudget | Mapping[str, object]]
DType = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """The batch triple; train = micro x accumulation steps x data-parallel world size."""

    train_batch_size: int = 1
    """Samples per optimizer step over all ranks."""
    micro_batch_size: int = 1
    """Samples per forward pass of one rank."""
    accumulation_steps: int = 1
    """Micro-steps per optimizer step."""
    is_managed: bool = True
    """Whether the engine counts micro-steps; otherwise each `step()` updates the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafConfig:
    """Which modules are leaf modules: gathered and reduced as one, as ranks use other parts of them."""

    classes: tuple[str, ...] = ()
    """Their classes by name, or by module and name."""
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How training state is sharded over ranks."""

    stage: Literal[0, 1, 2, 3] = 0
    """What is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
    param_persistence_threshold: int | None = None
    """Parameters with fewer elements are not sharded. None: see `shard.layout.default_threshold`."""
    gather_bucket_bytes: int | None = None
    """Size up to which all-gathers are merged; 0 merges none. None: see `pipeline.transfer_sizes`."""
    reduce_bucket_bytes: int | None = None
    """Size up to which gradient reductions are merged; 0 merges none. None: as for gathers."""
    prefetch_bytes: int | None = None
    """Bytes that may be gathered ahead of their use; 0 prefetches nothing. None: as for buckets."""
    shard_size: int | None = None
    """Ranks per shard group (hybrid sharding); None is all ranks."""
    gather_16bit_weights_on_model_save: bool = False
    """Whether a 16-bit model export gathers the full weights (stage 3)."""
    leaf_module: LeafConfig = field(default_factory=LeafConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaleConfig:
    """How an fp16 loss is scaled."""

    static_scale: float = 0.0
    """The constant scale; 0 means dynamic scaling."""
    initial_scale_power: int = 16
    """Dynamic scaling starts at 2 to this power."""
    window: int = 1000
    """Steps without overflow before the scale doubles."""
    hysteresis: int = 2
    """Overflows tolerated before the scale halves."""
    min_scale: float = 1.0
    """Lowest value of the dynamic scale."""
    consecutive_hysteresis: bool = False
    """Whether a step without overflow resets the count of tolerated overflows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutocastConfig:
    """What `torch.autocast` does around the model's forward."""

    dtype: Literal["bf16", "fp16"] = "bf16"
    modules: tuple[str, ...] | None = None
    """Classes of modules whose weights may be gathered in `dtype`; None: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """In which types the model computes and the ranks communicate."""

    dtype: DType = "fp32"
    """Compute type of parameters and activations."""
    master: Literal["fp32", "bf16"] = "fp32"
    """Type of shards, gradients and optimizer states; where it is fp32, float64 stays float64."""
    reduce_dtype: DType = "fp32"
    """Type in which gradients are reduced over ranks."""
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    autocast: AutocastConfig | None = None
    """None: the engine adds no autocast."""

    @property
    def scales_loss(self) -> bool:
        """Whether gradients may be fp16, whose small range needs a scaled loss."""
        return self.dtype == "fp16" or (self.autocast is not None and self.autocast.dtype == "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFiniteConfig:
    """What all ranks do in a step whose gradients hold NaN or Inf."""

    policy: Literal["skip", "raise", "stop"] = "skip"
    """skip drops the step, raise raises an error at once, stop drops the step and asks the loop to end."""
    checks: bool = True
    """Whether gradients are checked; False only if bf16.check_grad_overflow is false."""
    max_consecutive_skips: int = 50
    """Steps skipped in a row before training ends with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Which torch optimizer, with keyword arguments ready for its constructor."""

    name: Literal["adamw", "adam", "sgd", "muon"]
    params: Mapping[str, object] = field(default_factory=FrozenMap)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Which learning-rate schedule, with its keyword arguments.

    `name` is a schedule of DeepSpeed's or a class of torch.optim.lr_scheduler.
    """

    name: str
    params: Mapping[str, object] = field(default_factory=FrozenMap)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """What is kept in host memory, and how it is moved."""

    opt_states: bool = False
    """Whether optimizer states are kept on the host and streamed through the device in the step."""
    parameters: bool = False
    """Whether this rank's shards of parameters are kept on the host until they are gathered."""
    double_buffer: bool = True
    """Whether two transfers run at a time in each direction, instead of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileOptions:
    """What `engine.compile()` does with the captured graphs."""

    enabled: bool = False
    """Whether `torchloom.initialize` calls `engine.compile()` itself."""
    deepcompile: bool = False
    """Accepted for DeepSpeed compatibility; no effect."""
    backend: str | Callable[..., object] = "inductor"
    """Compiler of the graphs: a registered name or a path "package.module.function"."""
    kwargs: Mapping[str, object] = field(default_factory=FrozenMap)
    """More keyword arguments for torch.compile."""
    passes: tuple[str, ...] | None = None
    """Passes to run, in order; None is the preset of the ZeRO stage."""
    disable_passes: tuple[str, ...] = ()
    """Passes removed from the preset."""
    extra_passes: tuple[str, ...] = ()
    """Passes that other keys add to the list or preset."""
    schedule: tuple[tuple[int, tuple[PassName, ...]], ...] | None = None
    """Steps, and the passes that run from them on; each a name, or a name and a memory budget or its
    options."""
    pass_options: Mapping[str, Any] = field(default_factory=FrozenMap)
    """Options of passes that other keys set, by the name of the pass."""
    memory_budget: MemoryBudget | None = None
    """Device memory that a step may use at its peak; None: no budget."""
    plan: str | None = None
    """Path of a plan to follow; None: torchloom plans if there is a memory budget."""
    replan_step: int = 5
    """Optimizer step after which torchloom plans again with measured times; 0: never."""
    regions: bool = True
    """Whether layers that do the same are compiled once, as one body."""
    chunk_loss: Literal["auto", "always", "never"] = "auto"
    """Whether losses compute a few rows of logits at a time, and also where the model returns logits."""
    strict: bool = False
    """Whether a failed weave raises an error, instead of running the graph eagerly."""
    dump_graphs: bool | str = False
    """Whether graphs are written before and after each pass; a string names the folder."""
    debug_log: bool = False
    """Whether each pass logs its edits and its time."""
    symmetric_memory: bool = False
    """Whether ranks of one host communicate through shared memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutsConfig:
    """How long a rank waits for other ranks, in seconds."""

    step_s: float = 600.0
    """For another rank during a step."""
    compile_s: float = 1800.0
    """For a rank that compiles, loads or saves."""
    agree_s: float = 120.0
    """Until all ranks have compared configuration and model."""
    rendezvous_s: float = 120.0
    """For all ranks to connect."""
    process_group_s: float = 1860.0
    """For collectives of others in a process group that torchloom creates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Defaults for `engine.save_checkpoint`."""

    async_save: bool = False
    """Whether checkpoints are written in the background while training continues."""
    keep_last: int | None = None
    """How many of the newest checkpoints are kept; None keeps all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of one run, validated; `load_config` creates it."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    gradient_clipping: float = 0.0
    """Largest global gradient norm; 0 turns clipping off."""
    non_finite: NonFiniteConfig = field(default_factory=NonFiniteConfig)
    optimizer: OptimizerConfig | None = None
    """None: the caller passes an optimizer."""
    scheduler: SchedulerConfig | None = None
    """None: the caller passes a schedule, or there is none."""
    compile: CompileOptions = field(default_factory=CompileOptions)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)
    steps_per_print: float = 10.0
    """Steps between progress lines; infinity prints none."""
    wall_clock_breakdown: bool = False
    """Whether forward, backward and step are timed."""
    dataloader_drop_last: bool = False
    """Whether the engine's data loader drops an incomplete last batch."""
    seed: int | None = None
    """Seed of the engine's random choices; None does not seed the generators."""
    notes: tuple[Note, ...] = field(default=(), compare=False)
    """What was translated, assumed or ignored."""
    hints: tuple[Hint, ...] = field(default=(), compare=False)
    """Keys that torchloom treats as hints, with the value that it uses."""
    source: Mapping[str, object] = field(default_factory=FrozenMap, compare=False)
    """What the user wrote, as a frozen copy."""

    def to_dict(self) -> dict[str, object]:
        """Return the effective values as plain dicts, lists and numbers.

        Notes, hints and the source are left out.

        Example:
            >>> Config().to_dict()["batch"]["micro_batch_size"]
            1
        """
        skipped = ("notes", "hints", "source")
        return {
            f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in skipped
        }

    def shared_values(self) -> dict[str, object]:
        """Return the values that must be equal on all ranks, as plain dicts, lists and numbers.

        What a rank prints, dumps, writes or times may differ, and is left out.
        """
        values = self.to_dict()
        for name in ("steps_per_print", "wall_clock_breakdown", "monitors"):
            del values[name]
        options = {f.name: _plain(getattr(self.compile, f.name)) for f in fields(self.compile)}
        values["compile"] = {
            name: value
            for name, value in options.items()
            if name not in ("dump_graphs", "debug_log")
        }
        return values

    def digest(self) -> str:
        """Return a short hash of `shared_values`.

        Example:
            >>> Config().digest() == Config(steps_per_print=100.0).digest()
            True
        """
        text = json.dumps(self.shared_values(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return thaw(value)
