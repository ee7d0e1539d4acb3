"""Runs a case: starts its processes, does what goes wrong from outside, watches the limits, cleans up."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

from faults.matrix import traces
from faults.matrix.actions import ACTIONS
from faults.matrix.case import TAKEN, Case, Ends, exits
from faults.matrix.forkserver import Forked, ForkServer, common_environment
from faults.matrix.judge import Observation, Seen, judge
from faults.matrix.network import Host, two_hosts
from faults.matrix.table import Row
from support.ports import free_port

_START_S = 180.0
"""Until the first rank comes to its fault, compilation included."""
_GRACE_S, _GONE_S, _POLL_S = 3.0, 3.0, 0.02
_EXPECTED = ("checkpoints", "store", "logs")
"""What programs may leave in their folder."""
_OF_LOADERS = "pymp-"
"""A folder that processes of torch's loaders leave when they raise, also without torchloom."""
_WORKER = [sys.executable, "-m", "faults.matrix.worker"]
_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
)  # fmt: skip


@dataclass
class Process:
    """One process that the case started."""

    name: str
    ends: Ends
    popen: subprocess.Popen[bytes] | Forked
    output: Path
    ended_s: float | None = None
    in_time: bool = True

    def text(self) -> str:
        """Return what it printed."""
        return self.output.read_text(errors="replace")


@dataclass
class Run:
    """One case that runs, in a folder of its own."""

    case: Case
    folder: Path
    forks: ForkServer | None = None
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    processes: list[Process] = field(default_factory=list)
    hosts: tuple[Host, ...] = ()
    acted_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("work", "tmp", "logs"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "marks").touch()
        self._sessions: set[int] = set()
        self._shared_before = traces.shared_entries()
        self._taken = socket.create_server(("", 0))
        self.taken_port = int(self._taken.getsockname()[1])

    @property
    def fault_s(self) -> float | None:
        """When the case went wrong."""
        return self.acted_s if self.case.action else self.marked("fault")

    def marked(self, what: str) -> float | None:
        """Return when a rank first said that it came to something."""
        lines = [line.split() for line in (self.folder / "marks").read_text().splitlines()]
        return min((float(when) for name, when in lines if name == what), default=None)

    def start(self, program: str) -> None:
        """Start all processes of a program."""
        port = free_port()
        for name, command, variables, ends in self._commands(program, port):
            output = self.folder / "logs" / f"{program} {name}"
            popen = self._started(command, variables, output)
            self.processes.append(Process(name, ends, popen, output))

    def _started(
        self, command: list[str], variables: dict[str, str], output: Path
    ) -> subprocess.Popen[bytes] | Forked:
        work = self.folder / "work"
        if self.forks is not None and command[: len(_WORKER)] == _WORKER:
            rank = self.forks.start(command[len(_WORKER) :], cwd=work, env=variables, output=output)
            self._sessions.add(rank.pid)
            return rank
        with output.open("wb") as stream:
            return subprocess.Popen(
                command, cwd=work, env=variables, stdin=subprocess.DEVNULL,
                stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def living(self) -> dict[int, str]:
        """Return the processes of this case that live, with their command lines."""
        return traces.processes_of(self.token, self._sessions)

    def _commands(
        self, program: str, port: int
    ) -> Iterator[tuple[str, list[str], dict[str, str], Ends]]:
        case, size = self.case, self.case.num_ranks
        worker = [*_WORKER[1:], program, self._settings()]
        common = self._environment()
        if case.launcher == "torchrun":
            logs = ["--redirects", "3", "--log-dir", str(self.folder / "logs")]
            head = ["-m", "torch.distributed.run", f"--nproc-per-node={size}", "--master-addr"]
            head += ["127.0.0.1", "--master-port", str(port), *logs]
            yield "launcher", [sys.executable, *head, *worker], common, exits(1)
        else:
            for rank in sorted(set(range(size)) - set(case.absent)):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
                own |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
                own["MASTER_PORT"] = str(port)
                head = []
                if self.hosts:
                    head = self.hosts[rank].head()
                    own |= self.hosts[rank].environment(self.hosts[0])
                changed = {**common, **own, **case.environment.get(rank, {})}
                if changed["MASTER_PORT"] == TAKEN:
                    changed["MASTER_PORT"] = str(self.taken_port)
                variables = {name: value for name, value in changed.items() if value is not None}
                command = [*head, sys.executable, *worker]
                yield f"rank {rank}", command, variables, case.ends[rank]

    def _settings(self) -> str:
        return json.dumps({"setup": asdict(self.case.setup), "arguments": self.case.arguments})

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value for name, value in common_environment().items() if name not in _LAUNCHERS
        }
        inherited.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self.folder.parent / "inductor"))
        return {
            **inherited,
            traces.TOKEN: self.token,
            "FAULTS_FOLDER": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
        }

    def watch(self) -> None:
        """Return when all processes have ended, or have been killed for not doing so."""
        started_s, deadline_s = time.monotonic(), None
        while waited := [each for each in self.processes if each.ended_s is None]:
            now = time.monotonic()
            for each in waited:
                if each.popen.poll() is not None:
                    each.ended_s = now
            if self.case.action and self.acted_s is None:
                self._act()
            if deadline_s is None and self.fault_s is not None:
                deadline_s = self.fault_s + self.case.limit_s + _GRACE_S
            if all(each.ends.stays for each in waited) and deadline_s is not None:
                break
            if now > (deadline_s or started_s + _START_S):
                self._break_off(waited)
                break
            time.sleep(_POLL_S)
        for each in self.processes:
            if each.popen.poll() is None:
                each.popen.kill()
            each.popen.wait()

    def _act(self) -> None:
        act = ACTIONS[self.case.action]
        if act.is_ready(self):
            self.acted_s = time.monotonic()
            act.do(self)

    def _break_off(self, waited: Sequence[Process]) -> None:
        """Let the ranks that hang say where they stand, and end them."""
        for each in waited:
            each.in_time = each.ends.stays
            if not self.case.launcher and _handles(each.popen.pid, signal.SIGUSR1):
                each.popen.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        traces.kill(self.living())

    def seen(self, other_weights: str) -> Observation:
        """Return what came of it, once it has ended."""
        last = max(
            (each.ended_s or 0.0 for each in self.processes if not each.ends.stays), default=0
        )
        hung = any(not each.in_time for each in self.processes)
        end_s = time.monotonic() if hung else last
        return Observation(
            case=self.case,
            processes=self._seen_processes(),
            seconds=None if self.fault_s is None else end_s - self.fault_s,
            left=self._left(),
            other_weights=other_weights,
            libraries=LIBRARIES,
        )

    def _seen_processes(self) -> list[Seen]:
        is_torchrun = self.case.launcher == "torchrun"
        found = [
            Seen(name=each.name, code=each.popen.returncode, in_time=each.in_time, ends=each.ends,
                 text="" if is_torchrun else each.text())
            for each in self.processes
        ]  # fmt: skip
        if not is_torchrun:
            return found
        for rank, ends in enumerate(self.case.ends):  # torchrun keeps the output of each in files
            kept = sorted((self.folder / "logs").glob(f"*/attempt_0/{rank}/std*.log"))
            text = "\n".join(path.read_text(errors="replace") for path in kept)
            found.append(Seen(name=f"rank {rank}", code=None, text=text, ends=ends))
        return found

    def _left(self) -> list[str]:
        deadline_s = time.monotonic() + _GONE_S
        while (left := self.living()) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        traces.kill(left)
        found = [f"process {pid}: {line[:60]}" for pid, line in left.items()]
        found += traces.files_in(self.folder / "work", _EXPECTED)
        temporary = traces.files_in(self.folder / "tmp")
        found += [f"$TMPDIR/{name}" for name in temporary if not name.startswith(_OF_LOADERS)]
        return found + [
            f"/dev/shm/{name}" for name in traces.forgotten_entries(self._shared_before)
        ]

    def clean_up(self) -> None:
        """End whatever is left, also where the matrix itself was broken off."""
        self._taken.close()
        traces.kill(self.living())


