"""Start the workers of this host with torch's elastic agent, and forward signals to them.

On Ctrl-C the agent would signal whole process groups, compilers included, and report a failure even
if every worker saved and exited normally. Therefore this module handles the signals and forwards
them to the workers only; the agent sees the workers finish.

SIGHUP has two meanings. If the terminal exists (`kill -HUP`), or there never was one, the workers save
and continue. If the terminal was closed, they save and stop, as on SIGTERM.

Exit codes: 0 finished, or stopped by a signal with everything saved; that of the worker which failed first, 1
where it was killed; 128 + the signal's number: stopped before there was anything to save, or stopped twice (130
by SIGINT).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from torchloom import envs
from torchloom.cli.processes import held_back, interpreter
from torchloom.cli.terminal import has_terminal, unread
from torchloom.launch.rendezvous import ADDRESS, serve_store, stay_local

_FAILED = "torchloom/first to fail"
SAVING = "saving after this step; once more to quit at once"
SAVING_ON = "saving after this step, then going on"


def launch(
    worker_argv: Sequence[str],
    nproc: int,
    on_signal: str = SAVING,
    on_hangup: str | None = SAVING_ON,
) -> int:
    """Run `python -m torchloom ARGV` in `nproc` processes; return the exit code of the run.

    Args:
        worker_argv: the arguments after `torchloom`.
        nproc: how many ranks to start on this host.
        on_signal: what the ranks do on SIGINT and SIGTERM, printed to the terminal.
        on_hangup: what they do on SIGHUP; None: the same as on SIGTERM, as they save nothing.

    Returns:
        The exit code of the run, see above.
    """
    num_cores = len(os.sched_getaffinity(0))
    envs.set_default("OMP_NUM_THREADS", str(max(1, num_cores // nproc)))
    # The agent handles SIGQUIT only; `_Relay` handles the other signals.
    envs.set_value("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGQUIT")
    # C++ warnings, such as connections closed by peers, repeat what the ranks report as errors.
    if not envs.is_on(envs.TRACEBACK):
        envs.set_default("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    stay_local()
    rendezvous = LocalRendezvous()
    agent = _agent(worker_argv, nproc, rendezvous)
    relay = _Relay(agent, on_signal, on_hangup)
    try:
        with envs.value_within(envs.LAUNCHER_PID, str(os.getpid())), relay.listening():
            result = agent.run()
    except SignalException as stopped:
        return exit_code(stopped.sigval)
    except KeyboardInterrupt:  # raised by `_Relay` when there was no worker yet
        return exit_code(relay.received or signal.SIGINT)
    if not result.is_failed():
        return 0
    if relay.received is not None:
        lost = "" if on_hangup is None else " with nothing saved since the last checkpoint"
        _say(f"stopped by {relay.received.name}{lost}")
        return exit_code(relay.received)
    return _tell_failure(result, rendezvous.first_to_fail(), worker_argv[0])


def _agent(worker_argv: Sequence[str], nproc: int, rendezvous: LocalRendezvous) -> _QuietAgent:
    """Return an agent for one host: a free port on loopback, no restarts, workers inherit our output."""
    python, *flags = interpreter()
    spec = WorkerSpec(
        role="train",
        local_world_size=nproc,
        entrypoint=python,
        args=(*flags, "-u", "-m", "torchloom", *worker_argv),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=ADDRESS,
    )
    # Otherwise the agent writes error files to a temporary folder, which stays if it is killed.
    logs = DefaultLogsSpecs(log_dir=os.devnull)
    return _QuietAgent(spec=spec, logs_specs=logs, start_method="spawn")


class _QuietAgent(LocalElasticAgent):
    """Starts workers with signals blocked until they have set their handlers, and records their pids."""

    pids: tuple[int, ...] = ()
    is_starting: bool = False
    waiting: int | None = None
    """A signal that came, in another thread, while workers were started; forwarded once their pids are
    known."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with held_back():
            self.is_starting = True
            started = super()._start_workers(worker_group)
            self.pids, self.is_starting = tuple(started.values()), False
        if self.waiting is not None:
            _signal_all(self.pids, self.waiting)
        return started


