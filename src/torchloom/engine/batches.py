"""`Engine` takes whole steps over the batches of an iterator, as `train_batch` and `eval_batch` of DeepSpeed's pipeline engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchloom.engine.state import EngineState
from torchloom.errors import EngineError
from torchloom.loop.across_ranks import all_reduce
from torchloom.shard.nested import loss_in


class Batches(EngineState):
    """Part of `Engine`: it takes batches from an iterator."""

    _own_batches: Iterator[Any] | None = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train on the micro-batches of one optimizer step; all ranks must call.

        The model has to return its loss, or a result with a field `loss`.

        Args:
            data_iter: yields a micro-batch each: a tuple or list of arguments, a mapping of keywords, or one
                argument. Default: `training_dataloader`, again and again.

        Returns:
            The mean loss over micro-batches and ranks.

        Raises:
            EngineError: there is nothing to iterate over, or the model does not return its loss.

        Example:
            >>> loss = engine.train_batch(iter(loader))  # doctest: +SKIP
        """
        engine: Any = self
        batches, losses = self._batches(data_iter), []
        num = engine.gradient_accumulation_steps()
        for index in range(num):
            loss = _loss_of(engine, next(batches))
            losses.append(loss.detach())
            engine.backward(loss)
            if engine.managed_gradient_accumulation() or index == num - 1:
                engine.step()
        return _mean(losses, "loss of train_batch")

    def eval_batch(
        self, data_iter: Iterator[Any] | None = None, num_micro_batches: int | None = None
    ) -> Tensor:
        """Return the mean loss over micro-batches and ranks, in evaluation mode; all ranks must call.

        Args:
            data_iter: as for `train_batch`.
            num_micro_batches: how many; default: the accumulation steps.

        Raises:
            EngineError: as for `train_batch`.
        """
        engine: Any = self
        batches, was_training = self._batches(data_iter), engine.training
        engine.eval()
        try:
            with torch.no_grad():
                num = num_micro_batches or engine.gradient_accumulation_steps()
                losses = [_loss_of(engine, next(batches)) for _ in range(num)]
        finally:
            engine.train(was_training)
        return _mean(losses, "loss of eval_batch")

    def _batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            return data_iter
        if self.training_dataloader is None:
            raise EngineError(
                "train_batch() and eval_batch() have nothing to iterate over: pass data_iter=iter(loader), or "
                "training_data= to torchloom.initialize"
            )
        if self._own_batches is None:
            self._own_batches = itertools.chain.from_iterable(
                itertools.repeat(self.training_dataloader)
            )
        return self._own_batches


def _loss_of(engine: Any, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        found = engine(**batch)
    elif isinstance(batch, (tuple, list)):
        found = engine(*batch)
    else:
        found = engine(batch)
    loss = loss_in(found)
    if loss is None:
        raise EngineError(
            f"train_batch() and eval_batch() need a model that returns its loss, got {type(found).__name__}: "
            "return the loss as one number, or a result with a field `loss`"
        )
    return loss


def _mean(losses: list[Tensor], name: str) -> Tensor:
    return all_reduce(torch.stack([each.reshape(()).float() for each in losses]).mean(), name=name)
