"""Hugging Face's Trainer with four ways to hold the weights: DDP, FSDP2, DeepSpeed ZeRO-3, torchloom.

The model is a Llama of transformers with the sizes of `_model.Shape`. `Trainer.train` runs in a thread of its own
and takes a batch from the benchmark when it asks its loader for one, so a step is all that the Trainer does between
two batches.

    FSDP2      `fully_shard` around each layer and the model, as Accelerate does on GPUs: on a CPU it leaves the
               arguments `fsdp` and `fsdp_config` alone, so the peer calls it at the same place
    DeepSpeed  by `TrainingArguments(deepspeed=)`
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from queue import Queue
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from _model import Shape
from arms.base import LEARNING_RATE, WEIGHT_DECAY, Job, Trainee, UnavailableError, join_group

Kind = Literal["ddp", "fsdp2-eager", "fsdp2-block", "fsdp2-whole", "deepspeed", "loom"]
_BUCKET_NUMEL = 5_000_000  # holds the largest parameter; the default would reserve 2 GB


def build(job: Job, *, kind: Kind, compiled: bool = False) -> Trainee:
    """Build one rank of a Trainer.

    Raises:
        UnavailableError: a framework is not installed.
    """
    missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
    if missing:
        raise UnavailableError(f"{' and '.join(missing)} not installed")
    import_module("transformers").logging.set_verbosity_error()
    if kind == "deepspeed":
        _look_for_deepspeed()
    else:
        join_group()
    driven = _Driven()
    made: dict[str, Any] = {}

    def begin() -> None:
        trainer = _trainer(job, kind, compiled, driven)
        made["trainer"] = trainer
        driven.start(trainer)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        return driven.step({"input_ids": tokens, "labels": targets, "shift_labels": targets})

    def facts() -> Mapping[str, Any]:
        session = getattr(made["trainer"], "compile_session", None)
        return {} if session is None else {"graphs": len(session.report.graphs)}

    return Trainee(step=step, compile=begin, facts=facts)


def llama(shape: Shape) -> nn.Module:
    """Return a Llama with the sizes of the benchmark's decoder and the same weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        max_position_embeddings=shape.seq_len,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class _Driven:
    """Lets the benchmark decide when a Trainer takes its next step."""

    def __init__(self) -> None:
        self._batches: Queue[dict[str, Tensor]] = Queue()
        self._ended: Queue[BaseException | None] = Queue()
        self.loss: Tensor | None = None

    def start(self, trainer: Any) -> None:
        def run() -> None:
            try:
                trainer.train()
                raise RuntimeError("the Trainer ended its training by itself")
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for a step
                self._ended.put(error)

        threading.Thread(target=run, daemon=True).start()
        self._wait()

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        self._batches.put(batch)
        self._wait()
        assert self.loss is not None
        return self.loss

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield what the benchmark hands over; whoever asks for the next batch has ended a step."""
        while True:
            self._ended.put(None)
            yield self._batches.get()

    def _wait(self) -> None:
        error = self._ended.get()
        if error is not None:
            raise error


class _Endless(IterableDataset):
    def __init__(self, driven: _Driven) -> None:
        self._driven = driven

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self._driven.batches()


def _trainer(job: Job, kind: Kind, compiled: bool, driven: _Driven) -> Any:
    from transformers import Trainer, TrainingArguments

    common: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(prefix="trainer-"),
        "max_steps": 1_000_000,
        "per_device_train_batch_size": job.batch,
        "gradient_accumulation_steps": job.accumulation,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": kind != "deepspeed",  # with it, Accelerate would leave DeepSpeed out
        "torch_compile": compiled and kind in ("ddp", "deepspeed"),
        "seed": 0,
    }

    class Driver:
        """What all of these Trainers share."""

        def get_train_dataloader(self) -> DataLoader:
            return DataLoader(_Endless(driven), batch_size=None)

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
            driven.loss = loss.detach()
            return loss

    shape = Shape()
    if kind == "loom":
        from torchloom.integrations.transformers import TorchloomArguments, TorchloomTrainer

        args: Any = TorchloomArguments(torchloom={"zero_optimization": {"stage": 3}}, **common)
        base: type = TorchloomTrainer
    else:
        extra = {"deepspeed": _deepspeed_config(job)} if kind == "deepspeed" else {}
        args = TrainingArguments(**common, **extra)
        base = _fsdp2_trainer(job, kind) if kind.startswith("fsdp2") else Trainer
    return type("Bench" + base.__name__, (Driver, base), {})(
        model=llama(shape), args=args, train_dataset=_Endless(driven)
    )


def _fsdp2_trainer(job: Job, kind: Kind) -> type:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import Trainer

    class FSDP2Trainer(Trainer):
        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
            assert self.model is not None
            mesh = init_device_mesh("cpu", (job.world_size,))
            for layer in self.model.model.layers:
                if kind == "fsdp2-block":
                    layer.compile()
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
            if kind == "fsdp2-whole":
                self.model.compile()
            self.model._is_accelerate_prepared = True
            return super().create_optimizer(model)

    return FSDP2Trainer


def _look_for_deepspeed() -> None:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise UnavailableError(f"DeepSpeed is not installed ({error})") from error
    deepspeed.init_distributed(dist_backend="gloo")


def _deepspeed_config(job: Job) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": _BUCKET_NUMEL},
    }
