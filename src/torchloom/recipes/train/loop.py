"""The run on each rank.

    corpus -> model -> initialize -> evaluate
    until the last step:  micro-steps -> optimizer step -> all-reduce of loss, stop, save -> row
                          every `eval_every` steps: evaluate;  every `save_every` steps: save, or
                          after `save_minutes` on rank 0: save in place of the last one on the way
    evaluate and save at the end; after a stop signal only save -> summary

One small all-reduce per step carries the loss and what signals requested, so all ranks save and stop after the
same step. The engine's loader keeps the position in the data, and checkpoints keep the loader's.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import torchloom
from torchloom.errors import ConfigError, DataError, EngineError, TorchloomError
from torchloom.files import read_json_lines, write_whole
from torchloom.recipes.train.corpus import heldout_batches, load_corpus, windows
from torchloom.recipes.train.interrupts import StopRequest, failing_in
from torchloom.recipes.train.metrics import (
    Log,
    json_lines,
    memory_gib,
    print_summary,
    shown,
    summarize,
    tensorboard,
    watched,
    write_charts,
)
from torchloom.recipes.train.options import (
    TrainOptions,
    checkpoint_dir,
    choose_out,
    default_config,
    make_out,
)
from torchloom.recipes.train.task import Task, build_task

_LOGGER = logging.getLogger(__name__)
_ON_THE_WAY = "on_the_way"
"""The tag of the one checkpoint that is saved by the clock."""


class Outcome(NamedTuple):
    """How the run ended."""

    steps: int
    checkpoint: str
    stopped_by: str | None
    """The signal that ended it early."""


def run_worker(options: TrainOptions, *, rank: int, output: TextIO) -> None:
    """Train as one of the ranks that a launcher started; see `torchloom.recipes.train.run`."""
    console = Console(file=output)
    with failing_in("while reading the data", rank=rank):
        corpus = load_corpus(options.data, seq_len=options.seq_len)
    with failing_in("while building the model", rank=rank):
        task = build_task(options)
        train, heldout = (
            windows(task.encode(text), options.seq_len) for text in (corpus.train, corpus.heldout)
        )
    with failing_in("while sharding the model", rank=rank):
        config = options.config or default_config(options)
        engine, *_ = torchloom.initialize(model=task.module, config=config, training_data=train)
    try:
        with ExitStack() as sinks:
            with failing_in("while preparing the run", rank=rank):
                out = _agree_on_out(options, engine.rank)
                loop = Loop(engine, task, options, heldout, out)
                if options.resume:
                    loop.resume()
                loop.open_logs(sinks, console)
                if options.compile:
                    engine.compile()
                if engine.rank == 0:
                    loop.announce(str(corpus), console)
            outcome = loop.run()
        with failing_in("while writing the summary", rank=rank):
            loop.report(outcome, console)
    finally:
        engine.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()


class Loop:
    """One run over one engine.

    Args:
        engine: does the steps, and has the loader of training batches.
        task: the model's loss.
        options: how long to run, and when to evaluate and save.
        heldout: rows of held-out tokens.
        out: the run's folder.
    """

    def __init__(
        self,
        engine: torchloom.Engine,
        task: Task,
        options: TrainOptions,
        heldout: Tensor,
        out: Path,
    ) -> None:
        self._engine, self._task, self._options, self._out = engine, task, options, out
        self._micro_batch = engine.config.batch.micro_batch_size
        self._loader = engine.training_dataloader
        self._loader.sampler.seed = options.seed
        if len(self._loader.sampler) < self._micro_batch:
            raise DataError(
                f"the text has {len(self._loader.dataset)} samples of {options.seq_len} tokens, fewer than one "
                f"batch of {self._micro_batch} on each rank: give more text, a smaller --seq-len or --micro-batch"
            )
        self._heldout = heldout_batches(
            heldout,
            micro_batch=self._micro_batch,
            rank=engine.rank,
            world_size=engine.world_size,
        )
        self.logs: list[Log] = []
        """Where rows go."""
        self._tokens = 0
        self._saved_at = time.monotonic()

    def resume(self) -> None:
        """Load the newest checkpoint.

        Raises:
            CheckpointError: there is none, or it is of other data or another model.
            ConfigError: its run has done all steps.
        """
        engine, steps = self._engine, self._options.steps
        path, client_state = engine.load_checkpoint(str(checkpoint_dir(self._out)))
        self._tokens = client_state["tokens"]
        if engine.global_steps >= steps:
            raise ConfigError(
                f"the run in {str(self._out)!r} has already done {engine.global_steps} of {steps} "
                "steps: ask for more with --steps"
            )
        _LOGGER.info("resumed from %s after step %d", path, engine.global_steps)

    def run(self) -> Outcome:
        """Train until the last step or until a signal requests a stop; save in both cases.

        Raises:
            EngineError: the loss is not finite, a signal interrupted a step, or a rank was lost.
            NoMemoryError: host or device memory ran out.
        """
        engine, options = self._engine, self._options
        batches, stop = self._batches(), False

        def where() -> str:
            return f"in the step after step {engine.global_steps}"

        engine.train()
        with StopRequest() as request, failing_in(where, rank=engine.rank, request=request):
            self._evaluate()
            while engine.global_steps < options.steps and not stop:
                stop, wants_save, is_late = self._step(batches, request)
                step = engine.global_steps
                is_last = stop or step == options.steps
                if not stop and (is_last or step % options.eval_every == 0):
                    self._evaluate()
                is_due = wants_save or (options.save_every and step % options.save_every == 0)
                if not is_last and (is_due or is_late):
                    _LOGGER.info("saved %s", self._save(None if is_due else _ON_THE_WAY))
            checkpoint = self._save()
        by = engine.stop_reason or request.signal_name or "another rank"
        return Outcome(engine.global_steps, checkpoint, by if stop else None)

    def _batches(self) -> Iterator[Tensor]:
        """Yield this rank's batches without end, each epoch in another order, from the loader's position on."""
        sampler = self._loader.sampler
        for epoch in itertools.count(sampler.epoch):
            sampler.set_epoch(epoch)
            for batch in self._loader:
                if len(batch) == self._micro_batch:  # another shape would be compiled anew
                    yield batch.long()

    def _step(self, batches: Iterator[Tensor], request: StopRequest) -> tuple[bool, bool, bool]:
        """Run one optimizer step and record it; return whether to stop, to save, and to save by the clock."""
        engine = self._engine
        # A seed per step and rank makes dropout the same after a resume, with no state to save.
        torch.manual_seed(((self._options.seed << 32) + engine.global_steps) * 65_537 + engine.rank)
        lr, comm_before = engine.get_lr()[0], engine.comm_stats()
        started, data_time_s, num_tokens = time.perf_counter(), 0.0, 0
        loss_sum = torch.zeros((), device=engine.device)
        num_micro_steps = engine.config.batch.accumulation_steps
        for _ in range(num_micro_steps):
            waited = time.perf_counter()
            batch = next(batches).to(engine.device)
            data_time_s += time.perf_counter() - waited
            loss = self._task.loss(engine, batch)
            engine.backward(loss)
            engine.step()
            loss_sum += loss.detach()
            num_tokens += batch[:, 1:].numel() * engine.world_size
        mean_loss, *asked = self._agree(loss_sum / num_micro_steps, request)
        step_time_s = time.perf_counter() - started
        comm, norm = engine.comm_stats(), engine.get_global_grad_norm()
        self._tokens += num_tokens
        rank_tokens_per_s = num_tokens / step_time_s / engine.world_size
        flops = engine.work.flops_per_token
        in_use_gib, peak_gib = memory_gib(engine.device)
        self._record(
            "step",
            loss=mean_loss,
            lr=lr,
            grad_norm=float(norm) if norm is not None and math.isfinite(norm) else None,
            tokens=self._tokens,
            step_time_s=step_time_s,
            data_time_s=data_time_s,
            tokens_per_s=num_tokens / step_time_s,
            tflops_per_s=None if flops is None else rank_tokens_per_s * flops / 1e12,
            mfu=engine.work.mfu(rank_tokens_per_s),
            memory_gib=in_use_gib,
            peak_memory_gib=peak_gib,
            collectives=comm.num_collectives - comm_before.num_collectives,
            collective_bytes=comm.num_bytes - comm_before.num_bytes,
        )
        stop, save, is_late = (share > 0 for share in asked)
        return stop or engine.should_stop, save, is_late

    def _agree(self, loss: Tensor, request: StopRequest) -> list[float]:
        """Return the mean loss over ranks, and the share of ranks asked to stop, asked to save, and late to save."""
        engine, options = self._engine, self._options
        by_clock_s = 0 if options.save_every or engine.rank else 60 * options.save_minutes
        is_late = 0 < by_clock_s <= time.monotonic() - self._saved_at
        own = request.signal_name is not None, request.take_save(), is_late
        mine = torch.tensor([float(loss), *own], device=loss.device)
        means = torchloom.all_reduce(mine, name="loss, and who was asked to stop or save").tolist()
        # The engine's policy (`non_finite`) handles steps that it skipped for this reason.
        if not math.isfinite(means[0]) and engine.was_step_applied():
            raise EngineError(
                f"the loss is {means[0]} at step {engine.global_steps}: training cannot go "
                "on; lower the learning rate, or resume from an earlier checkpoint"
            )
        return means

    def _evaluate(self) -> None:
        """Record the mean loss over the held-out batches of all ranks."""
        engine = self._engine
        total = torch.zeros((), device=engine.device)
        engine.eval()
        # Eagerly: compiling the evaluation would take longer than it saves.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in self._heldout:
                total += self._task.loss(engine, batch.to(engine.device)).float()
        engine.train()
        mean = torchloom.all_reduce(total / len(self._heldout), name="held-out loss")
        self._record("eval", heldout_loss=float(mean))

    def _save(self, tag: str | None = None) -> str:
        """Write a checkpoint from which `--resume` continues with the same samples and losses."""
        path = self._engine.save_checkpoint(
            str(checkpoint_dir(self._out)),
            tag,
            client_state={"tokens": self._tokens},
            keep_last=self._options.keep_last,
        )
        self._saved_at = time.monotonic()
        return str(path)

    def _record(self, kind: str, **numbers: Any) -> None:
        for log in self.logs:
            log({"kind": kind, "step": self._engine.global_steps, **numbers})

    def open_logs(self, stack: ExitStack, console: Console) -> None:
        """Open what rows go to; only rank 0 writes more than its part of --report."""
        engine, options, out = self._engine, self._options, self._out
        done, rank = engine.global_steps, engine.rank
        sinks = []
        if options.report:
            sinks.append(watched(out, rank=rank, world_size=engine.world_size, done=done))
        if rank == 0:
            sinks.append(json_lines(out / "metrics.jsonl", done=done))
            if options.tensorboard:
                sinks.append(tensorboard(out / "tensorboard"))
            bar = shown(
                console,
                steps=options.steps,
                done=done,
                log_every=options.log_every,
                first="compiling" if options.compile else "first step",
                unit=self._task.unit,
                phase=lambda: phase.text() if (phase := engine.compile_report().phase) else "",
            )
            sinks.append(bar)
        self.logs = [stack.enter_context(sink) for sink in sinks]

    def announce(self, corpus: str, console: Console) -> None:
        """Write `config.json` and print what is trained on what."""
        engine, task = self._engine, self._task
        config = json.dumps(engine.config.to_dict(), indent=2, default=str)
        write_whole(self._out / "config.json", config + "\n")
        model = (
            f"{task.name}: {task.num_params / 1e6:.2f} M parameters, ZeRO-{engine.config.zero.stage}, "
            f"{engine.world_size} ranks, output in {self._out}"
        )
        console.print(f"{corpus}\n{model}", soft_wrap=True, highlight=False)

    def report(self, outcome: Outcome, console: Console) -> None:
        """Write and print the results of the run, on rank 0."""
        engine, task, out, device = self._engine, self._task, self._out, self._engine.device
        own_peak_gib = torch.tensor(memory_gib(device)[1], device=device)
        peak_gib = torchloom.all_reduce(own_peak_gib, "max", name="peak memory")
        if engine.rank != 0:
            return
        files = {"metrics": out / "metrics.jsonl"}
        rows, compiled = read_json_lines(files["metrics"]), engine.compile_report()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
        figures = summarize(
            rows,
            model=task.name,
            num_params=task.num_params,
            unit=task.unit,
            world_size=engine.world_size,
            device=name,
            zero_stage=engine.config.zero.stage,
            peak_memory_gib=float(peak_gib),
            compile_time_s=compiled.duration_s,
            num_graphs=len(compiled.graphs),
            num_fallbacks=len(compiled.fallbacks),
            **outcome._asdict(),
        )
        write_whole(out / "summary.json", json.dumps(figures, indent=2) + "\n")
        files |= write_charts(out, rows, figures)
        if self._options.report:  # by now each rank has written its record
            record = torchloom.records.load_record(out / "record.json")
            files["report"] = torchloom.report.write_page(record, out / "report.html", run=out)
        print_summary(console, figures, {**files, "checkpoint": outcome.checkpoint})


def _agree_on_out(options: TrainOptions, rank: int) -> Path:
    """Rank 0 chooses and creates the folder; every rank gets its path, or raises the error of rank 0."""
    chosen: list[Any] = [None]
    if rank == 0:
        try:
            chosen = [make_out(choose_out(options))]
        except TorchloomError as err:
            chosen = [err]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen, src=0)
    if isinstance(chosen[0], TorchloomError):
        raise chosen[0]
    return chosen[0]
