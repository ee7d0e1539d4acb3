"""`python -m peers CHECKOUT [FILE ...]`: count how DeepSpeed's unit tests end on torchloom, file by file."""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # tests fork

import pytest

from peers.cpu_accelerator import Cpu
from peers.plugin import OUTCOMES, Ended, Plugin, prepare_torch

_FILES = """
    v1/compile/test_compile_zero.py v1/compile/test_compile_fx.py v1/compile/test_graph_profile.py
    v1/compile/test_list_schedule.py v1/compile/test_offload_activation.py v1/compile/test_offload_opt_states.py
    v1/compile/test_partitioner.py v1/compile/test_selective_gather.py v1/compile/test_z3_eager_fallback.py
    v1/zero/test_zero_user_backward.py v1/zero/test_zero.py v1/zero/test_zero_autocast.py
    v1/zero/test_zero_coalesce_grad_reduction.py v1/zero/test_zero_torch_func.py
    v1/zero/test_zero_cpu_offload_grad_accum.py v1/zero/test_offload_states.py
    runtime/test_lr_schedulers.py runtime/test_ds_initialize.py runtime/test_ds_config_dict.py
    runtime/test_ds_config_model.py runtime/test_multi_output_model.py runtime/test_multiple_models.py
    runtime/test_no_sync_ctxt.py runtime/test_autocast.py
    runtime/zero/test_zero_context.py runtime/zero/test_zero_context_ancestry.py
    runtime/zero/test_zero_context_return.py runtime/zero/test_zero_tensor_fragment.py
    runtime/zero/test_zero_grad_clip.py runtime/zero/test_unwrap_model.py
    runtime/zero/test_ignore_unused_parameters.py runtime/zero/test_zero_dynamic_class.py
    runtime/half_precision/test_fp16.py v1/half_precision/test_bf16.py
    v1/half_precision/test_gradient_clipping_default.py v1/half_precision/test_mixed_precision_dtype.py
    v1/half_precision/test_with_autocast.py
    checkpoint/test_convert_checkpoint.py checkpoint/test_latest_checkpoint.py checkpoint/test_lr_scheduler.py
    checkpoint/test_other_optimizer.py checkpoint/test_shared_weights.py checkpoint/test_tag_validation.py
    checkpoint/test_universal_checkpoint.py checkpoint/test_zero_optimizer.py
"""


_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_IN_FP32 = ("v1/zero/test_zero_user_backward.py", "v1/zero/test_zero_coalesce_grad_reduction.py")
"""Files that compare with DDP by bf16's rounding where there is bf16: in fp32 they compare to the bit, almost."""


def main() -> None:
    """Run each file in a process of its own; print a table, and the reasons behind it."""
    parser = argparse.ArgumentParser(prog="python -m peers", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of DeepSpeed 0.19.6")
    parser.add_argument(
        "files", nargs="*", help="files below tests/unit; default: those that the table counts"
    )
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds of one test")
    parser.add_argument(
        "--sample", type=int, default=0, help="cases to run of each test function; 0 runs all"
    )
    parser.add_argument("-k", default="", help="as pytest's")
    parser.add_argument("--log", type=Path, help="a folder for what pytest prints of each file")
    parser.add_argument("--each", action="store_true", help="print how each test ended")
    args = parser.parse_args()
    sys.path.insert(0, str(args.checkout / "tests"))
    prepare_torch()
    rows = [f"| file | {' | '.join(OUTCOMES)} |", "|---|" + "---|" * len(OUTCOMES)]
    totals: collections.Counter[str] = collections.Counter()
    for file in args.files or _FILES.split():
        ended = _run_file(args, file)
        counts = collections.Counter(each.outcome for each in ended)
        totals += counts
        rows.append(_row(file, counts))
        print(rows[-1])
        reasons = collections.Counter((e.outcome, e.why) for e in ended if e.outcome != "passed")
        for (outcome, why), num in sorted(reasons.items()):
            print(f"{num:4} {outcome}: {why}", flush=True)
        for each in ended if args.each else ():
            print(each.outcome, each.test)
    print("\n".join([*rows, _row("all", totals)]))


def _row(name: str, counts: collections.Counter[str]) -> str:
    return f"| {name} | {' | '.join(str(counts[each]) for each in OUTCOMES)} |"


def _run_file(args: Any, file: str) -> list[Ended]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(args, file, sender))
    process.start()
    sender.close()
    ended = []
    try:
        while True:
            ended.append(receiver.recv())
    except EOFError:
        process.join()
    return ended or [
        Ended(file, "failed", f"the file was not collected (exit code {process.exitcode})")
    ]


def _child(args: Any, file: str, sender: Any) -> None:
    given = [
        str(args.checkout / "tests/unit" / file),
        "-q",
        "-p",
        "no:cacheprovider",
        "-n0",
        "--tb=line",
    ]
    given += [
        "-c",
        os.devnull,
        f"--rootdir={args.checkout / 'tests'}",
        "-W",
        "ignore",
        "-p",
        "no:timeout",
    ]
    if args.k:
        given += ["-k", args.k]
    Cpu.has_half = file not in _IN_FP32
    log = os.open(
        args.log / Path(file).with_suffix(".log").name if args.log else os.devnull, _WRITE
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    pytest.main(given, plugins=[Plugin(args.timeout, args.sample, sender.send)])


if __name__ == "__main__":
    main()
