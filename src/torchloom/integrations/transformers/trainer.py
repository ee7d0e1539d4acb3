"""Make Hugging Face's Trainer, and classes that inherit from it, train with torchloom.

    accelerator     becomes a TorchloomAccelerator, which shards and compiles what the Trainer prepares
    optimizer       is built over the shards; its file has whole states
    save_model      gathers on all ranks; one writes what `from_pretrained` reads

Losses, norms, evaluation, callbacks and resumes are those of the Trainer.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments

from torchloom import envs
from torchloom.engine.schedules import make_lr_scheduler
from torchloom.integrations.accelerate import TorchloomAccelerator, inner
from torchloom.integrations.given import refuse_contradictions
from torchloom.integrations.transformers.arguments import (
    check_optimizer,
    given_by,
    refuse_arguments,
    steps_of,
)
from torchloom.launch.groups import world_size_of
from torchloom.pipeline import CompileSession
from torchloom.shard import (
    full_optimizer_state_dict,
    full_state_dict,
    is_sharded,
    layout_of,
    on_meta,
)


class TorchloomMixin:
    """Makes a Trainer, or one of TRL's, train with torchloom: `class Mine(TorchloomMixin, SFTTrainer)`.

    The configuration is `args.torchloom`: add the field with `TorchloomOptions`; without it the stage is 3. All
    ranks call `save_model`, `evaluate`, `predict` and `push_to_hub`, as with FSDP.
    """

    args: TrainingArguments
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator and let it shard and compile.

        Raises:
            ConfigError: the configuration is wrong, or contradicts the arguments of the Trainer.
        """
        refuse_arguments(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        given = given_by(self.args, self.model, world_size_of())
        self.accelerator = TorchloomAccelerator.adopt(
            self.accelerator, getattr(self.args, "torchloom", None), given, type(self).__name__
        )
        self.accelerator.preparation.hear()
        if type(self).compute_loss is Trainer.compute_loss:  # type: ignore[attr-defined]
            self.accelerator.preparation.reads_no_logits()

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Shard the model and build the optimizer over its shards.

        Args:
            model: as for `Trainer.create_optimizer`.

        Raises:
            ConfigError: the section `optimizer` of the configuration names another optimizer.
        """
        sharded = self.model if model is None else model
        written = self.accelerator.preparation.written.get("optimizer")
        if self.optimizer is None and getattr(self, "optimizer_cls_and_kwargs", None) is None:
            check_optimizer(written, self.args)
        self.accelerator.shard(sharded, device=self.args.device)
        return super().create_optimizer(model)  # type: ignore[misc]

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """Create the schedule: that of the configuration, where it has one.

        Args:
            num_training_steps: as for `Trainer.create_scheduler`.
            optimizer: as for `Trainer.create_scheduler`.
        """
        preparation = self.accelerator.preparation
        if self.lr_scheduler is None and preparation.written.get("scheduler"):
            given = steps_of(self.args, num_training_steps)
            refuse_contradictions(preparation.written, given, type(self).__name__)
            config = preparation.config_with(
                {each.path: each.value for each in given}, replaced=("optimizer",)
            )
            stepped = inner(self.optimizer if optimizer is None else optimizer)
            self.lr_scheduler = make_lr_scheduler(config, None, stepped)
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model for `from_pretrained`; all ranks must call.

        Args:
            output_dir: as for `Trainer.save_model`.
            _internal_call: as for `Trainer.save_model`.
        """
        if not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        weights = full_state_dict(
            self.model, rank0_only=self._saves_once, cpu=True, only=_saved_names(self.model)
        )
        self._save(output_dir, state_dict=weights)  # type: ignore[attr-defined]
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(  # type: ignore[attr-defined]
                commit_message="Model save", revision=self.args.hub_revision
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and with the losses of steps the memory, collectives and recompiles of the last one.

        Args:
            logs: as for `Trainer.log`; trackers get `torchloom/collectives` and so on as well.
            start_time: as for `Trainer.log`.
        """
        if "loss" in logs:
            logs.update(self.accelerator.preparation.heard)
        super().log(logs, start_time)  # type: ignore[misc]

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return the floating-point operations of a step, by the size of the whole model.

        Args:
            inputs: as for `Trainer.floating_point_ops`.
        """
        found: int = super().floating_point_ops(inputs)  # type: ignore[misc]
        if not found or not is_sharded(self.model):
            return found
        # The base class multiplies by the elements that this rank holds.
        tokens = inputs[getattr(self.model, "main_input_name", "input_ids")].numel()
        embeddings = {
            f"{path}.weight"
            for path, module in self.model.named_modules()
            if isinstance(module, nn.Embedding)
        }
        specs = [spec for spec in layout_of(self.model) if spec.name not in embeddings]
        return 6 * tokens * sum(spec.numel for spec in specs)

    @property
    def compile_session(self) -> CompileSession | None:
        """What compiled the model: its `report`, its `plan()`; None before training."""
        return self.accelerator.session_of(self.model)

    @property
    def _saves_once(self) -> bool:
        return not self.args.save_on_each_node

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Gather the optimizer's states on all ranks before one of them writes."""
        states = full_optimizer_state_dict(
            inner(self.optimizer), rank0_only=self._saves_once, cpu=True
        )
        # The base class calls `state_dict()` on one rank.
        optimizer, self.optimizer = self.optimizer, SimpleNamespace(state_dict=lambda: states)
        try:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        finally:
            self.optimizer = optimizer

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: it is moved when it is sharded, and may be on meta until then."""


def _saved_names(model: nn.Module) -> frozenset[str] | None:
    """Return what of a model with adapters goes into its file; None: all.

    PEFT picks the adapters out of what it is given, and embeddings that were resized. Frozen weights of the base
    model need not be gathered for it.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return None
    base = model.get_base_model()  # type: ignore[operator]
    embeddings = [base.get_input_embeddings(), base.get_output_embeddings()]
    kept = {
        id(param) for module in embeddings if module is not None for param in module.parameters()
    }
    return frozenset(
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if param.requires_grad or id(param) in kept
    )


class TorchloomTrainer(TorchloomMixin, Trainer):
    """`transformers.Trainer` on torchloom.

    Example:
        >>> args = TorchloomArguments("runs/mine", torchloom="ds_config.json")  # doctest: +SKIP
        >>> TorchloomTrainer(model=model, args=args, train_dataset=data).train()  # doctest: +SKIP
    """


class TorchloomSeq2SeqTrainer(TorchloomMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on torchloom; `predict_with_generate` may end at other lengths on each rank."""


__all__ = ["TorchloomMixin", "TorchloomSeq2SeqTrainer", "TorchloomTrainer"]


def from_pretrained(auto_class: Any, folder: str, **kwargs: Any) -> nn.Module:
    """Load pretrained weights on rank 0 and build the same model without memory on the other ranks.

    The host then holds one model, not one for each rank. `TorchloomTrainer` and `TorchloomAccelerator` shard it
    as any other: the weights of rank 0 reach all ranks. Until then only rank 0 may call it.

    Args:
        auto_class: a class of transformers with `from_pretrained`, such as `AutoModelForCausalLM`.
        folder: what its `from_pretrained` takes.
        kwargs: likewise; each rank passes the same.

    Example:
        >>> model = from_pretrained(AutoModelForCausalLM, "llama-8b")  # doctest: +SKIP
    """
    rank = dist.get_rank() if dist.is_initialized() else envs.launch().rank
    if rank == 0:
        return auto_class.from_pretrained(folder, **kwargs)
    config = kwargs.pop("config", None)
    if config is None:
        config = _config_of(auto_class, folder, kwargs)
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    with on_meta():
        if hasattr(auto_class, "from_config"):
            model = auto_class.from_config(config, **({} if dtype is None else {"dtype": dtype}))
        else:
            model = auto_class(config) if dtype is None else auto_class(config).to(dtype)
    return model.eval()  # as rank 0's is, or dropout would differ between ranks


def _config_of(auto_class: Any, folder: str, kwargs: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    config_class = getattr(auto_class, "config_class", None) or AutoConfig
    names = ("trust_remote_code", "revision", "cache_dir", "token", "local_files_only", "subfolder")
    return config_class.from_pretrained(folder, **{n: kwargs[n] for n in names if n in kwargs})
