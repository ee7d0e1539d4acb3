"""Host memory while pretrained weights are loaded and sharded: every rank loads, or rank 0 alone.

    python bench/pretrained.py                   a Llama of 34 M weights on two ranks
    python bench/pretrained.py --layers 40       a larger one

Prints for each way the peak of private memory that each rank needs beyond what it needs before, in sizes of the
model, and what it keeps. Pages of the file that the system may drop are not counted. Writes `pretrained.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _environment import snapshot, worker_environment
from _memory import read_rollup
from _ranks import ask_ranks

_HERE = Path(__file__).parent
WAYS = {
    "each": "every rank loads the whole model, then shards it",
    "rank 0": "rank 0 loads, the others build on meta (torchloom.integrations.transformers.from_pretrained)",
}


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    options = _parse(arguments)
    if options.worker:
        return _work(options.worker, Path(options.folder))
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = _write_model(Path(folder), options.layers)
        found = {way: _run(way, folder, options.ranks) for way in WAYS}
    record = {
        "environment": snapshot(
            {"layers": options.layers, "ranks": options.ranks}, worker_environment(_HERE)
        ),
        "model_bytes": num_bytes,
        "ways": found,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pretrained.json").write_text(json.dumps(record, indent=1) + "\n")
    print(
        f"a model of {num_bytes / 2**20:.0f} MiB on {options.ranks} ranks; peaks in sizes of the model"
    )
    for way, ranks in found.items():
        peaks = [each["peak"] / num_bytes for each in ranks]
        kept = [each["kept"] / num_bytes for each in ranks]
        print(
            f"{WAYS[way]}: {', '.join(f'{peak:.2f}' for peak in peaks)}, together {sum(peaks):.2f}; "
            f"kept {', '.join(f'{each:.2f}' for each in kept)}"
        )
    return 0


def _write_model(folder: Path, layers: int) -> int:
    from _model import Shape
    from arms.trainer import llama

    model = llama(Shape(num_layers=layers))
    model.save_pretrained(folder, max_shard_size="50MB")
    return sum(param.nbytes for param in model.parameters())


def _run(way: str, folder: str, ranks: int) -> list[dict[str, int]]:
    return ask_ranks(
        __file__,
        ["--worker", way, "--folder", folder],
        ranks=ranks,
        cache=_HERE.parent / ".cache" / "bench",
        timeout_s=600,
    )


def _work(way: str, folder: Path) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    import torchloom
    from arms.base import join_group
    from torchloom.integrations.prepare import initializer_of
    from torchloom.integrations.transformers import from_pretrained

    torch.set_num_threads(1)
    join_group()
    # What comes with the first use of each library is not the model's.
    torchloom.shard_model(torch.nn.Linear(64, 64), persistence_threshold=0)
    load = AutoModelForCausalLM.from_pretrained if way == "each" else None
    with _watched() as seen:
        model: Any = load(folder) if load else from_pretrained(AutoModelForCausalLM, str(folder))
        torchloom.shard_model(
            model, stage=3, persistence_threshold=1000, init=initializer_of(model)
        )
    print(json.dumps(seen))
    torch.distributed.destroy_process_group()
    return 0


@contextmanager
def _watched() -> Iterator[dict[str, int]]:
    """Sample private memory until the block ends; the result then holds the peak, and what is kept."""
    before, peak, is_over = read_rollup()["Pss_Anon"], 0, threading.Event()
    seen: dict[str, int] = {}

    def sample() -> None:
        nonlocal peak
        while not is_over.is_set():
            peak = max(peak, read_rollup()["Pss_Anon"])
            time.sleep(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()
        seen["peak"] = max(0, peak - before)
        seen["kept"] = max(0, read_rollup()["Pss_Anon"] - before)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/pretrained.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=_HERE / "out", help="folder for results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
