"""Generate text with two programs: prefill for any length, decode for any batch; nothing recompiles.

    python examples/serve_generate.py --prompt "Once upon" [--store runs/programs]

The weights are random unless `--weights` names a file written by `torch.save(model.state_dict())`. The example
shows how the model is called.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from cached_decoder import Decoder, Sizes
from torchloom.serve import Contract, Dim, build, counter, tensor


def contract(sizes: Sizes, batch: Dim | int, length: Dim | int) -> Contract:
    """Return what calls look like for a batch and a length that vary, or do not."""
    start = tensor(batch, dtype=torch.int64, below=1)
    slots = tensor(batch, dtype=torch.int64, fill=lambda shape: torch.arange(shape[0]))
    cache = sizes.cache_shape
    tokens = tensor(batch, length, dtype=torch.int64, below=256)
    return Contract(
        {"tokens": tokens, "start": start, "slots": slots, "keys": cache, "values": cache}
    )


class Engine:
    """A model with its two programs and its cache."""

    def __init__(self, model: Decoder, store: Path | None = None) -> None:
        self.sizes = model.sizes
        length = Dim("length", 1, model.sizes.num_positions // 2)
        batch = Dim("batch", 1, model.sizes.num_slots)
        options = {"shapes": "split", "store": store}
        self.prefill_program = build(model.eval(), contract(self.sizes, 1, length), **options)
        self.decode_program = build(model.eval(), contract(self.sizes, batch, 1), **options)
        self.cache = [torch.zeros(self.sizes.cache_shape) for _ in "kv"]

    @torch.no_grad()
    def prefill(self, prompt: bytes, slot: int) -> int:
        """Read a prompt into a slot; return the next byte."""
        tokens, start, slots = (torch.tensor(each) for each in ([list(prompt)], [0], [slot]))
        return int(self.prefill_program(tokens, start, slots, *self.cache).argmax(-1))

    @torch.no_grad()
    def decode(self, last: list[int], start: list[int], slots: list[int]) -> list[int]:
        """Take one byte of each of some sequences; return the next ones."""
        rows = [torch.tensor(each) for each in (last, start, slots)]
        logits = self.decode_program(rows[0][:, None], *rows[1:], *self.cache)
        return logits.argmax(-1).tolist()

    def generate(self, prompt: bytes, num_bytes: int) -> Iterator[int]:
        """Yield the bytes that follow a prompt."""
        found = self.prefill(prompt, slot=0)
        for position in range(len(prompt), len(prompt) + num_bytes):
            yield found
            (found,) = self.decode([found], [position], [0])


def make_model(weights: Path | None = None) -> Decoder:
    """Return the model."""
    torch.manual_seed(0)
    model = Decoder(Sizes())
    if weights is not None:
        model.load_state_dict(torch.load(weights, weights_only=True))
    return model


def make() -> tuple[Decoder, Contract, dict[str, str]]:
    """Return the model and the contract of prefill: what `torchloom serve build` takes."""
    model = make_model().eval()
    length = Dim("length", 1, model.sizes.num_positions // 2)
    return model, contract(model.sizes, 1, length), {"shapes": "split"}


def main() -> None:
    """Print what follows a prompt as it comes, and how fast it came."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--bytes", type=int, default=64)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--weights", type=Path)
    options = parser.parse_args()
    started = time.perf_counter()
    engine = Engine(make_model(options.weights), options.store)
    print(f"ready in {time.perf_counter() - started:.1f} s", flush=True)
    print(options.prompt, end="", flush=True)
    with counter.expect(num_compiles=0, num_eager_calls=0):
        started = time.perf_counter()
        for byte in engine.generate(options.prompt.encode(), options.bytes):
            print(chr(byte) if 32 <= byte < 127 else "·", end="", flush=True)
    seconds = time.perf_counter() - started
    print(f"\n{options.bytes / seconds:.0f} tokens/s, nothing compiled meanwhile")


if __name__ == "__main__":
    main()
