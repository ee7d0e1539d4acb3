"""Code on the pages: it compiles, its names exist, commands have their options, and programs run."""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import warnings
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from support import ranks
from support.pages import DOCS, ROOT, Block, blocks, codes, pages, prose
from support.pool import run_ranks
from torchloom.cli import command_names, make_app
from torchloom.config import check_config

SETUPS = Path(__file__).parent / "setups"
NOT_HERE = {"mlflow", "ray", "trl", "vllm", "wandb"}
"""Libraries that pages name and tests do not import."""
ELSEWHERE = {"README.md": 4, "docs/metrics.md": 5, "docs/ragged.md": 5}
"""Pages whose blocks tests/examples runs as one program, and how many they are."""
ALL = [block for page in pages() for block in blocks(page)]
PYTHON = [block for block in ALL if block.language == "python"]
COMMANDS = [block for block in ALL if block.language in ("sh", "")]


def test_every_block_says_what_tests_do_with_it() -> None:
    for block in PYTHON:
        page = str(block.page.relative_to(ROOT))
        if page in ELSEWHERE:
            assert sum(each.page == block.page for each in PYTHON) == ELSEWHERE[page]
        else:
            assert block.mark in ("program", "not run"), (
                f"{block.where}: add a mark (support.pages)"
            )


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.where)
def test_python_compiles_and_names_what_exists(block: Block) -> None:
    tree = ast.parse(block.text)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_here(alias.name):
                    importlib.import_module(alias.name)
                    root = alias.name if alias.asname else alias.name.partition(".")[0]
                    known[alias.asname or root] = importlib.import_module(root)
        elif isinstance(node, ast.ImportFrom) and node.module and _is_here(node.module):
            for alias in node.names:
                known[alias.asname or alias.name] = _member(node.module, alias.name)
    if "torchloom" not in known:
        known["torchloom"] = importlib.import_module("torchloom")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            _resolved(node, known)
        if isinstance(node, ast.Call):
            _check_keywords(node, known)


def _is_here(name: str) -> bool:
    root = name.partition(".")[0]
    if root in NOT_HERE:
        return False
    return find_spec(root) is not None or root not in ("transformers", "accelerate", "lightning")


def _member(module: str, name: str) -> Any:
    loaded = importlib.import_module(module)
    if not hasattr(loaded, name):
        return importlib.import_module(f"{module}.{name}")
    return getattr(loaded, name)


