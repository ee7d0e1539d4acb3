"""Code for a GPU, made and read where there is none: kernels to machine code, and the order of what the wrapper does."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchloom import envs
from torchloom._torch import no_driver
from torchloom.errors import PlanError
from torchloom.pieces.wrapper import load_wrapper
from torchloom.pipeline.report import GraphReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """What Inductor wrote for a device, and what became of it."""

    kernels: Mapping[str, int]
    """Bytes of machine code by kernel, of all configurations that Inductor would try."""
    refused: Mapping[str, str]
    """Why a kernel does not compile."""
    code_peak_bytes: int | None
    """What forward and backward allocate at most, replayed from the code; None: it cannot be replayed."""
    graph_peak_bytes: int
    """The same, by the graphs that the code was made of."""
    order: tuple[str, ...]
    """Starts, waits, products, calls and frees as the code has them."""

    def text(self) -> str:
        """Return it in lines for a terminal."""
        replayed = "not replayed" if self.code_peak_bytes is None else f"{self.code_peak_bytes:,}"
        total = len(self.kernels) + len(self.refused)
        lines = [
            f"  code       {len(self.kernels)} of {total} Triton kernels compile, {sum(self.kernels.values()):,} bytes",
            *(f"    {name}: {why}" for name, why in self.refused.items()),
            f"  allocates  {replayed} bytes at most by its code, {self.graph_peak_bytes:,} by its graphs",
            *(f"    {line}" for line in self.order),
        ]
        return "\n".join(lines)


def run_prepared(device: str) -> int | None:
    """Run this command again in a process where CUDA tensors without data can be traced.

    Args:
        device: a row of the cost tables.

    Returns:
        The exit code of that process; None where this one is it.

    Raises:
        PlanError: code for the device cannot be compiled here.
    """
    reason = no_driver.why_not_lowered(device)
    if reason:
        raise PlanError(f"--lower: {reason}")
    if no_driver.has_stub():
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = no_driver.build_stub(Path(folder))
        env = envs.child_environment({"LD_PRELOAD": str(library), "CUDA_VISIBLE_DEVICES": ""})
        command = [sys.executable, "-m", "torchloom", *sys.argv[1:]]
        return subprocess.run(command, env=env, check=False).returncode


def prepare(device: str, capacity_bytes: int) -> None:
    """Answer for a device in this process from now on.

    Raises:
        PlanError: the process was not started by `torchloom plan simulate --lower`.
    """
    if not no_driver.has_stub():
        raise PlanError("lowers=True works only below `torchloom plan simulate --lower`")
    no_driver.answer_for(device, capacity_bytes, _without_data)


def _without_data(source: str) -> Callable[..., Any]:
    run = load_wrapper(source, lambda *_: None)
    if run is None:
        raise PlanError("--lower: Inductor wrote code of a form that cannot be run without data")
    return run


def lowered(graphs: Sequence[GraphReport], graph_peak_bytes: int) -> Lowered | None:
    """Compile the kernels that Inductor wrote for graphs and read the order of what the code does.

    Args:
        graphs: with a backward.
        graph_peak_bytes: the highest of their peaks.

    Returns:
        None where Inductor wrote nothing.
    """
    compiled: dict[str, int] = {}
    refused: dict[str, str] = {}
    order: list[str] = []
    for half, source in (each for graph in graphs for each in graph.code.items()):
        tree = ast.parse(source)
        order += [f"{half}:", *(f"  {line}" for line in order_of(tree))]
        for name, kernel in _kernels_in(tree):
            num_bytes, why = no_driver.machine_code(name, kernel)
            if why:
                refused[f"{half} {name}"] = why
            else:
                compiled[f"{half} {name}"] = num_bytes
    if not order:
        return None
    peaks = [each.code_peak_bytes for each in graphs if each.code_peak_bytes is not None]
    return Lowered(
        kernels=compiled,
        refused=refused,
        code_peak_bytes=max(peaks) if len(peaks) == len(graphs) else None,
        graph_peak_bytes=graph_peak_bytes,
        order=tuple(order),
    )


def _kernels_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
            name, source = (ast.literal_eval(each) for each in node.args[:2])
            yield name, source


def order_of(tree: ast.Module) -> list[str]:
    """Return what a wrapper does, in order, and what each of its bodies does.

    Args:
        tree: of the module that Inductor wrote.

    Example:
        >>> order_of(ast.parse("def call(args):\\n    extern_kernels.mm(a, b, out=c)"))
        ['run mm']
    """
    functions = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    bodies = [name for name in functions if name.startswith("body_")]
    names = {name: f"body {number}" for number, name in enumerate(bodies, start=1)}
    segments = {name: each for name, each in functions.items() if name.startswith("segment_")}
    lines = _Reading(names, segments).lines(functions["call"])
    for body in bodies:
        lines.append(f"{names[body]}:")
        lines += [f"  {line}" for line in _Reading(names, segments).lines(functions[body])]
    return lines


class _Reading:
    """Reads the statements of one function of a wrapper.

    Args:
        bodies: what functions of bodies are called.
        segments: functions of calls and transfers alone (`capture.segments`), read where they are called.
    """

    def __init__(self, bodies: Mapping[str, str], segments: Mapping[str, ast.FunctionDef]) -> None:
        self._bodies, self._segments = bodies, segments
        self._labels: dict[str, str] = {}
        """What transfers made, by the variables that hold it."""
        self._lists: dict[str, list[str | None]] = {}
        """The same for lists: results of transfers, and what segments are given and return."""
        self._handed: set[str] = set()
        """Variables that a segment is given, which lets go of them."""

    def lines(self, function: ast.FunctionDef) -> list[str]:
        """Return a line for each step, with equal kinds of steps in one."""
        steps = [step for each in _statements(function) for step in self._steps(each)]
        found = []
        for verb, group in itertools.groupby(steps, key=lambda step: step[0]):
            whats = [what for _, what in group]
            if verb == "run":
                found.append(f"run {', '.join(_counted(whats))}")
            elif verb == "free":
                found.append(f"free {_brief(whats)}")
            else:
                found += [f"{verb} {what}" for what in whats]
        return found

    def _steps(self, statement: ast.stmt) -> Iterator[tuple[str, str]]:
        if isinstance(statement, ast.Delete):
            for target in statement.targets:
                yield from self._free(ast.unparse(target))
            return
        if not isinstance(statement, ast.Assign | ast.Expr) or statement.value is None:
            return
        value = statement.value
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        made = "" if target is None else ast.unparse(target)
        if isinstance(value, ast.Constant) and value.value is None:
            yield from self._free(made)
        elif isinstance(value, ast.List):
            names = [ast.unparse(each) for each in value.elts]
            self._lists[made] = [self._labels.get(name) for name in names]
            if made.removesuffix("_args") in self._segments:
                self._handed.update(names)
        elif isinstance(value, ast.Subscript) and ast.unparse(value.value) in self._lists:
            self._label(made, self._lists[ast.unparse(value.value)][int(ast.unparse(value.slice))])
        elif isinstance(target, ast.Tuple) and ast.unparse(value) in self._lists:
            for name, label in zip(target.elts, self._lists[ast.unparse(value)], strict=True):
                self._label(ast.unparse(name), label)
        elif isinstance(value, ast.Call):
            yield from self._call(made, ast.unparse(value.func).split("."), value.args)

    def _label(self, name: str, label: str | None) -> None:
        if label is not None:
            self._labels[name] = label

    def _free(self, name: str) -> Iterator[tuple[str, str]]:
        label = self._labels.pop(name, None)
        if label is not None and name not in self._handed:
            yield "free", label

    def _segment(self, made: str, name: str, given: ast.expr) -> Iterator[tuple[str, str]]:
        inner = _Reading(self._bodies, self._segments)
        inner._lists["args"] = self._lists[ast.unparse(given)]
        for statement in self._segments[name].body:
            yield from inner._steps(statement)
            if isinstance(statement, ast.Return) and isinstance(statement.value, ast.List):
                returned = [ast.unparse(each) for each in statement.value.elts]
                self._lists[made] = [inner._labels.get(each) for each in returned]

    def _call(self, made: str, path: list[str], args: list[ast.expr]) -> Iterator[tuple[str, str]]:
        name = path[-2] if path[-1] in ("default", "Tensor", "run") else path[-1]
        if path[:3] == ["torch", "ops", "torchloom"]:
            if name == "wait_":
                yield "wait", self._of(args[0])
            elif name.endswith("_start"):
                kind = name.removesuffix("_start")
                named = kind in ("gather", "reduce", "sync")
                whats = (
                    ast.literal_eval(args[1])
                    if named
                    else [ast.unparse(each) for each in getattr(args[0], "elts", args[:1])]
                )
                started = [f"{kind} {what}" for what in whats]
                self._lists[made] = [*started]
                yield "start", _brief(started)
            else:
                yield "run", name
        elif path[-1] == "run" and path[0].startswith("triton"):
            yield "run", "kernel"
        elif path[0] in ("extern_kernels", "torch") and path[:2] != ["torch", "cuda"]:
            yield "run", name.lstrip("_")
        elif path[0] in self._bodies:
            yield "call", self._bodies[path[0]]
        elif path[0] in self._segments:
            yield from self._segment(made, path[0], args[0])

    def _of(self, waited: ast.expr) -> str:
        names = [ast.unparse(each) for each in getattr(waited, "elts", [waited])]
        return _brief([self._labels.get(name, "a value of the other half") for name in names])


def _statements(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    for statement in function.body:
        if isinstance(statement, ast.With):
            yield from statement.body
        else:
            yield statement


def _brief(whats: Sequence[str]) -> str:
    return whats[0] if len(whats) == 1 else f"{whats[0]} and {len(whats) - 1} more"


def _counted(whats: Sequence[str]) -> Iterator[str]:
    for what, group in itertools.groupby(whats):
        count = len(list(group))
        yield what if count == 1 else f"{count} {what}"