class _Relay:
    """Forward the first signal to each worker; kill them on a second one."""

    def __init__(self, agent: _QuietAgent, on_signal: str, on_hangup: str | None) -> None:
        self._agent = agent
        self._on_signal_words, self._on_hangup_words = on_signal, on_hangup
        self._had_terminal = has_terminal()
        self.received: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside a `with` block."""
        taken = {signal.SIGINT: self._on_signal, signal.SIGTERM: self._on_signal}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            taken[signal.SIGHUP] = self._on_hangup
        before = {sig: signal.signal(sig, handler) for sig, handler in taken.items()}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        is_closed = self._had_terminal and not has_terminal()
        if is_closed or self._on_hangup_words is None:
            if self.received is None:
                self._on_signal(number, frame)
            return
        _say(f"\nSIGHUP: {self._on_hangup_words}")
        _signal_all(self._agent.pids, signal.SIGHUP)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first, pids = self.received is None, self._agent.pids
        if first:
            self.received = signal.Signals(number)
        if not pids and self._agent.is_starting:
            self._agent.waiting = signal.SIGTERM if number == signal.SIGHUP else number
            return
        if not pids:
            raise KeyboardInterrupt
        if first:
            _say(f"\n{signal.Signals(number).name}: {self._on_signal_words}")
            # On SIGHUP workers save and continue, but the terminal is closed: they shall stop.
            _signal_all(pids, signal.SIGTERM if number == signal.SIGHUP else number)
        else:
            _signal_all(pids, signal.SIGKILL)


def _say(line: str) -> None:
    with unread():
        print(line, flush=True)


def _signal_all(pids: Sequence[int], sig: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, sig)
        except ProcessLookupError:  # noqa: PERF203 - the other workers must still get the signal
            continue


def exit_code(number: int) -> int:
    """Return the exit code of a run that a signal stopped before it could save, as in shells."""
    return 128 + number


def _tell_failure(result: RunResult, told: int | None, command: str) -> int:
    rank, failure = min(result.failures.items(), key=lambda item: _order(*item, told))
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        cause = f"was killed by {name}"
        if name == "SIGKILL":
            cause += (
                "; often that means that the host ran out of memory: use fewer ranks (--nproc), a "
                "smaller micro-batch or no offloading, and resume from the last checkpoint"
            )
    else:
        cause = f"failed with exit code {failure.exitcode}; see its message above"
    print(f"torchloom {command}: rank {rank} {cause}", file=sys.stderr)
    return max(failure.exitcode, 1)


def _order(rank: int, failure: ProcessFailure, told: int | None) -> tuple[int, bool, int]:
    """Sort causes before consequences: ranks that lost a peer, and ranks that the agent ended."""
    kind = 1 if failure.exitcode > 0 else 2 if failure.exitcode == -signal.SIGTERM else 0
    return kind, rank != told, failure.timestamp


def is_first_to_fail(rank: int) -> bool:
    """Note in the launcher's store that this rank fails, unless another has.

    Args:
        rank: of this process.

    Returns:
        Whether no other rank has failed before; also where no launcher serves a store.
    """
    place = envs.meeting(default_port=29500) if envs.launcher_has_store() else None
    if place is None:
        return True
    store = dist.TCPStore(place.host, place.port, is_master=False)
    return int(store.compare_set(f"{_FAILED} {place.attempt}", "", str(rank))) == rank


class LocalRendezvous(RendezvousHandler):
    """Replaces torch's own handlers, whose stores listen on all interfaces."""

    def __init__(self) -> None:
        self._store = serve_store()
        self._id = uuid.uuid4().hex

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use this store too: yes."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and its address."""
        where = RendezvousStoreInfo(ADDRESS, self._store.port)
        return RendezvousInfo(dist.PrefixStore("agent", self._store), 0, 1, where)

    def is_closed(self) -> bool:
        """Return whether there will be no further round: the agent asks for one."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the agent asks for one round alone."""

    def num_nodes_waiting(self) -> int:
        """Return how many hosts want to join: none."""
        return 0

    def get_run_id(self) -> str:
        """Return an id that is unique to this run."""
        return self._id

    def first_to_fail(self) -> int | None:
        """Return the rank that said so first, if any did."""
        key = f"{_FAILED} 0"  # there are no restarts
        return int(self._store.get(key)) if self._store.check([key]) else None

    def shutdown(self) -> bool:
        """Do nothing: the store ends with this process."""
        return True