def _resolved(node: ast.AST, known: dict[str, Any]) -> Any:
    """Return what a dotted name of the block means, None where that is known at run time only."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = _resolved(node.value, known)
    if not isinstance(owner, (ModuleType, type)):
        return None
    if isinstance(owner, ModuleType) and not hasattr(owner, node.attr):
        return importlib.import_module(f"{owner.__name__}.{node.attr}")
    return getattr(owner, node.attr)


def _check_keywords(node: ast.Call, known: dict[str, Any]) -> None:
    """Check that a function that the block imports takes the keywords that it is called with."""
    function = _resolved(node.func, known)
    if function is None or not getattr(function, "__module__", "").startswith("torchloom"):
        return
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return
    for keyword in node.keywords:
        if keyword.arg is not None:
            assert keyword.arg in {each.name for each in parameters}, ast.unparse(node)


def test_names_in_the_text_exist() -> None:
    for page in pages():
        for code in codes(prose(page)):
            match = re.match(r"torchloom(\.[A-Za-z_]\w*)+", code)
            if match and not code.startswith(("torchloom.gather", "torchloom.resident")):
                _import(match[0], f"{page.name}: {code}")


def _import(name: str, where: str) -> Any:
    found: Any = importlib.import_module("torchloom")
    for part in name.split(".")[1:]:
        if not hasattr(found, part) and isinstance(found, ModuleType):
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{found.__name__}.{part}")
        assert hasattr(found, part), where
        found = getattr(found, part)
    return found


def test_what_deepspeed_has_too_is_there() -> None:
    import torchloom

    made = set(re.findall(r"self\.(\w+)", inspect.getsource(torchloom.Engine.__init__)))
    rows = re.findall(
        r"^\| (.+?) \| the same", (DOCS / "migrating/deepspeed.md").read_text(), re.MULTILINE
    )
    names = [re.match(r"(?:engine\.)?(\w+)", code) for row in rows for code in codes(f"{row}")]
    told = {match[1] for match in names if match} - {"engine"}
    assert len(told) > 20
    for name in told:
        assert hasattr(torchloom.Engine, name) or name in made or hasattr(torchloom, name), name


def commands() -> list[tuple[str, str]]:
    """Return the command lines of the pages, and where they stand."""
    found = []
    for block in COMMANDS:
        text = re.sub(r"\\\n\s*", " ", block.text)
        found += [
            (block.where, line) for line in text.splitlines() if line.startswith("torchloom ")
        ]
    for page in pages():
        found += [
            (page.name, code) for code in codes(prose(page)) if re.match(r"torchloom [a-z]", code)
        ]
    return found


def test_commands_have_their_options() -> None:
    lines = [
        (where, each)
        for where, line in commands()
        for each in re.split(r"; (?=torchloom)", line.split("#")[0])
    ]
    assert len(lines) > 50
    for where, line in lines:
        words = shlex.split(re.split(r"  +[A-Za-z]|; ", line)[0])
        if len(words) < 2 or not words[1].islower():
            continue
        assert words[1] in command_names(), f"{where}: {line}"
        command = typer.main.get_command(make_app(words[1])).commands[words[1]]  # type: ignore[attr-defined]
        if hasattr(command, "commands") and len(words) > 2:
            assert words[2] in command.commands, f"{where}: {line}"
            command = command.commands[words[2]]
        options = {name for each in command.params for name in [*each.opts, *each.secondary_opts]}
        for word in words[2:]:
            if word.startswith("-") and word != "--":
                assert word.partition("=")[0] in {*options, "--help"}, f"{where}: {line}"


@pytest.mark.parametrize(
    "block", [each for each in ALL if each.language == "json"], ids=lambda block: block.where
)
def test_configurations_are_accepted(block: Block) -> None:
    text = block.text.strip()
    tree = json.loads(text if text.startswith("{") else f"{{{text}}}")
    tree = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4, **tree}
    checked = check_config(tree, world_size=8)
    assert not checked.errors
    assert not [
        n for n in checked.notes if n.level == "warning" and "has no value" not in n.message
    ]


PROGRAMS: dict[tuple[Path, str], list[Block]] = defaultdict(list)
for _block in PYTHON:
    if _block.mark == "program":
        PROGRAMS[_block.page, _block.value.partition(";")[0]].append(_block)


def program(parts: list[Block]) -> str:
    """Return the text of a program, with quick compilers."""
    setup = parts[0].option("with")
    text = "\n".join(block.text for block in parts)
    text = re.sub(r"engine\.compile\((?=\))", 'engine.compile("aot_eager"', text)
    text = text.replace('engine.compile(backend="inductor"', 'engine.compile(backend="aot_eager"')
    text = re.sub(
        r"torchloom\.compile\(model", 'torchloom.compile(model, backend="aot_eager"', text
    )
    text = re.sub(r"support_torch_compile\(", 'support_torch_compile(backend="eager", ', text)
    text = re.sub(r"(?<=build\()model(?:\.eval\(\))?, contract", '\\g<0>, backend="eager"', text)
    config = '"zero_optimization": {"stage": 3}, "compile": {"backend": "aot_eager"}'
    text = text.replace('{"zero_optimization": {"stage": 3}}', f"{{{config}}}")
    text = re.sub(r"(Strategy)\(\)", f"\\1({{{config}}})", text)
    text = re.sub(r"(Accelerator)\(cpu", f"\\1(torchloom={{{config}}}, cpu", text)
    before = (SETUPS / f"{setup.replace(' ', '_')}.py").read_text() if setup else ""
    return f"{before}\n{text}"


@pytest.mark.parametrize("key", PROGRAMS, ids=lambda key: f"{key[0].relative_to(ROOT)}-{key[1]}")
def test_programs_run(key: tuple[Path, str], tmp_path, monkeypatch) -> None:
    page, _ = key
    parts = PROGRAMS[key]
    text = program(parts)
    for name in ("transformers", "accelerate", "lightning"):
        if re.search(rf"^(?:from|import) (?:torchloom\.integrations\.)?{name}", text, re.MULTILINE):
            pytest.importorskip(name)
    (tmp_path / "program.py").write_text(text)
    for block in blocks(page):
        if block.mark == "file":
            (tmp_path / block.value).write_text(_quick(block.text))
    num = int(parts[0].option("ranks", "1"))
    on = run_ranks if num == 2 else ranks.run_ranks
    on(num, run_program, tmp_path)


def _quick(text: str) -> str:
    tree = json.loads(text)
    tree["compile"] = {**tree.get("compile", {}), "backend": "aot_eager"}
    return json.dumps(tree)


def run_program(rank: int, folder: Path) -> None:
    """Run the program in a folder, as one of its ranks."""
    os.chdir(folder)
    alone: Any = contextlib.nullcontext()
    text = (folder / "program.py").read_text()
    if "accelerate" in text or "transformers" in text:
        from support.frameworks import accelerate_alone

        alone = accelerate_alone()
    with warnings.catch_warnings(), alone:
        warnings.simplefilter("ignore")
        runpy.run_path(str(folder / "program.py"), {"print": _say(rank), "__builtins__": builtins})


def _say(rank: int) -> Any:
    return print if rank == 0 else lambda *args, **kwargs: None
