"""The soak: a run that is killed again and again comes to the same weights as one left alone.

    python bench/soak/run.py                         1000 steps, ten kills, two hosts; `make soak`
    python bench/soak/run.py --steps 60 --kills 2 --parts kills

    kills    two ranks under torch's elastic launcher, random pauses, a save every 20 steps; kill -9 of
             ranks, of ranks that save, of ranks that start, of the launcher, which is then started anew
    hosts    two network namespaces, one of them cut off in the middle and joined again

Both must end with the weights, moments, schedule and generators of an undisturbed run, to the bit.
Memory, threads, descriptors, processes and files must stay level. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
sys.path[:0] = [str(_HERE), str(_HERE.parent)]

from _compare import differences
from _hosts import END_S, can_simulate, cut_and_resume
from _kills import plan_kills
from _runs import Ran, Run, SoakError
from _slopes import MAX_RSS_KIB_PER_1000, grown, read_facts, within_processes

from _environment import snapshot

_HOST_STEPS = 200


def main(arguments: Sequence[str]) -> int:
    """Soak, print a table, write JSON; return 1 if anything is not as it must be."""
    options = _parse(arguments)
    report: dict[str, Any] = {}
    if options.out.exists():  # parts that do not run now stay, each with its own environment
        report = json.loads(options.out.read_text())
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="soak-", dir=options.folder) as folder:
        try:
            for part in options.parts:
                load = os.getloadavg()[0]
                found = {"kills": _kills, "hosts": _hosts}[part](Path(folder), options)
                loads = {"before": load, "after": os.getloadavg()[0]}
                environment = snapshot(_recorded(options), {})
                report[part] = {"environment": environment, "load": loads, **found}
                wrong += [f"{part}: {each}" for each in found["wrong"]]
                _show(part, found)
        except SoakError as error:
            wrong.append(str(error))
    others = [
        each
        for part in ("kills", "hosts")
        if part not in options.parts and part in report
        for each in report[part]["wrong"]
    ]
    report["wrong"] = wrong + others
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(f"WRONG {each}" for each in wrong) or "kept   equal to the bit, all level")
    return 1 if wrong else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="aot_eager", help="of engine.compile; '': eager")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["kills", "hosts"])
    parser.add_argument("--folder", type=Path, help="where folders are made and removed again")
    parser.add_argument("--out", type=Path, default=_HERE.parent / "out" / "soak.json")
    return parser.parse_args(arguments)


def _recorded(options: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if key not in ("folder", "out")}


def _spec(options: argparse.Namespace, **rest: Any) -> dict[str, Any]:
    shared = {key: getattr(options, key) for key in ("steps", "save_every", "seed", "backend")}
    return {**shared, "pauses": False, **rest}


def _kills(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    alone = Run(folder / "alone", _spec(options))
    alone_ran = alone.go()
    kills = plan_kills(options.kills, options.steps, options.seed)
    disturbed = Run(folder / "disturbed", _spec(options, pauses=True), kills)
    ran = disturbed.go()
    found = {
        "undisturbed_s": round(alone_ran.seconds, 1),
        "disturbed_s": round(ran.seconds, 1),
        "starts": ran.starts,
        "repeated_steps": ran.repeated_steps,
        "killed": [each.to_plain() for each in ran.killed],
        "kills_inside_saves": sum(each.left_partial for each in ran.killed),
        "ranks_outlived_launcher_s": [round(each, 2) for each in ran.orphans_s],
        "different": differences(alone.folder, disturbed.folder),
        "growth": {
            "undisturbed": within_processes(read_facts(alone.folder)),
            "disturbed": within_processes(read_facts(disturbed.folder)),
        },
        "samples": ran.samples,
        "left": [*_left(alone), *_left(disturbed)],
        "verified": _verified(disturbed.folder / "checkpoints"),
    }
    return {**found, "wrong": _judge_kills(found, ran, options)}


def _judge_kills(found: dict[str, Any], ran: Ran, options: argparse.Namespace) -> list[str]:
    wrong = [f"differs from the undisturbed run: {each}" for each in found["different"][:5]]
    if len(ran.killed) < options.kills:
        wrong.append(f"only {len(ran.killed)} of {options.kills} kills were done")
    for name, growth in found["growth"].items():
        if (growth["rss_kib_per_1000_steps"] or 0) > MAX_RSS_KIB_PER_1000:
            wrong.append(f"memory grows in the {name} run: {growth}")
        if (growth["more_threads"] or 0) > 0 or (growth["more_descriptors"] or 0) > 0:
            wrong.append(f"threads or descriptors grow in the {name} run: {growth}")
    wrong += [f"grows from start to start: {each}" for each in grown(ran.samples)]
    wrong += [f"left behind: {each}" for each in found["left"]]
    if not found["verified"].startswith("ok"):
        wrong.append(f"checkpoints do not verify: {found['verified']}")
    return wrong


def _left(run: Run) -> list[str]:
    """Return what a run has left that is not its result."""
    working = [path.name for path in (run.folder / "checkpoints").glob(".torchloom-*")]
    files = [name for name in run.tree.temporary_files() if "torchinductor" not in name]
    return [*(name for name in working if name != ".torchloom.lock"), *files] + [
        f"/dev/shm/{name}" for name in run.tree.shared_memory()
    ]


def _verified(checkpoints: Path) -> str:
    command = [sys.executable, "-m", "torchloom", "checkpoint", "verify", str(checkpoints)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "ok" if done.returncode == 0 else done.stdout + done.stderr


def _hosts(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    reason = can_simulate()
    if reason:
        return {"not_run": reason, "wrong": []}
    spec = {**_spec(options), "steps": min(options.steps, _HOST_STEPS)}
    alone = Run(folder / "alone-short", spec)
    alone.go()
    started = time.monotonic()
    cut = cut_and_resume(folder / "hosts", spec)
    found = {
        **cut,
        "seconds": round(time.monotonic() - started, 1),
        "different": differences(alone.folder, folder / "hosts"),
    }
    wrong = [f"differs from the undisturbed run: {each}" for each in found["different"][:5]]
    for rank, (seconds, code, said) in enumerate(
        zip(cut["ended_s"], cut["codes"], cut["said"], strict=True)
    ):
        if seconds is None or seconds > END_S:
            wrong.append(f"rank {rank} ended {seconds} s after the cut, at most {END_S} s")
        if not code or len(said) != 1:
            wrong.append(
                f"rank {rank} ended with code {code} and said {said}, one sentence is right"
            )
    return {**found, "wrong": wrong}


def _show(part: str, found: dict[str, Any]) -> None:
    print(f"{part}")
    for name, value in found.items():
        if name == "killed":
            for each in value:
                who = "launcher" if each["rank"] is None else f"rank {each['rank']}"
                inside = ", inside a save" if each["left_partial"] else ""
                print(f"  kill -9 of {who} ({each['kind']}) at step {each['step']}{inside}")
        elif name not in ("wrong", "samples"):
            print(f"  {name}: {value}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
