"""What each rank runs: build model, data and engine, train, report."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from rich.console import Console

import torchloom
from torchloom.errors import ConfigError, TorchloomError
from torchloom.files import read_json_lines, write_whole
from torchloom.recipes.train.corpus import Corpus, load_corpus
from torchloom.recipes.train.defaults import default_config
from torchloom.recipes.train.failing import failing_in
from torchloom.recipes.train.loop import Loop, LoopPlan, Outcome
from torchloom.recipes.train.metrics import JsonlSink, Sink, TensorBoardSink, memory_gib
from torchloom.recipes.train.options import TrainOptions
from torchloom.recipes.train.outdir import checkpoint_dir, choose_out, make_out
from torchloom.recipes.train.progress import make_progress
from torchloom.recipes.train.stream import SampleStream, heldout_batches
from torchloom.recipes.train.summary import print_summary, summarize, write_charts, write_summary
from torchloom.recipes.train.task import Task, build_task
from torchloom.recipes.train.watching import RankSink, WatchSink

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """All parts of a run on this rank."""

    options: TrainOptions
    task: Task
    engine: Any
    loop: Loop
    sinks: list[Sink]
    out: Path
    console: Console


def run_worker(options: TrainOptions, *, rank: int, output: TextIO) -> None:
    """Train as one of the ranks that a launcher started; see `torchloom.recipes.train.run`."""
    console = Console(file=output)
    with failing_in("while reading the data", rank=rank):
        corpus = load_corpus(options.data, seq_len=options.seq_len)
    with failing_in("while building the model", rank=rank):
        task = build_task(options)
    config = options.config or default_config(steps=options.steps, micro_batch=options.micro_batch)
    with failing_in("while sharding the model", rank=rank):
        engine, _, _, _ = torchloom.initialize(model=task.module, config=config)
    try:
        with failing_in("while preparing the run", rank=rank):
            run = _prepare(options, corpus, task, engine, console)
        try:
            outcome = run.loop.run()
        finally:
            for sink in run.sinks:
                sink.close()
        with failing_in("while writing the summary", rank=rank):
            _report(run, outcome)
    finally:
        engine.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()


def _prepare(
    options: TrainOptions, corpus: Corpus, task: Task, engine: Any, console: Console
) -> _Run:
    """Create the parts of the run, and load the newest checkpoint if --resume is given."""
    out = _agree_on_out(options, engine.rank)
    micro_batch = engine.config.batch.micro_batch_size
    place = {"rank": engine.rank, "world_size": engine.world_size, "micro_batch": micro_batch}
    stream = SampleStream(
        task.encode(corpus.train), seq_len=options.seq_len, seed=options.seed, **place
    )
    sinks: list[Sink] = []
    loop = Loop(
        engine,
        task,
        stream=stream,
        heldout=heldout_batches(task.encode(corpus.heldout), seq_len=options.seq_len, **place),
        plan=LoopPlan(
            steps=options.steps,
            eval_every=options.eval_every,
            save_every=options.save_every,
            save_after_s=0.0 if options.save_every else 60 * options.save_minutes,
            keep_last=options.keep_last,
            accumulation_steps=engine.config.batch.accumulation_steps,
            checkpoint_dir=checkpoint_dir(out),
            seed=options.seed,
            peak_tflops=engine.work.peak_tflops,
        ),
        sinks=sinks,
    )
    if options.resume:
        _restore(engine, loop, out, options.steps)
    if options.report and engine.rank == 0:
        sinks.append(WatchSink(out, done=engine.global_steps))
    elif options.report:
        ranks = {"rank": engine.rank, "world_size": engine.world_size}
        sinks.append(RankSink(out, **ranks, done=engine.global_steps))
    if options.compile:
        engine.compile()
    if engine.rank == 0:
        config = json.dumps(engine.config.to_dict(), indent=2, default=str)
        write_whole(out / "config.json", config + "\n")
        sinks += _open_sinks(options, out, engine, task, console)
        console.print(str(corpus), soft_wrap=True, highlight=False)
        console.print(
            f"{task.name}: {task.num_params / 1e6:.2f} M parameters, "
            f"ZeRO-{engine.config.zero.stage}, {engine.world_size} ranks, output in {out}",
            soft_wrap=True,
            highlight=False,
        )
    return _Run(
        options=options,
        task=task,
        engine=engine,
        loop=loop,
        sinks=sinks,
        out=out,
        console=console,
    )


def _agree_on_out(options: TrainOptions, rank: int) -> Path:
    """Rank 0 chooses and creates the folder; every rank gets its path, or raises the error of rank 0."""
    chosen: list[Any] = [None]
    if rank == 0:
        try:
            out = choose_out(options)
            make_out(out)
            chosen = [out]
        except TorchloomError as err:
            chosen = [err]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen, src=0)
    if isinstance(chosen[0], TorchloomError):
        raise chosen[0]
    return chosen[0]


def _restore(engine: Any, loop: Loop, out: Path, steps: int) -> None:
    path, client_state = engine.load_checkpoint(str(checkpoint_dir(out)))
    loop.restore(client_state)
    if engine.global_steps >= steps:
        raise ConfigError(
            f"the run in {str(out)!r} has already done {engine.global_steps} of {steps} steps: "
            "ask for more with --steps"
        )
    _LOGGER.info("resumed from %s after step %d", path, engine.global_steps)


def _open_sinks(
    options: TrainOptions, out: Path, engine: Any, task: Task, console: Console
) -> list[Sink]:
    done = engine.global_steps
    sinks: list[Sink] = [JsonlSink(out / "metrics.jsonl", after_step=done)]
    if options.tensorboard:
        sinks.append(TensorBoardSink(out / "tensorboard"))
    progress = make_progress(
        console,
        steps=options.steps,
        done=done,
        log_every=options.log_every,
        compiles=options.compile,
        unit=task.unit,
        phase=lambda: _phase_of(engine),
    )
    return [*sinks, progress]


def _phase_of(engine: Any) -> str:
    phase = engine.compile_report().phase
    return "" if phase is None else phase.text()


def _report(run: _Run, outcome: Outcome) -> None:
    """Write and print the results of the run, on rank 0."""
    own_peak_gib = torch.tensor(memory_gib(run.engine.device)[1], device=run.engine.device)
    peak_gib = torchloom.all_reduce(own_peak_gib, "max", name="peak memory")
    if run.engine.rank != 0:
        return
    for sink in run.sinks:
        if isinstance(sink, WatchSink):
            sink.write_page()  # again: by now each rank has written its record
    rows = read_json_lines(run.out / "metrics.jsonl")
    compiled = run.engine.compile_report()
    summary = summarize(
        rows,
        model=run.task.name,
        num_params=run.task.num_params,
        unit=run.task.unit,
        world_size=run.engine.world_size,
        device=device_name(run.engine.device),
        zero_stage=run.engine.config.zero.stage,
        steps=outcome.step,
        peak_memory_gib=float(peak_gib),
        compile_time_s=compiled.duration_s,
        num_graphs=len(compiled.graphs),
        num_fallbacks=len(compiled.fallbacks),
        stopped_by=outcome.stopped_by,
        checkpoint=outcome.checkpoint,
    )
    charts = write_charts(run.out, rows, summary)
    write_summary(run.out / "summary.json", summary)
    files = {"metrics": run.out / "metrics.jsonl", **{path.stem: path for path in charts}}
    if run.options.report:
        files["report"] = run.out / "report.html"
    print_summary(run.console, summary, {**files, "checkpoint": Path(outcome.checkpoint)})


def device_name(device: torch.device) -> str:
    """Return the name of an accelerator, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
