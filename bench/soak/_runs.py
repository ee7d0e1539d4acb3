"""One training run under torch's elastic launcher, left alone or disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _kills import Kill, Killed, do_kill
from _tree import Tree

WORKER = Path(__file__).with_name("worker.py")
_STILL_S = 240.0
"""Without a step for so long, a run counts as hanging; a start takes 5 to 40 s on busy cores."""
_ORPHANS_S = 60.0
_SAMPLED_AFTER = 5
"""Steps after a start at which the tree is looked at."""


class SoakError(Exception):
    """The run did not go as it must; the message says how."""


@dataclass(kw_only=True)
class Ran:
    """What happened in a run."""

    seconds: float = 0.0
    starts: int = 0
    killed: list[Killed] = field(default_factory=list)
    orphans_s: list[float] = field(default_factory=list)
    """How long the ranks outlived a launcher that was killed."""
    repeated_steps: int = 0
    """Steps that were lost with a kill and taken again."""
    samples: list[dict[str, int]] = field(default_factory=list)
    """The tree, shortly after each start."""


class Run:
    """A run in a folder of its own.

    Args:
        folder: where it leaves everything.
        spec: of its ranks; see `worker.Spec`.
        kills: what is done to it.
    """

    def __init__(self, folder: Path, spec: dict[str, Any], kills: Sequence[Kill] = ()) -> None:
        folder.mkdir(parents=True)
        self.folder, self.tree = folder, Tree(folder / "tmp")
        self._argv = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--log-dir", "/dev/null"),
            *("--max-restarts", str(len(kills) + 1), "--monitor-interval", "0.1"),
            *(str(WORKER), json.dumps({**spec, "folder": str(folder)})),
        ]
        self._kills = list(kills)
        self._ran = Ran()
        self._gone_pids: set[int] = set()
        self._start = (0, 0)

    def go(self) -> Ran:
        """Run to the end; nothing of it is alive afterwards.

        Raises:
            SoakError: it failed, or stood still.
        """
        started = time.monotonic()
        try:
            self._go()
            gone_s = self.tree.wait_gone(10.0)
            if gone_s is None:
                raise SoakError(f"processes are left after the end: {self.tree.pids()}")
        finally:
            self.tree.end()
        self._ran.seconds = time.monotonic() - started
        return self._ran

    def _go(self) -> None:
        launcher = self._launch()
        seen, seen_s, sampled = (0, 0), time.monotonic(), 0
        while True:
            code = launcher.poll()
            if code == 0:
                return
            if code is not None and self._ran.killed and self._ran.killed[-1].kind == "launcher":
                launcher, seen_s = self._relaunch(), time.monotonic()
            elif code is not None:
                raise SoakError(f"the launcher ended with code {code}:\n{self._said()}")
            now = self._progress()
            if now != seen:
                if now[0] != seen[0]:
                    self._note_start(seen, now)
                seen, seen_s = now, time.monotonic()
            if sampled != now[0] and now[1] - self._start[1] >= _SAMPLED_AFTER:
                sampled = now[0]
                self._ran.samples.append(self._sample(now[1]))
            if time.monotonic() - seen_s > _STILL_S:
                raise SoakError(f"no step for {_STILL_S:.0f} s:\n{self._said()}")
            if self._kills and self._is_due(self._kills[0], now):
                self._kill(launcher)
                seen_s = time.monotonic()
            time.sleep(0.005)

    def _launch(self) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                self._argv, stdout=log, stderr=log, env=self.tree.environment(), cwd=self.folder
            )

    def _relaunch(self) -> subprocess.Popen[bytes]:
        """Start the launcher that was killed anew, when its ranks have ended by themselves."""
        gone_s = self.tree.wait_gone(_ORPHANS_S)
        if gone_s is None:
            raise SoakError(f"ranks outlive their launcher by {_ORPHANS_S:.0f} s:\n{self._said()}")
        self._ran.orphans_s.append(gone_s)
        return self._launch()

    def _note_start(self, before: tuple[int, int], now: tuple[int, int]) -> None:
        self._ran.starts += 1
        self._ran.repeated_steps += max(0, before[1] - now[1])
        self._start = now

    def _is_due(self, kill: Kill, now: tuple[int, int]) -> bool:
        if kill.kind == "start":
            alive = set(self.tree.workers().values())
            return bool(alive) and not alive & self._gone_pids
        return now[0] not in self._gone_pids and now[0] > 0 and now[1] >= kill.step

    def _kill(self, launcher: subprocess.Popen[bytes]) -> None:
        kill = self._kills.pop(0)
        pids = set(self.tree.workers().values())
        done = do_kill(
            kill, self.tree, self.folder, launcher.pid, lambda: self._progress()[1], limit_s=60.0
        )
        if done is None:
            raise SoakError(f"the moment of {kill} never came:\n{self._said()}")
        self._ran.killed.append(done)
        self._gone_pids |= pids | {self._progress()[0]}

    def _progress(self) -> tuple[int, int]:
        """Return process id and step of rank 0."""
        try:
            pid, step = (self.folder / "progress").read_text().split()
        except (FileNotFoundError, ValueError):  # not there, or being written
            return self._start
        return int(pid), int(step)

    def _sample(self, step: int) -> dict[str, int]:
        checkpoints = self.folder / "checkpoints"
        return {
            "step": step,
            "processes": len(self.tree.pids()),
            "temporary_files": len(self.tree.temporary_files()),
            "shared_memory": len(self.tree.shared_memory()),
            "checkpoint_entries": len(list(checkpoints.iterdir())) if checkpoints.is_dir() else 0,
            "run_entries": len(list(self.folder.iterdir())),
        }

    def _said(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-30:])
