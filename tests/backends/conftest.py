"""What the tests of the registry share."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from torchloom.backends import claims, registry


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Leave the registry as it was found, whatever a test registered."""
    before = set(claims.REGISTERED)
    yield
    for name in set(claims.REGISTERED) - before:
        registry.unregister_backend(name)
    torch._dynamo.reset()


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch) -> Iterator[Callable[..., None]]:
    """Install distributions that announce backends, each in a folder of the import path."""
    from torch._dynamo.backends import registry as torchs

    torchs._lazy_import()
    names: list[str] = []

    def install(dist: str, name: str, value: str, source: str = "") -> None:
        folder = tmp_path / dist
        info = folder / f"{dist}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{name} = {value}\n")
        (folder / f"{dist}.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        names.append(name)

    yield install
    for dist in list(sys.modules):
        if (tmp_path / dist).is_dir():
            del sys.modules[dist]
    for name in names:
        found = torchs._COMPILER_FNS.get(name)
        if found is not None and getattr(found, "__module__", "").split(".")[0] != "torch":
            torchs._COMPILER_FNS.pop(name)
            torchs._BACKENDS.pop(name, None)
