"""The public surface: what is exported, what stays lazy, where private torch may be touched."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import torchloom

SOURCE = Path(torchloom.__file__).parent
EXPORTS = """
Engine GraphPass PassContext PassContract PassContractError TorchloomError all_reduce backends
bisect check_op clip_grad_norm_ compile compiler config custom_op diff entries events expect
explain explain_call initialize inspect jit just_in_time_compile leaf no_sync overhead
pad_tensors records register_compile_pass report save_model serve shard shard_model simulate
support_torch_compile validate_schedule watch
"""


def test_exports() -> None:
    assert sorted(torchloom.__all__) == EXPORTS.split()
    for name in torchloom.__all__:
        assert getattr(torchloom, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = torchloom.nothing


ROOMS = (
    "torchloom",
    "torchloom.config",
    "torchloom.cli",
    "torchloom.records",
    "torchloom._torch.table",
)


@pytest.mark.parametrize("module", ROOMS)
def test_opens_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_private_torch_is_touched_in_one_place() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: {name}"
        for path in SOURCE.rglob("*.py")
        if "_torch" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        for name in _torch_names(node)
        if re.search(r"\._(?!foreach|_)", f".{name}")
    ]
    assert found == []


def _torch_names(node: ast.AST) -> list[str]:
    """Return the names below torch that a node of code imports or reads."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Attribute):
        names = [ast.unparse(node)]
    else:
        return []
    return [name.removeprefix("torch.") for name in names if name.startswith("torch.")]


def test_names_in_messages_and_docs_exist() -> None:
    """An error that tells users to call what is not there helps nobody."""
    texts = [page.read_text() for page in (SOURCE.parent.parent / "docs").glob("*.md")]
    texts.append((SOURCE.parent.parent / "README.md").read_text())
    for file in SOURCE.rglob("*.py"):
        texts += [
            node.value
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        ]
    named = {name for text in texts for name in re.findall(r"\btorchloom(?:\.[A-Za-z]\w*)+", text)}
    assert len(named) > 40
    importlib.import_module("torchloom.ops.regions")  # registers them, with those of ops
    operators = {
        str(op).partition("(")[0].replace("::", ".") for op in torch._C._jit_get_all_schemas()
    }
    files = {"torchloom.lock", "torchloom.workspace"}  # parts of names of files and kernels
    files |= {"torchloom.forward", "torchloom.backward"}  # phases in traces of torch's profiler
    missing = {name for name in named - operators - files if _find(name) is None}
    assert not missing


def _find(name: str) -> object | None:
    """Return what a dotted name stands for."""
    for parts in range(name.count(".") + 1):
        module, *attributes = name.rsplit(".", parts)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # former names still lead somewhere
                found: object = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        for attribute in attributes:
            found = getattr(found, attribute, None)
        return found
    return None
