"""Start the workers of this host with torch's elastic agent, and hand signals on to them.

The agent alone would answer Ctrl-C by signalling whole process groups, compilers included, and
report a failure even when every worker saved and left in order. So signals are taken here and
passed to the workers alone; the agent just sees them finish.

Exit codes: 0 finished, or stopped by a signal with everything saved; 1 a worker failed;
130 stopped before there was anything to save, or stopped twice.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from torchloom import envs
from torchloom.cli.interpreter import interpreter
from torchloom.cli.train.rendezvous import LocalRendezvous
from torchloom.cli.train.stop import EXIT_INTERRUPTED
from torchloom.engine.loopback import ADDRESS, stay_local

_TERMINATE = (signal.SIGINT, signal.SIGTERM)


SAVING = "saving after this step; once more to quit at once"


def launch(worker_argv: Sequence[str], nproc: int, on_signal: str = SAVING) -> int:
    """Run `python -m torchloom ARGV` in `nproc` processes; return the exit code of the run.

    Args:
        worker_argv: the arguments after `torchloom`.
        nproc: how many ranks to start on this host.
        on_signal: what the ranks do when they are signalled, for the terminal.
    """
    num_cores = len(os.sched_getaffinity(0))
    envs.set_default("OMP_NUM_THREADS", str(max(1, num_cores // nproc)))
    # SIGINT and SIGTERM are taken below; the agent keeps those that mean "the terminal is gone".
    envs.set_default("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGHUP,SIGQUIT")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    stay_local()
    agent = _agent(worker_argv, nproc)
    relay = _Relay(agent, on_signal)
    try:
        with relay.listening():
            result = agent.run()
    except SignalException:
        return EXIT_INTERRUPTED
    return _exit_code(result, relay, worker_argv[0])


def _agent(worker_argv: Sequence[str], nproc: int) -> LocalElasticAgent:
    """Return an agent for one host: a free port of loopback, no restarts, output straight to ours."""
    python, *flags = interpreter()
    spec = WorkerSpec(
        role="train",
        local_world_size=nproc,
        entrypoint=python,
        args=(*flags, "-u", "-m", "torchloom", *worker_argv),
        rdzv_handler=LocalRendezvous(),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=ADDRESS,
    )
    return LocalElasticAgent(spec=spec, logs_specs=DefaultLogsSpecs(), start_method="spawn")


class _Relay:
    """Pass the first signal to each worker; a second one kills them."""

    def __init__(self, agent: LocalElasticAgent, on_signal: str) -> None:
        self._agent = agent
        self._on_signal_words = on_signal
        self.received: signal.Signals | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals inside a `with` block."""
        before = {sig: signal.signal(sig, self._on_signal) for sig in _TERMINATE}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        pids = [w.id for w in self._agent.get_worker_group().workers if isinstance(w.id, int)]
        if not pids:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = signal.Signals(number)
            print(f"\n{self.received.name}: {self._on_signal_words}")
            _signal_all(pids, self.received)
        else:
            _signal_all(pids, signal.SIGKILL)


def _signal_all(pids: Sequence[int], sig: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, sig)
        except ProcessLookupError:  # noqa: PERF203 - one worker gone must not spare the others
            continue


def _exit_code(result: RunResult, relay: _Relay, command: str) -> int:
    if not result.is_failed():
        return 0
    if relay.received is not None:
        print(f"stopped by {relay.received.name} with nothing saved since the last checkpoint")
        return EXIT_INTERRUPTED
    rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        cause = f"was killed by {name}; SIGKILL often means that the host ran out of memory"
    else:
        cause = f"failed with exit code {failure.exitcode}; see its message above"
    print(f"torchloom {command}: rank {rank} {cause}", file=sys.stderr)
    return 1
