"""Print the source in numbers: sizes, documentation, error handling, shared state, rooms.

    python tools/house.py [FOLDER ...]        (default: src/torchloom)
    python tools/house.py --first-lines       what each module says of itself

The numbers gate nothing: they show where the source drifts. A room is a folder or a module at the top of FOLDER.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

_BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LONG_FILE_LINES = 300
_MANY_ARGUMENTS = 3

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


class Source(NamedTuple):
    """One parsed file."""

    name: str
    """Its path below the measured folder."""
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The top folder, or the module, that it belongs to."""
        return self.name.partition("/")[0].removesuffix(".py")

    @property
    def lines(self) -> list[str]:
        """Its lines, without line ends."""
        return self.text.splitlines()


def read(folder: Path) -> list[Source]:
    """Parse every Python file below a folder."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    return [
        Source(path.relative_to(folder).as_posix(), text, ast.parse(text))
        for path, text in texts.items()
    ]


def sizes(sources: Sequence[Source]) -> dict[str, object]:
    """Return lines, files, functions, nesting and classes."""
    lengths = [(each.end_lineno or 0) - each.lineno + 1 for each in _functions(sources)] or [0]
    p90 = statistics.quantiles(lengths, n=10)[-1] if len(lengths) > 1 else lengths[0]
    counts = sorted(((len(each.lines), each.name) for each in sources), reverse=True)
    long = [f"{name} {count}" for count, name in counts if count > _LONG_FILE_LINES]
    return {
        "lines / files": f"{sum(count for count, _ in counts)} / {len(counts)}",
        "function lines, median / p90 / max": (
            f"{statistics.median(lengths):.0f} / {p90:.0f} / {max(lengths)}"
        ),
        "deepest nesting": max(map(_depth, _functions(sources)), default=0),
        "classes": sum(1 for _ in _classes(sources)),
        f"files over {_LONG_FILE_LINES} lines": ", ".join(long) or "none",
    }


def documentation(sources: Sequence[Source]) -> dict[str, object]:
    """Return annotations, comments and docstrings, and public functions that leave out a section."""
    functions = list(_functions(sources))
    public = [each for each in functions if not each.name.startswith("_")]
    raising = [each for each in public if _raises(each)]
    wide = [each for each in public if len(_arguments(each)) >= _MANY_ARGUMENTS]
    code = sum(bool(line.strip()) and line.strip()[0] != "#" for s in sources for line in s.lines)
    return {
        "annotated": f"{sum(map(_is_annotated, functions)) / max(1, len(functions)):.0%}",
        "comments per 100 lines of code": f"{100 * sum(map(_num_comments, sources)) / code:.1f}",
        "docstring lines per 100": f"{100 * sum(map(_num_doc_lines, sources)) / code:.0f}",
        "public, raise, no Raises": f"{_lacking(raising, 'Raises:')} of {len(raising)}",
        "public, 3+ arguments, no Args": f"{_lacking(wide, 'Args:')} of {len(wide)}",
    }


def handling(sources: Sequence[Source]) -> dict[str, object]:
    """Return broad excepts, and those that give no reason in their line beside the lint exception."""
    broad = [
        source.lines[node.lineno - 1]
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and _is_broad(node)
    ]
    reasons = [line.partition("#")[2].replace("noqa: BLE001", "").strip(" #-") for line in broad]
    return {"broad except / without a reason": f"{len(broad)} / {reasons.count('')}"}


def state(sources: Sequence[Source]) -> dict[str, object]:
    """Return what more than one place can change or knows: globals, contexts, sessions, private torch."""
    nodes = [node for source in sources for node in ast.walk(source.tree)]
    contexts = [each for _, each in _classes(sources) if each.name == "PassContext"]
    fields = [n for each in contexts for n in each.body if isinstance(n, ast.AnnAssign)]
    return {
        "global statements": sum(isinstance(node, ast.Global) for node in nodes),
        "fields of PassContext": len(fields),
        "session attributes set from outside": sum(map(_num_session_writes, sources)),
        "files that import private torch": sum(map(_is_private, sources)),
    }


def rooms(sources: Sequence[Source]) -> dict[str, object]:
    """Return lines and classes of each room, and class names that stand in more than one."""
    lines: Counter[str] = Counter()
    for source in sources:
        lines[source.room] += len(source.lines)
    owners: defaultdict[str, set[str]] = defaultdict(set)
    num_classes: Counter[str] = Counter()
    for source, each in _classes(sources):
        num_classes[source.room] += 1
        owners[each.name].add(source.room)
    shared = {name: sorted(found) for name, found in owners.items() if len(found) > 1}
    return {
        "lines per room": ", ".join(f"{room} {count}" for room, count in lines.most_common()),
        "classes per room": ", ".join(f"{r} {count}" for r, count in num_classes.most_common()),
        "class names in two rooms": (
            ", ".join(f"{name} ({' '.join(found)})" for name, found in sorted(shared.items()))
            or "none"
        ),
    }


def measure(folder: Path) -> dict[str, object]:
    """Return every figure of a folder by its name."""
    sources = read(folder)
    parts = (sizes, documentation, handling, state, rooms)
    return {name: figure for part in parts for name, figure in part(sources).items()}


def main(arguments: Sequence[str]) -> None:
    """Print the figures of each folder, or the first line of each module."""
    if arguments[:1] == ["--first-lines"]:
        root = Path("src/torchloom")
        for path in sorted(root.rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            print(f"{path.relative_to(root)}: {text.partition(chr(10))[0]}")
        return
    for folder in arguments or ["src/torchloom"]:
        print(folder)
        for name, figure in measure(Path(folder)).items():
            print(f"  {name:36} {figure}")


def _functions(sources: Sequence[Source]) -> Iterator[Function]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node


def _classes(sources: Sequence[Source]) -> Iterator[tuple[Source, ast.ClassDef]]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                yield source, node


def _depth(node: ast.AST) -> int:
    """Return how deep blocks lie in blocks inside of one function; a chain of elif counts once."""
    best = 0
    for name, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        is_elif = isinstance(node, ast.If) and name == "orelse" and len(children) == 1
        for child in children:
            if isinstance(child, ast.AST) and not isinstance(child, _SCOPES):
                is_chained = is_elif and isinstance(child, ast.If)
                best = max(best, _depth(child) + (isinstance(child, _BLOCKS) and not is_chained))
    return best


def _arguments(function: Function) -> list[ast.arg]:
    given = function.args
    every = (*given.posonlyargs, *given.args, *given.kwonlyargs)
    return [each for each in every if each.arg not in ("self", "cls")]


def _is_annotated(function: Function) -> bool:
    has_return = function.returns is not None or function.name == "__init__"
    return has_return and all(each.annotation for each in _arguments(function))


def _raises(function: Function) -> bool:
    return any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(function))


def _lacking(functions: Sequence[Function], section: str) -> int:
    return sum(section not in (ast.get_docstring(each) or "") for each in functions)


def _num_comments(source: Source) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def _num_doc_lines(source: Source) -> int:
    owners = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    documented = [
        n for n in ast.walk(source.tree) if isinstance(n, owners) and ast.get_docstring(n)
    ]
    texts = [node.body[0] for node in documented]
    return sum((text.end_lineno or 0) - text.lineno + 1 for text in texts)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return ast.unparse(handler.type) in ("Exception", "BaseException")


def _num_session_writes(source: Source) -> int:
    """Count assignments to attributes of what is called session, in files that mean no record by it."""
    if re.search(r"^from torchloom\.records.* import .*\bSession\b", source.text, re.MULTILINE):
        return 0
    if source.room == "records":
        return 0
    own = {
        id(node)
        for _, each in _classes([source])
        if each.name == "CompileSession"
        for node in ast.walk(each)
    }
    return sum(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and id(node) not in own
        and f".{ast.unparse(node.value)}".endswith(".session")
        for node in ast.walk(source.tree)
    )


def _is_private(source: Source) -> bool:
    imports = [line for line in source.lines if line.lstrip().startswith(("import ", "from "))]
    return any("torch._" in line for line in imports)


if __name__ == "__main__":
    main(sys.argv[1:])
