"""The order of samples: one global sequence that depends on the seed alone.

    position   0  1  2  3  4  5  6  7  8 ...        two ranks, micro batch 2:
    rank       0  0  1  1  0  0  1  1  0 ...        each takes its part of every micro-step

Text is cut into windows; each epoch visits all of them once in a fresh random order. The position
counts samples of all ranks together, so a run resumed on another number of ranks sees each
sample exactly where the first run would have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchloom.errors import CheckpointError, DataError


class SampleStream:
    """An endless iterator of this rank's batches, shape (micro batch, `seq_len` + 1).

    Args:
        tokens: the whole training text as a vector of token ids.
        seq_len: tokens per sample; the extra one is the last label.
        micro_batch: samples per rank and micro-step.
        seed: decides the order.
        rank: this process among `world_size`.
        world_size: number of ranks that share the sequence.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        seq_len: int,
        micro_batch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.position = 0
        self._windows = windows(tokens, seq_len)
        self._micro_batch = micro_batch
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    def __iter__(self) -> SampleStream:
        return self

    def __next__(self) -> Tensor:
        first = self.position + self._rank * self._micro_batch
        rows = [self._window_at(first + i) for i in range(self._micro_batch)]
        self.position += self._world_size * self._micro_batch
        return self._windows[torch.tensor(rows)].long()

    def state_dict(self) -> dict[str, int]:
        """Return the position, with what must be equal for it to mean the same samples."""
        return {
            "position": self.position,
            "seed": self._seed,
            "num_windows": len(self._windows),
            "seq_len": self._windows.shape[1] - 1,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at a saved position.

        Raises:
            CheckpointError: the saved run had another seed, sample length or text.
        """
        mine = self.state_dict()
        differing = [key for key in mine if key != "position" and mine[key] != state.get(key)]
        if differing:
            found = ", ".join(f"{key} {state.get(key)} -> {mine[key]}" for key in differing)
            raise CheckpointError(
                f"the checkpoint's samples are not those of this run ({found}): "
                "resume with the same --data, --seq-len and --seed"
            )
        self.position = state["position"]

    def _window_at(self, position: int) -> int:
        epoch, index = divmod(position, len(self._windows))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed << 20) + epoch)
            self._order = torch.randperm(len(self._windows), generator=generator)
            self._epoch = epoch
        return int(self._order[index])


def windows(tokens: Tensor, seq_len: int) -> Tensor:
    """Return a view of `tokens` as rows of `seq_len` + 1; neighbours share one token.

    Raises:
        DataError: there are not enough tokens for a single row.
    """
    if len(tokens) <= seq_len:
        raise DataError(
            f"the text has {len(tokens)} tokens, fewer than one sample of {seq_len} and its label: "
            "give more text or a smaller --seq-len"
        )
    return tokens.unfold(0, seq_len + 1, seq_len)


def heldout_batches(
    tokens: Tensor,
    *,
    seq_len: int,
    micro_batch: int,
    rank: int = 0,
    world_size: int = 1,
    max_samples: int = 64,
) -> list[Tensor]:
    """Return this rank's evaluation batches: windows spread evenly over the held-out text.

    Every rank gets the same number of batches of the same shape, because evaluation uses collectives. A
    text with fewer windows than that is repeated.

    Args:
        tokens: the held-out text as a vector of token ids.
        seq_len: tokens per sample; the extra one is the last label.
        micro_batch: samples per batch.
        rank: this process among `world_size`.
        world_size: number of ranks.
        max_samples: the most samples of all ranks together, if one batch per rank does not exceed it.

    Raises:
        DataError: the text is shorter than one sample.
    """
    rows = windows(tokens, seq_len)
    per_round = micro_batch * world_size
    num_rounds = max(1, min(len(rows), max_samples) // per_round)
    total = num_rounds * per_round
    picks = [i * len(rows) // total for i in range(total)]
    mine = [picks[i * per_round + rank * micro_batch :][:micro_batch] for i in range(num_rounds)]
    return [rows[torch.tensor(pick)].long() for pick in mine]
