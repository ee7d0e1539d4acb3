"""A process that serves a model one way and answers questions about it: see serve.py."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from _model import Block, Shape, angles_of

_TOKENS = 16
_LARGEST = 64
_SECONDS = 0.25
"""Of calls behind a timing."""

Call = Callable[[Tensor], Tensor]


class Served(nn.Module):
    """The benchmark's decoder from ids to logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        angles = angles_of(_TOKENS, shape.dim // shape.num_heads)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x[:, -1]))


class Small(nn.Module):
    """Much to check and little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(40))

    def forward(self, ids: Tensor) -> Tensor:
        x = ids
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Way:
    """One way to serve."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.num_announced = 0
        """Programs that torchloom said it made, before any call."""

    def make(self, model: nn.Module, example: Tensor, what: str) -> Call:
        """Return what calls go through, compiled for the example's size at least."""
        return getattr(self, f"_{self.name}")(model, example, what)

    def _default(self, model: nn.Module, example: Tensor, _what: str) -> Call:
        return self._called(torch.compile(model), example)

    def _dynamic(self, model: nn.Module, example: Tensor, _what: str) -> Call:
        return self._called(torch.compile(model, dynamic=True), example)

    def _exact(self, model: nn.Module, example: Tensor, _what: str) -> Call:
        return self._called(torch.compile(model, dynamic=False), example)

    def _mark_dynamic(self, model: nn.Module, example: Tensor, _what: str) -> Call:
        torch._dynamo.mark_dynamic(example, 0)
        return self._called(torch.compile(model), example)

    def _mark_unbacked(self, model: nn.Module, example: Tensor, _what: str) -> Call:
        torch._dynamo.decorators.mark_unbacked(example, 0)
        return self._called(torch.compile(model), example)

    def _aot_compile(self, model: nn.Module, example: Tensor, what: str) -> Call:
        path = self.folder / f"{what}.aot"
        if path.exists():
            with path.open("rb") as file:
                program = torch.compiler.load_compiled_function(file)
        else:
            torch._dynamo.decorators.mark_unbacked(example, 0, min=1, max=_LARGEST)
            program = torch.compile(model.forward, fullgraph=True).aot_compile(((example,), {}))
            program.save_compiled_function(str(path))

        def call(x: Tensor) -> Tensor:
            return program(model, x)

        return self._called(call, example)

    def _torchloom(self, model: nn.Module, example: Tensor, what: str) -> Call:
        from torchloom.serve import Contract, Dim, build, tensor

        batch = Dim("batch", 1, _LARGEST)
        spec = tensor(batch, *example.shape[1:], dtype=example.dtype, below=64)
        contract = Contract({"ids": spec})
        store = self.folder / f"store-{what}"
        program = build(model, contract, shapes="split", store=store)
        self.num_announced = len(program.variants)
        return self._called(program, example)

    def _called(self, call: Call, example: Tensor) -> Call:
        call(example)
        return call


class Worker:
    """Answers questions."""

    def __init__(self, name: str, folder: Path, num_layers: int) -> None:
        self.name = name
        self.way = Way(name, folder)
        self.num_layers = num_layers
        self.model: nn.Module
        self.call: Call
        self.small_calls: tuple[Callable[[], Any], Callable[[], Any]]

    def start(self) -> float:
        """Make the model; return the seconds until its first result, without making it."""
        torch.manual_seed(0)
        self.model = Served(Shape(num_layers=self.num_layers)).eval()
        example = self._ids(_LARGEST)
        started = time.perf_counter()
        self.call = self.way.make(self.model, example, "model")
        return time.perf_counter() - started

    def sweep(self) -> dict[str, int]:
        """Call every batch size in random order; return compiles and wrong results."""
        wrong = 0
        order = list(range(1, _LARGEST + 1))
        random.Random(1).shuffle(order)
        for batch in order:
            ids = self._ids(batch)
            wanted = self.model(ids)
            try:
                found = self.call(ids)
                good = found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-3)
            except Exception as error:  # noqa: BLE001 - it counts as wrong
                print(f"batch {batch}: {error}", file=sys.stderr)
                good = False
            wrong += not good
        announced = self.way.num_announced
        return {"compiles": self._compiles(), "wrong": wrong, "announced": announced}

    def time(self, batch: int) -> float:
        """Return the seconds of a call."""
        ids = self._ids(batch)
        self.call(ids)
        return _timed(lambda: self.call(ids))

    def small(self) -> None:
        """Make the model that is nearly all overhead."""
        torch.manual_seed(0)
        model = Small().eval()
        example = torch.randn(_LARGEST, 8)
        call = self.way.make(model, example, "small")
        x = torch.randn(8, 8)
        call(x)
        self.small_calls = (lambda: call(x)), _kernels_of(call, x)

    def time_small(self) -> tuple[float, float]:
        """Return the seconds of a call of it, and of the compiled graph alone."""
        whole, kernels = self.small_calls
        return _timed(whole, time.process_time), _timed(kernels, time.process_time)

    def _compiles(self) -> int:
        if self.name == "torchloom":
            from torchloom.serve import counter

            return counter.num_compiles
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) or 1

    def _ids(self, batch: int) -> Tensor:
        draw = torch.Generator().manual_seed(batch)
        return torch.randint(0, 64, (batch, _TOKENS), generator=draw)


def _kernels_of(call: Call, x: Tensor) -> Callable[[], Any]:
    """Return the generated code of the compiled graphs with the arguments that a call gives it."""
    seen: list[tuple[Any, list[Any]]] = []

    def watch(frame: FrameType, event: str, _value: object) -> None:
        runner = frame.f_locals.get("self") if event == "call" else None
        if frame.f_code.co_name == "call" and type(runner).__name__ == "Runner":
            seen.append((runner.call, list(frame.f_locals["args"])))

    sys.setprofile(watch)
    try:
        call(x)
    finally:
        sys.setprofile(None)
    assert seen, "no compiled graph ran"
    return lambda: [function(list(inputs)) for function, inputs in seen]


def _timed(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    call()
    once = clock() - started
    number = max(1, min(2000, int(_SECONDS / max(once, 1e-7))))
    started = clock()
    for _ in range(number):
        call()
    return (clock() - started) / number


def main() -> None:
    """Answer until there are no more questions."""
    name, folder, num_layers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    worker = Worker(name, folder, num_layers)
    answers = sys.stdout
    sys.stdout = sys.stderr
    with torch.no_grad():
        for line in sys.stdin:
            question = json.loads(line)
            method = getattr(worker, question.pop("do").replace(" ", "_"))
            print(json.dumps(method(**question)), file=answers, flush=True)


if __name__ == "__main__":
    main()
