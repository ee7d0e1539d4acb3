"""Output that nobody reads any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchloom import envs

BUFFERED = envs.child_environment({"PYTHONUNBUFFERED": ""})
SCRIPT = """
import sys
from torchloom.cli.terminal import drop_unread
import atexit
atexit.register(drop_unread)
sys.stdin.readline()  # until the reader has gone
print("something", end="")
"""


def test_a_reader_that_has_gone_does_not_change_the_exit_code() -> None:
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE, stdout=write_end, stderr=subprocess.PIPE, env=BUFFERED,
    ) as process:  # fmt: skip
        os.close(write_end)
        os.close(read_end)
        _, errors = process.communicate(b"\n", timeout=300)
    assert (process.returncode, errors) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_does() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            input=b"\n", stdout=full, stderr=subprocess.PIPE, timeout=300, check=False,
            env=BUFFERED,
        )  # fmt: skip
    assert done.returncode == 120
    assert b"No space left" in done.stderr
