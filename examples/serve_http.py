"""An HTTP server with continuous batching: requests join and leave the batch at every step.

    pip install starlette uvicorn
    python examples/serve_http.py --port 8000
    curl -N localhost:8000/generate -d '{"prompt": "Once upon", "max_bytes": 32}'

Each step decodes all active sequences in one call; one program serves every batch size. `/stats` shows how many
steps of which sizes were made, and that nothing was compiled.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from serve_generate import Engine, make_model
from torchloom.serve import counter


@dataclass
class Sequence:
    """A request that is under way."""

    prompt: bytes
    left: int
    out: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    """Bytes as they come, None after the last."""
    slot: int = -1
    last: int = 0
    position: int = 0


class Batcher:
    """Runs the engine: one prefill or one decode step at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.waiting: asyncio.Queue[Sequence] = asyncio.Queue()
        self.running: list[Sequence] = []
        self.free = list(range(engine.sizes.num_slots))
        self.steps: Counter[int] = Counter()
        self.compiles_before = counter.num_compiles

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            if not self.running:
                await self._join(await self.waiting.get())
            while self.free and not self.waiting.empty():
                await self._join(self.waiting.get_nowait())
            await self._step()

    async def _join(self, sequence: Sequence) -> None:
        sequence.slot = self.free.pop()
        sequence.position = len(sequence.prompt)
        sequence.last = await asyncio.to_thread(self.engine.prefill, sequence.prompt, sequence.slot)
        self.running.append(sequence)
        self._give(sequence)

    async def _step(self) -> None:
        if not self.running:
            return
        batch = list(self.running)
        self.steps[len(batch)] += 1
        found = await asyncio.to_thread(
            self.engine.decode,
            [each.last for each in batch],
            [each.position for each in batch],
            [each.slot for each in batch],
        )
        for each, byte in zip(batch, found, strict=True):
            each.last, each.position = byte, each.position + 1
            self._give(each)

    def _give(self, sequence: Sequence) -> None:
        sequence.out.put_nowait(sequence.last)
        sequence.left -= 1
        if sequence.left == 0:
            sequence.out.put_nowait(None)
            self.running.remove(sequence)
            self.free.append(sequence.slot)


def make_app(engine: Engine) -> Starlette:
    """Return the application."""
    batcher = Batcher(engine)
    longest = engine.sizes.num_positions // 2

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()

    async def generate(request: Request) -> StreamingResponse | JSONResponse:
        try:
            asked = await request.json()
            prompt, num = str(asked["prompt"]).encode(), int(asked.get("max_bytes", 32))
        except (ValueError, KeyError, TypeError):
            return JSONResponse({"error": 'send {"prompt": text, "max_bytes": number}'}, 400)
        if not 1 <= len(prompt) <= longest or not 1 <= num <= longest:
            return JSONResponse({"error": f"prompt and max_bytes go from 1 to {longest}"}, 400)
        sequence = Sequence(prompt, num)
        await batcher.waiting.put(sequence)

        async def stream() -> AsyncIterator[bytes]:
            while (byte := await sequence.out.get()) is not None:
                yield bytes([byte])

        return StreamingResponse(stream(), media_type="application/octet-stream")

    async def stats(_: Request) -> JSONResponse:
        compiled = counter.num_compiles - batcher.compiles_before
        return JSONResponse({"steps": dict(batcher.steps), "compiles while serving": compiled})

    routes = [Route("/generate", generate, methods=["POST"]), Route("/stats", stats)]
    return Starlette(routes=routes, lifespan=lifespan)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    engine = Engine(make_model(), options.store)
    print(f"ready on http://{options.host}:{options.port}", flush=True)
    uvicorn.run(make_app(engine), host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
