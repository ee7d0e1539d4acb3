"""What `explain_call` foretells beside what torch then does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchloom
from torchloom._torch import compiling


def needs_option(name: str) -> pytest.MarkDecorator:
    """Skip a test where `torch.compile` does not take an option yet."""
    known = name in inspect.signature(torch.compile).parameters
    return pytest.mark.skipif(not known, reason=f"this torch's compile has no {name}")


def what_happens(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
    """Call, and return what torch did: by its own attempts to compile, and the entries that came of it."""
    from torch._dynamo import convert_frame

    attempts: list[bool] = []
    real = convert_frame._compile

    def spy(*given: Any, **rest: Any) -> Any:
        attempts.append(True)
        return real(*given, **rest)

    looked: list[bool] = []
    hook = compiling.AfterLookup(looked.append)
    convert_frame._compile = spy
    hook.install()
    try:
        fn(*args, **kwargs)
    except Exception:  # noqa: BLE001  torch's own, or the program's
        return "error"
    finally:
        hook.remove()
        convert_frame._compile = real
    if attempts:
        return "recompile" if looked and not looked[0] else "compile"
    return "hit" if looked and all(looked) else "eager"


def agree(fn: Any, /, *args: Any, **kwargs: Any) -> str:
    """Foretell a call, make it, and return what both say."""
    told = torchloom.explain_call(fn, *args, **kwargs)
    again = torchloom.explain_call(fn, *args, **kwargs)
    assert told == again  # asking changes nothing
    seen = what_happens(fn, *args, **kwargs)
    assert seen == told.action, f"told: {told}; torch: {seen}"
    return told.action
