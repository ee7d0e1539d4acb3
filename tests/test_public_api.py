"""The public surface: what is exported, what stays lazy, where private torch may be touched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchloom

SOURCE = Path(torchloom.__file__).parent


def test_exports() -> None:
    assert sorted(torchloom.__all__) == [
        "Engine",
        "GraphPass",
        "PassContext",
        "TorchloomError",
        "clip_grad_norm_",
        "compile",
        "config",
        "initialize",
        "shard",
        "shard_model",
    ]
    for name in torchloom.__all__:
        assert getattr(torchloom, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = torchloom.nothing


@pytest.mark.parametrize("module", ["torchloom", "torchloom.config", "torchloom.cli"])
def test_opens_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_private_torch_is_touched_in_one_place() -> None:
    private = re.compile(r"(?:import|from)\s+torch(?:\.\w+)*\._|torch\._(?!foreach)\w+\.")
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in SOURCE.rglob("*.py")
        if path.name != "_torch.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert found == []