def run_case(
    case: Case, folder: Path, weights: Mapping[str, str], forks: ForkServer | None = None
) -> Row:
    """Run a case and return its row.

    Args:
        case: what to run.
        folder: an empty place of its own.
        weights: that earlier cases came to, by their names.
        forks: where ranks come from that no launcher and no other host starts; None starts each by
            itself.
    """
    started_s = time.monotonic()
    run = Run(case, folder, forks)
    try:
        with ExitStack() as stack:
            if case.needs_network:
                run.hosts = stack.enter_context(two_hosts())
            if case.first:
                _run_first(run)
            run.start(case.program)
            run.watch()
            seen = run.seen(weights.get(case.trains_like, ""))
    except PermissionError as error:
        seen = Observation(case=case, processes=(), seconds=None, skipped=str(error))
    finally:
        run.clean_up()
    outputs = {each.name: each.text for each in seen.processes}
    took_s = time.monotonic() - started_s
    return Row(
        name=case.name, outcome=judge(seen), seconds=seen.seconds, took_s=took_s, outputs=outputs
    )


def _run_first(run: Run) -> None:
    run.start(run.case.first)
    run.watch()
    traces.kill(run.living())
    run.processes.clear()
    (run.folder / "marks").write_text("")
    for path in (run.folder / "tmp").iterdir():
        path.rename(run.folder / "logs" / path.name)


def _handles(pid: int, number: int) -> bool:
    """Return whether a process catches a signal, which would end it otherwise."""
    with suppress(OSError, IndexError):
        text = Path(f"/proc/{pid}/status").read_text()
        caught = next(line.split()[1] for line in text.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught, 16) >> (number - 1) & 1)
    return False


def _folder_of(module: str) -> str:
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{module} cannot be found: run the matrix where it is installed")
    return f"{spec.submodule_search_locations[0]}/"


LIBRARIES = (_folder_of("torch"), _folder_of("torchloom"))
