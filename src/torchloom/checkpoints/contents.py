"""What a checkpoint on the disk holds: facts, plain values and tensors.

Reading executes nothing of it: facts and values are JSON, and tensors are read as such.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchloom._torch.dcp import StoredTensor
from torchloom.checkpoints.manifest import first_line, reading
from torchloom.checkpoints.tensors import Payload, from_json
from torchloom.checkpoints.values import decode
from torchloom.errors import CheckpointError

FORMAT = 3
"""Of what a checkpoint holds."""


@dataclass
class Contents:
    """One checkpoint, as one rank reads it."""

    path: Path
    facts: dict[str, Any]
    payload: Payload
    world_size: int
    """Ranks that wrote it."""
    params: dict[str, list[int]]
    """Shapes of all parameters of the model, whether stored or not."""
    trees: dict[str, Any]
    """Plain values, encoded."""
    own: frozenset[str] = frozenset()
    """Values of which ranks kept their own."""
    _mine: dict[str, Any] = field(default_factory=dict)
    _prefix: str = ""

    def __contains__(self, name: object) -> bool:
        return name in self.trees or name in self._mine

    def value(self, name: str) -> Any:
        """Return a plain value: this rank's own, if it has one.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            if name in self._mine:
                return decode(self._mine[name], lambda key: self.payload.whole(self._prefix + key))
            return decode(self.trees[name], self.payload.whole)
        except CheckpointError:
            raise
        except Exception as error:  # bytes of a damaged file may fail anywhere in `decode`
            raise CheckpointError(
                f"{self.path}: the value {name!r} cannot be read: {first_line(error)}"
            ) from error

    def state_tree(self, param: str) -> list[Any] | None:
        """Return the list of a parameter's optimizer states; see `snapshot`."""
        name = f"optim/{param}"
        return self._mine.get(name, self.trees.get(name))

    def fetch(self, name: str, tree: Any) -> Any:
        """Return a value that is part of the tree `name`."""
        prefix = self._prefix if name in self._mine else ""
        return decode(tree, lambda key: self.payload.whole(prefix + key))


def read_contents(path: Path, rank: int | None = None, world_size: int | None = None) -> Contents:
    """Read what a checkpoint holds, without its tensors.

    Args:
        path: the folder of one checkpoint.
        rank: whose own values to read; None reads what all ranks share.
        world_size: number of ranks that load; own values are those of as many.

    Raises:
        CheckpointError: it cannot be read.
    """
    facts = _read_json(path / "engine.json")
    try:
        version = facts["format"]
        if version != FORMAT:
            raise CheckpointError(
                f"checkpoint {str(path)!r} has format {version!r}, this version reads {FORMAT}: load it "
                "with the version of torchloom that wrote it"
            )
        contents = _parsed(path, facts, from_json(_read_json(path / "index.json")))
        if rank is not None and rank > 0 and world_size == contents.world_size:
            contents._mine = dict(_read_json(path / f"rank_{rank}.json")["values"])
            contents._prefix = f"rank{rank}/"
        return contents
    except CheckpointError:
        raise
    except Exception as error:  # a damaged index may have any shape: KeyError, TypeError, ...
        raise CheckpointError(
            f"checkpoint {str(path)!r} cannot be read: {type(error).__name__}: {first_line(error)}"
        ) from error


def _parsed(path: Path, facts: dict[str, Any], index: dict[str, StoredTensor]) -> Contents:
    return Contents(
        path=path,
        facts=facts,
        payload=Payload(path, index),
        world_size=int(facts["world_size"]),
        params={str(name): list(map(int, shape)) for name, shape in facts["params"].items()},
        trees=dict(facts["values"]),
        own=frozenset(facts["own"]),
    )


def _read_json(path: Path) -> dict[str, Any]:
    with reading(path):
        found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(found).__name__}")
    return found
