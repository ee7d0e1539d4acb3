"""The part of `doctor` about trust: what other users and other machines can reach of a run."""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from torchloom import envs
from torchloom._torch.inductor import inductor_cache_dir
from torchloom.errors import ArtifactError
from torchloom.files import why_not_own, why_replaceable
from torchloom.launch.rendezvous import is_loopback
from torchloom.serve.store.signing_key import SigningKey

_MOST_FILES = 100_000


State = Literal["ok", "note", "FAIL"]


class CheckFinding(NamedTuple):
    """One line of the report."""

    state: State
    about: str
    what: str
    cure: str = ""

    @classmethod
    def of(
        cls, about: str, good: str, why_not: str | None, cure: str, bad: State = "FAIL"
    ) -> CheckFinding:
        """Return a line about something that works, or the reason why it does not."""
        return cls("ok", about, good) if why_not is None else cls(bad, about, why_not, cure)


def exposed(
    folders: Iterable[Path], run: Callable[[str, float], str | None]
) -> Iterator[CheckFinding]:
    """Yield findings on files, keys, ports and shared memory.

    Args:
        folders: stores, checkpoints and others that the user names.
        run: runs code in a fresh interpreter and returns why it failed.
    """
    with suppress(OSError):  # it cannot be made: the check of caches says so
        yield _folder("code from the cache", Path(inductor_cache_dir()))
    yield _temporary()
    yield _key()
    for folder in folders:
        yield _folder("folder", folder)
    yield _new_files()
    yield from _ports(run)
    yield CheckFinding(
        "ok",
        "shared memory",
        "has no name: processes of this user and of root can open it, others cannot",
    )


def listening() -> list[tuple[str, int]]:
    """Return the addresses and ports on which this process listens; none if there is no /proc."""
    found = set()
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # no socket, or closed meanwhile
            each = socket.socket(fileno=int(descriptor.name))
            try:
                is_inet = each.family in (socket.AF_INET, socket.AF_INET6)
                if is_inet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(each.getsockname()[:2])
            finally:
                each.detach()  # it stays open
    return sorted(found)


def _folder(about: str, folder: Path) -> CheckFinding:
    if not folder.exists():
        return CheckFinding("ok", about, f"{folder} is not there yet")
    files = itertools.islice(folder.rglob("*"), _MOST_FILES)
    inside = (path for path in files if path.exists() and not path.is_symlink())
    outside = why_not_own(folder.resolve()) or why_replaceable(folder)
    reason = outside or next(filter(None, map(why_not_own, inside)), None)
    what = reason and f"{reason}: who can write there can change what runs, or what is loaded"
    cure = f"chmod -R go-w {folder}, or use a folder of your own"
    return CheckFinding.of(about, f"{folder} can be written by this user alone", what, cure, "note")


def _temporary() -> CheckFinding:
    folder = Path(tempfile.gettempdir())
    mode = folder.stat().st_mode
    what = f"{folder} lets others replace files of yours (mode {stat.S_IMODE(mode):o})"
    return CheckFinding.of(
        "temporary files",
        f"{folder}: others cannot replace files of yours",
        what if mode & 0o022 and not mode & stat.S_ISVTX else None,
        f"chmod +t {folder}, or set TMPDIR",
        "note",
    )


def _key() -> CheckFinding:
    path, about = envs.key_file(), "key of stores"
    if not path.exists():
        return CheckFinding("ok", about, f"none at {path} yet: the first build makes it")
    try:
        return CheckFinding("ok", about, f"{path}, private; its name is {SigningKey().name}")
    except ArtifactError as error:
        return CheckFinding("FAIL", about, str(error), f"chmod 600 {path}")


def _new_files() -> CheckFinding:
    mask = os.umask(0o077)
    os.umask(mask)
    what = f"checkpoints and records that you write can be changed by others (umask {mask:03o})"
    good = f"others cannot write to them (umask {mask:03o})"
    is_closed = mask & 0o022 == 0o022
    return CheckFinding.of("new files", good, None if is_closed else what, "umask 022", "note")


def _ports(run: Callable[[str, float], str | None]) -> Iterator[CheckFinding]:
    code = (
        "from torchloom.cli.exposure import told_listening\n"
        "from torchloom.launch.groups import ensure_process_group\n"
        "ensure_process_group()\n"
        "told_listening()\n"
    )
    cure = "unset GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    good = "a run on one host listens on loopback alone"
    yield CheckFinding.of("ports", good, run(code, 60), cure, "note")
    host = envs.get_str("MASTER_ADDR", "")
    where = f"MASTER_ADDR is {host}: its" if host and not is_loopback(host) else "with several, the"
    yield CheckFinding(
        "note",
        "several hosts",
        f"{where} store listens on all interfaces, and neither it nor gloo or NCCL ask who connects, or encrypt",
        "use a network that only the hosts of the run can reach",
    )


def told_listening() -> None:
    """Raise if this process accepts connections from other hosts.

    Raises:
        RuntimeError: it does; the message has address and port.
    """
    wide = [
        f"{host} port {port}"
        for host, port in listening()
        if not ipaddress.ip_address(host).is_loopback
    ]
    if wide:
        raise RuntimeError(f"a run on one host accepts connections at {', '.join(wide)}")
