"""What a checkpoint on the disk holds: facts, plain values and tensors, of this and older versions.

Reading executes nothing of it: JSON, tensors read as such, and for version 1 the metadata of
torch.distributed.checkpoint through an unpickler that knows its records alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchloom._torch.dcp import StoredTensor, read_dcp_metadata
from torchloom.engine.checkpoints.payload import Payload, first_line, from_json
from torchloom.engine.checkpoints.plain import decode
from torchloom.errors import CheckpointError

FORMAT = 3
"""Of what a checkpoint holds. 3: tensors have their whole shape; 2: they are flat; 1: nothing is verified."""
_OLD_COUNTERS = ("global_steps", "global_samples", "micro_steps")


@dataclass
class Contents:
    """One checkpoint, as one rank reads it."""

    path: Path
    version: int
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
        if version == 1:
            return _old(path, facts)
        if version not in (2, FORMAT):
            raise CheckpointError(
                f"checkpoint {str(path)!r} has format {version!r}, this version reads 1 to {FORMAT}: "
                "load it with the version of torchloom that wrote it"
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
        version=int(facts["format"]),
        facts=facts,
        payload=Payload(path, index),
        world_size=int(facts["world_size"]),
        params={str(name): list(map(int, shape)) for name, shape in facts["params"].items()},
        trees=dict(facts["values"]),
        own=frozenset(facts["own"]),
    )


def _old(path: Path, facts: dict[str, Any]) -> Contents:
    """Bring version 1 into the form of this one."""
    try:
        index = read_dcp_metadata(path / ".metadata")
    except FileNotFoundError:
        raise CheckpointError(f"{path / '.metadata'} is missing") from None
    except Exception as error:  # an unpickler over damaged bytes raises anything
        raise CheckpointError(
            f"{path / '.metadata'} is damaged: {type(error).__name__}: {first_line(error)}"
        ) from error
    trees: dict[str, Any] = {
        "counters": {name: int(facts[name]) for name in _OLD_COUNTERS},
        "scaler": dict(facts["scaler"]),
        "client_state": dict(facts["client_state"]),
    }
    if facts["scheduler"] is not None:
        trees["scheduler"] = dict(facts["scheduler"])
    if facts["has_optimizer"]:
        trees["groups"] = [dict(group) for group in facts["groups"]]
    for key in index:
        kind, _, rest = key.partition("/")
        if kind == "buffer":
            trees[key] = {"$tensor": key}
        elif kind == "optim":
            trees.setdefault(f"optim/{rest.rpartition('/')[0]}", [])
    contents = _parsed(path, {**facts, "values": trees, "own": []}, index)
    for key, stored in index.items():
        kind, _, rest = key.partition("/")
        name, _, state = rest.rpartition("/")
        if kind == "optim":
            numel = _numel(contents.params[name])
            is_shard = stored.shape == (numel,)
            entry = [state, "piece", None] if is_shard else [state, "value", {"$tensor": key}]
            trees[f"optim/{name}"].append(entry)
    return contents


def _numel(shape: list[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(found).__name__}")
    return found
