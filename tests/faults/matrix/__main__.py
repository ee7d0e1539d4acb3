"""Run the fault matrix and print one row per case."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from faults.matrix import table
from faults.matrix.case import Case
from faults.matrix.cases import chosen
from faults.matrix.forkserver import ForkServer
from faults.matrix.judge import weights_of
from faults.matrix.ranks import run_case
from faults.matrix.table import Row

_WIDTH = 230


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    options = _parser().parse_args(arguments)
    cases = [replace(case, limit_s=case.limit_s * options.slack) for case in chosen(options.only)]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    started_s = time.monotonic()
    forks = None if options.exec else ForkServer()
    workspace = Path(tempfile.mkdtemp(prefix="torchloom-faults-"))
    print(table.head(), flush=True)
    try:
        rows = run_all(cases, workspace, options.jobs, forks)
    finally:
        if forks is not None:
            forks.close()
        if options.keep:
            print(f"folders of the cases: {workspace}")
        else:
            shutil.rmtree(workspace, ignore_errors=True)
    took_s = time.monotonic() - started_s
    print(table.summary(rows, took_s))
    if options.json is not None:
        table.write(options.json, rows, took_s)
    return table.exit_code(rows)


def run_all(
    cases: Sequence[Case], workspace: Path, num_jobs: int, forks: ForkServer | None = None
) -> list[Row]:
    """Run cases, some at a time, printing each row as it comes.

    Args:
        cases: in their order; those that others are compared with come first.
        workspace: where each gets a folder.
        num_jobs: how many run at a time.
        forks: where ranks come from; None starts each by itself.
    """
    waiting, rows, weights = list(cases), [], {}
    running: dict[Future[Row], Case] = {}
    with ThreadPoolExecutor(num_jobs) as pool:
        while waiting or running:
            ready = [each for each in waiting if each.trains_like in {"", *weights}]
            for case in ready[: num_jobs - len(running)]:
                waiting.remove(case)
                folder = workspace / f"{len(rows) + len(running)}-{time.monotonic_ns()}"
                running[pool.submit(run_case, case, folder, dict(weights), forks)] = case
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                del running[future]
                row = future.result()
                rows.append(row)
                weights[row.name] = weights_of("\n".join(row.outputs.values()))
                print(row.text(_WIDTH), flush=True)
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="TEXT",
        help="cases whose names contain one of these",
    )
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table, with outputs")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cases at a time (2)")
    parser.add_argument("--slack", type=float, default=1.0, metavar="FACTOR",
                        help="on limits, where other programs use this machine (1)")  # fmt: skip
    parser.add_argument("--exec", action="store_true",
                        help="start each rank by itself, as users do, instead of forking it from"
                        " a process that has imported torch: three seconds more a rank")  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="keep the folders of the cases")
    return parser


if __name__ == "__main__":
    sys.exit(main())
