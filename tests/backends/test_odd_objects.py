"""Backends that are objects of a program: nothing that they answer, or raise, stops the registry."""

from __future__ import annotations

import pytest
import torch

from torchloom.backends import (
    describe_backends,
    list_backends,
    lookup_backend,
    register_backend,
    temporary_backend,
    unregister_backend,
)
from torchloom.errors import BackendConflictError, UnnamedBackendError


class Odd:
    """Answers no attribute but by an error of its own."""

    def __call__(self, gm, example_inputs):
        return gm.forward

    def __getattr__(self, name: str):
        raise RuntimeError(f"no {name}")


def test_an_object_whose_attributes_raise_anything() -> None:
    odd = Odd()
    with pytest.raises(UnnamedBackendError):
        register_backend(odd)
    assert register_backend(odd, name="odd_object") is odd
    try:
        assert lookup_backend("odd_object") is odd
        assert "odd_object" in list_backends()
        assert any(each.name == "odd_object" for each in describe_backends())
        compiled = torch.compile(lambda x: x + 1, backend="odd_object")
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
        with pytest.raises(BackendConflictError):
            register_backend(print, name="odd_object")
    finally:
        unregister_backend("odd_object")
    with temporary_backend(odd, "odd_object") as name:
        assert lookup_backend(name) is odd
