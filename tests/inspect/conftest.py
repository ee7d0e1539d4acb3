"""Every test here begins and ends with nothing compiled, and leaves no handler or hook behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from torchloom.inspect.listen.collector import TraceTap


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    from torch._dynamo.callback import callback_handler
    from torch._dynamo.convert_frame import _bytecode_hooks

    torch._dynamo.reset()
    logger = logging.getLogger("torch.__trace")
    before = len(_bytecode_hooks)
    yield
    assert not any(isinstance(handler, TraceTap) for handler in logger.handlers)
    assert len(_bytecode_hooks) == before
    assert callback_handler.end_callbacks == []
    torch._dynamo.reset()
