"""Warnings of torch's C++ about a store that has gone, which torchloom tells in a sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchloom import envs

SCRIPT = """
import contextlib, sys, torch.distributed as dist
from torchloom._torch.distributed import hushed_store
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
first, second = (
    dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in "ab"
)
del server
for client, hush in ((first, hushed_store()), (second, contextlib.nullcontext())):
    print("hushed" if client is first else "open", file=sys.stderr, flush=True)
    with hush:
        try:
            client.check(["a"])
        except dist.DistError as error:
            print("raised", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_lost_store_prints_no_stack_within_the_block_alone(is_shown: bool) -> None:
    own = {"TORCH_CPP_LOG_LEVEL": "WARNING", "TORCHLOOM_TRACEBACK": "1" if is_shown else "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True, text=True, timeout=300, check=True, env=envs.child_environment(own),
    )  # fmt: skip
    hushed, _, opened = done.stderr.partition("open\n")
    assert hushed.count("\nraised\n") == opened.count("raised\n") == 1
    assert ("Exception raised from" in hushed) is is_shown
    assert "Exception raised from" in opened  # and again afterwards


def test_blocks_of_several_threads_may_end_in_any_order() -> None:
    from torchloom._torch import distributed as hush

    level = hush._level()
    assert level is not None
    before = level.value
    first, second = hush.hushed_store(), hush.hushed_store()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert level.value == 3
    second.__exit__(None, None, None)
    assert level.value == before
