"""What trust costs and what it is worth: tags, agreement, saves, digests, damage, the soak.

    python bench/trust.py [--quick] [--parts steps,messages,saves,verify,damage,soak]

    steps      cost of naming collectives, and of the idle lines between ranks    must: at most 0.5 %
    messages   cost of what ranks tell each other, and from it that at 512 ranks
    saves      how long a save stalls training, beside DCP with FSDP2 of the same size in the same run
    verify     comparing digests beside reading alone, GB/s
    damage     damaged checkpoints: what raises, and what loads wrong data silently, beside DCP
    soak       figures of bench/soak/run.py, from its JSON

All that is compared takes turns in the same processes. Writes JSON beside the other results.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from torch.distributed import TCPStore

from _environment import snapshot, worker_environment
from _stats import summarize
from _trust_damage import DAMAGE
from torchloom.checkpoints.manifest import BLOCK, blocks_of, check_files, read_manifest
from torchloom.runtime.lines.hub import Hub
from torchloom.runtime.lines.line import Wire

_HERE = Path(__file__).parent
_WORKER = _HERE / "_trust_worker.py"
_PARTS = ("steps", "messages", "saves", "verify", "damage", "soak")
_TINY = {"num_layers": 2, "dim": 64, "num_heads": 4, "hidden_dim": 96, "vocab_size": 256}
_TINY |= {"seq_len": 16}
_ARMS = ("torchloom", "fsdp2-dcp")
_MOMENTS = {"open": "before its file is opened", "fsync": "when its file is written"}
MAX_SHARE = 0.005
_RANKS = 512
_LIMIT_S = 600.0

Found = dict[str, Any]


class Bench:
    """What the parts share.

    Args:
        options: of the command.
        folder: for checkpoints, removed at the end.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.environment = worker_environment(options.cache)
        self._num_jobs = 0

    def ranks(self, limit_s: float = _LIMIT_S, **job: Any) -> Found:
        """Have two ranks do a job; return what rank 0 found, also where they then failed."""
        self._num_jobs += 1
        out = self.folder / f"found-{self._num_jobs}.json"
        spec = json.dumps({"shape": {}, **job, "out": str(out)})
        port = _free_port()
        log = (self.options.out.parent / f"trust-{self._num_jobs}.log").open("w")
        ranks = [
            subprocess.Popen(
                [sys.executable, str(_WORKER), spec],
                env={
                    **os.environ,
                    **self.environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
                stdout=log,
                stderr=log,
            )
            for rank in range(2)
        ]
        deadline = time.monotonic() + limit_s
        for rank in ranks[::-1]:  # where a job kills one, it is the last
            try:
                rank.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
            if rank.returncode:
                deadline = min(deadline, time.monotonic() + 20.0)
        log.close()
        return json.loads(out.read_text()) if out.exists() else {}


def main(arguments: Sequence[str]) -> int:
    """Measure, print, write JSON; return 1 if a promise is broken."""
    options = _parse(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    report: Found = {}
    if options.out.exists():  # parts that do not run now stay, each with its own environment
        report = json.loads(options.out.read_text())
    with tempfile.TemporaryDirectory(prefix="trust-", dir=options.folder) as folder:
        bench = Bench(options, Path(folder))
        for part in options.parts:
            load = os.getloadavg()[0]
            found = _DO[part](bench)
            loads = {"before": load, "after": os.getloadavg()[0]}
            environment = snapshot({"quick": options.quick}, bench.environment)
            report[part] = {**found, "load": loads, "environment": environment}
            report["broken"] = _judge(report)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
            print(f"[{time.monotonic() - started:5.0f} s] {part}", flush=True)
            for name, value in found.items():
                print(f"  {name}: {_shown(value)}", flush=True)
    broken = report["broken"]
    print("\n".join(f"BROKEN {each}" for each in broken) or "kept   all")
    return 1 if broken else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds, one batch size")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(_PARTS))
    parser.add_argument("--out", type=Path, default=_HERE / "out" / "trust.json")
    parser.add_argument("--soak", type=Path, default=_HERE / "out" / "soak.json")
    parser.add_argument("--folder", type=Path, help="where checkpoints are written")
    parser.add_argument("--cache", type=Path, default=_HERE.parent / ".cache" / "bench")
    return parser.parse_args(arguments)


def steps(bench: Bench) -> Found:
    """Bookkeeping of a step's collectives over the step, stage 3 compiled."""
    found: Found = {}
    for batch in (1,) if bench.options.quick else (1, 4):
        told = bench.ranks(job="steps", batch=batch, rounds=4 if bench.options.quick else 10)
        if not told:
            return {"failed": "see the log"}
        found[f"batch {batch}"] = _steps_of(told)
    return found


def _steps_of(told: Found) -> Found:
    fastest_s, book_s = min(told["steps_s"]), median(told["bookkeeping_s"])
    return {
        "collectives": told["collectives"],
        "step_s": _quartiles(told["steps_s"]),
        "fastest_step_s": fastest_s,
        "bookkeeping_us": _quartiles([1e6 * each for each in told["bookkeeping_s"]]),
        "ns_per_collective": 1e9 * book_s / told["collectives"],
        "share": book_s / median(told["steps_s"]),
        "share_of_fastest": book_s / fastest_s,
        "line_threads_share_of_a_core": told["line_threads_cpu_share"],
    }


def messages(bench: Bench) -> Found:
    """Time messages to rank 0 and to the store; calculate what 512 ranks would cost."""
    num = 2000 if bench.options.quick else 10000
    digest_us = [_digest_us(num) for _ in range(5)]
    get_us = [_store_us(num // 5) for _ in range(5)]
    message, get = median(digest_us), median(get_us)
    return {
        "digest_message_us": _quartiles(digest_us),
        "store_get_us": _quartiles(get_us),
        "tagged_messages_per_step": 0,
        f"untagged_share_of_a_core_at_{_RANKS}_ranks_1_step_per_s": _RANKS * message * 1e-6,
        f"agreement_at_{_RANKS}_ranks_s_with_one_answer_at_a_time": 2
        * _RANKS
        * _RANKS
        * get
        * 1e-6,
        "agreement_is": "at start and per save, not per step: each rank asks for and reads all texts",
    }


def _digest_us(num: int) -> float:
    """Return the microseconds of rank 0 per checksum that a rank reports at the end of a step."""
    listener, token = socket.create_server(("127.0.0.1", 0)), secrets.token_hex(16)
    hub = Hub(listener, token)
    wire = Wire(socket.create_connection(listener.getsockname()))
    wire.send(kind="hello", rank=0, token=token)
    stat = Path(f"/proc/self/task/{hub._thread.native_id}/schedstat")
    time.sleep(0.3)
    before = int(stat.read_text().split()[0])
    last = "reduction of blocks.7.feed_forward.down.weight, 2883584 bytes, in step 12"
    for step in range(num):
        wire.send(kind="digest", of=f"2x1#0 {step}", state=0x5EED, words=last, step=step)
    deadline = time.monotonic() + 60.0
    while ("digest", f"2x1#0 {num - 1}") not in hub._said and time.monotonic() < deadline:
        time.sleep(0.01)
    spent = int(stat.read_text().split()[0]) - before
    wire.close()
    hub.close("bench")
    return spent * 1e-3 / num


def _store_us(num: int) -> float:
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    store.set("key", "x" * 60)
    started = time.perf_counter()
    for _ in range(num):
        store.get("key")
    return (time.perf_counter() - started) * 1e6 / num


def saves(bench: Bench) -> Found:
    """Stalls, and their ratios within rounds."""
    rounds = 3 if bench.options.quick else 8
    told = bench.ranks(job="saves", folder=str(bench.folder / "saves"), rounds=rounds)
    return _saves_of(told) if told else {"failed": "see the log"}


def _saves_of(told: Found) -> Found:
    found: Found = {"checkpoint_mb": told["bytes"] / 1e6}
    for name, times in told["saves"].items():
        found[name] = {
            key: _quartiles([each[key] for each in times]) for key in ("stall_s", "done_s")
        }
    for way in ("sync", "async"):
        ours, theirs = (told["saves"][f"{arm} {way}"] for arm in _ARMS)
        for key in ("stall_s", "done_s"):
            pairs = zip(ours, theirs, strict=True)
            found[f"{way} {key}, ratio to dcp"] = _quartiles([a[key] / b[key] for a, b in pairs])
    return found


def verify(bench: Bench) -> Found:
    """Digests beside a read in the same blocks and threads: from memory, and with files dropped."""
    folder = bench.folder / "verify"
    bench.ranks(job="saves", folder=str(folder), rounds=0)
    path = folder / "torchloom" / "warm"
    if not path.exists():
        return {"failed": "see the log"}
    manifest = read_manifest(path)
    ways: dict[str, Callable[[], object]] = {
        "verify": lambda: check_files(path, manifest),
        "read": lambda: _read_blocks(path, manifest.files),
    }
    rounds = 5 if bench.options.quick else 15
    found: Found = {"mb": manifest.num_bytes / 1e6}
    for temperature in ("cached", "dropped"):
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(rounds):
            for name in sorted(ways, reverse=bool(index % 2)):
                if temperature == "dropped":
                    _drop(path)
                started = time.perf_counter()
                ways[name]()
                speeds[name].append(manifest.num_bytes / 1e9 / (time.perf_counter() - started))
        for name, values in speeds.items():
            found[f"{name} {temperature} GB/s"] = _quartiles(values)
        ratios = [v / r for v, r in zip(speeds["verify"], speeds["read"], strict=True)]
        found[f"{temperature}, ratio of speeds"] = _quartiles(ratios)
    return found


def _read_blocks(path: Path, files: Any) -> None:
    def read(block: Any) -> None:
        buffer = memoryview(bytearray(1 << 20))
        with (path / block.name).open("rb", buffering=0) as file:
            file.seek(block.index * BLOCK)
            left = BLOCK
            while left > 0 and (num := file.readinto(buffer[: min(left, 1 << 20)])):
                left -= num

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        list(threads.map(read, blocks_of(files)))


def _drop(path: Path) -> None:
    """Ask the kernel to forget what it holds of the files, so that the disk is read."""
    for each in path.iterdir():
        descriptor = os.open(each, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def damage(bench: Bench) -> Found:
    """What each arm makes of each damage."""
    found: dict[str, dict[str, str]] = {}
    for arm in _ARMS:
        job = {"arm": arm, "shape": _TINY}
        for case, outcome in _damaged(bench, arm, job).items():
            found.setdefault(case, {})[arm] = outcome
        for moment, words in _MOMENTS.items():
            folder = bench.folder / f"killed-{arm}-{moment}"
            folder.mkdir()
            killing = {**job, "folder": str(folder), "moment": moment}
            bench.ranks(job="killed", phase="save", **killing)
            told = bench.ranks(job="killed", phase="load", **killing)
            case = f"saving again, rank 1 killed {words}"
            found.setdefault(case, {})[arm] = told.get("outcome", "ends the process")
    silent = {arm: sum("silently" in each.get(arm, "") for each in found.values()) for arm in _ARMS}
    return {**found, "silent": silent, "cases": len(found)}


def _damaged(bench: Bench, arm: str, job: Found) -> Found:
    """Return the outcome of every case; one that ends a process has ended it, and others follow."""
    known: dict[str, str] = {}
    while len(known) < len(DAMAGE):
        folder = bench.folder / f"damage-{arm}-{len(known)}"
        known |= bench.ranks(job="damage", folder=str(folder), known=known, **job)
        if len(known) < len(DAMAGE):
            known[next(case for case in DAMAGE if case not in known)] = "ends the process"
    return known


def soak(bench: Bench) -> Found:
    """The soak's figures."""
    path = bench.options.soak
    if not path.exists():
        return {"not_run": "run make soak first"}
    told = json.loads(path.read_text())
    kills = told.get("kills", {})
    return {
        "wrong": told["wrong"],
        "steps": kills.get("environment", {}).get("options", {}).get("steps"),
        "kills": len(kills.get("killed", [])),
        "inside_saves": kills.get("kills_inside_saves"),
        "different": kills.get("different"),
        "growth": kills.get("growth"),
        "cut_host_ended_s": told.get("hosts", {}).get("ended_s"),
    }


_DO: dict[str, Callable[[Bench], Found]] = {
    "steps": steps,
    "messages": messages,
    "saves": saves,
    "verify": verify,
    "damage": damage,
    "soak": soak,
}


def _judge(report: Found) -> list[str]:
    parts = {part: report[part] for part in _PARTS if part in report}
    broken = [f"{part}: {each['failed']}" for part, each in parts.items() if "failed" in each]
    for batch, each in report.get("steps", {}).items():
        if not batch.startswith("batch"):
            continue
        share = each.get("share_of_fastest")
        if share is None or share > MAX_SHARE:
            broken.append(f"naming collectives takes {share} of a step at {batch}: {MAX_SHARE}")
    for case, outcomes in report.get("damage", {}).items():
        ours = outcomes.get("torchloom", "") if isinstance(outcomes, dict) else ""
        if isinstance(ours, str) and ("silently" in ours or "ends the process" in ours):
            broken.append(f"{case}: torchloom {ours}")
    broken += [f"soak: {each}" for each in report.get("soak", {}).get("wrong", [])]
    return broken


def _quartiles(values: Sequence[float]) -> dict[str, float] | None:
    found = summarize(values)
    return None if found is None else found._asdict()


def _shown(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {"low", "median", "high", "num"}:
        return f"{value['median']:.4g} [{value['low']:.4g}-{value['high']:.4g}] of {value['num']}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
