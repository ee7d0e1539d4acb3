"""What an older Dynamo cannot trace is refused when it is built; tests that need it are for newer ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.torch_version import TorchVersion

from torchloom.errors import ServeError

IS_OLD = TorchVersion(torch.__version__) < "2.13"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    try:
        return (yield)
    except ServeError as error:
        if IS_OLD and "cannot be compiled for" in str(error):
            pytest.skip(f"torch {torch.__version__} does not trace it")
        raise
