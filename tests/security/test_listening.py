"""A run on one host accepts connections on loopback alone."""

from __future__ import annotations

import ipaddress
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.ports import free_port
from torchloom import envs
from torchloom.cli.exposure import listening, told_listening
from torchloom.cli.processes import interpreter
from torchloom.errors import ConfigError
from torchloom.launch.rendezvous import is_loopback, serve_store

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
OURS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def environment(**more: str) -> dict[str, str]:
    left = {k: v for k, v in envs.child_environment({}).items() if k not in (*LAUNCHERS, *OURS)}
    return {**left, **more}


def descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        children = Path(f"/proc/{each}/task/{each}/children")
        found += map(int, children.read_text().split()) if children.exists() else ()
    return found


def listening_of(pid: int) -> list[tuple[str, int]]:
    """Return the addresses and ports on which another process listens."""
    known: dict[str, tuple[str, int]] = {}
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        try:
            rows = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A":
                known[f"socket:[{inode}]"] = _address(family, local)
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile
            found.append(known.get(str(descriptor.readlink())))
    return sorted({each for each in found if each is not None})


def _address(family: socket.AddressFamily, text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host)[at : at + 4][::-1] for at in range(0, len(host) // 2, 4)]
    return socket.inet_ntop(family, b"".join(words)), int(port, 16)


def wide(addresses: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [each for each in addresses if not ipaddress.ip_address(each[0]).is_loopback]


def test_what_listens_is_seen():
    with (
        socket.create_server(("0.0.0.0", 0)) as server,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        here = listening()
        assert ("0.0.0.0", server.getsockname()[1]) in here
        assert ("::1", six.getsockname()[1]) in here
        with pytest.raises(RuntimeError, match=r"accepts connections at 0\.0\.0\.0 port"):
            told_listening()


CODE = """
import os, torch, torch.distributed as dist
from torchloom.cli.exposure import listening, told_listening
from torchloom.launch.groups import ensure_process_group
for _ in range(2):
    ensure_process_group()
    dist.all_reduce(torch.ones(1))
    told_listening()
    dist.barrier()
    dist.destroy_process_group()
print(len(listening()), os.environ["GLOO_SOCKET_IFNAME"])
"""


def test_a_world_of_one():
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "lo"


def test_ranks_that_meet_at_a_loopback_address():
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", CODE],
            env=environment(
                RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port)
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [each.communicate(timeout=180) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
    assert [each.returncode for each in ranks] == [0, 0], told


def test_the_users_choice_of_an_interface_stands():
    done = subprocess.run(
        [sys.executable, "-c", CODE.replace("told_listening()\n", "\n")],
        env=environment(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="eth0"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_port_that_is_taken_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* set MASTER_PORT to another"):
            serve_store(port)
    for wrong in (-1, 65536):
        with pytest.raises(ConfigError, match="MASTER_PORT"):
            serve_store(wrong)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("node-1", False),
        ("localhost.example.org", False),
        ("", False),
    ],
)
def test_addresses_of_this_host_alone(host, is_local):
    assert is_loopback(host) is is_local


def test_a_run_of_the_command_train(tmp_path):
    data = tmp_path / "text.txt"
    data.write_bytes(b"".join(f"{i * i} is the square of {i}\n".encode() for i in range(4000)))
    log = tmp_path / "log"
    with log.open("w") as output:
        run = subprocess.Popen(
            [
                *(sys.executable, "-m", "torchloom", "train", "--no-compile", "--steps", "5000"),
                *("--data", str(data), "--out", str(tmp_path / "out"), "--seq-len", "32"),
                *("--log-every", "1", "--nproc", "2"),
            ],
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 120
        while "step 2/" not in log.read_text() and time.monotonic() < deadline:
            assert run.poll() is None, log.read_text()
            time.sleep(0.1)
        found = {pid: listening_of(pid) for pid in descendants(run.pid)}
        assert sum(map(bool, found.values())) >= 3  # the launcher's store, gloo of two ranks
        assert {pid: wide(each) for pid, each in found.items() if wide(each)} == {}
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(60)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot leave the folder out")
def test_children_import_from_the_current_folder_only_if_this_process_does(tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    (tmp_path / "json.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [each for each in sys.path if each not in ("", str(Path.cwd()))]
    )
    subprocess.run([*interpreter(), "-c", "import json"], env=environment(), check=True)
    assert not marker.exists()
    sys.path.insert(0, "")
    subprocess.run([*interpreter(), "-c", "import json"], env=environment(), check=True)
    assert marker.exists()
