"""Names that a checkpoint's tensors have for other programs: those of `model.state_dict()`.

    model/<param>, buffer/<name>    <name>, also for each other name of a tied weight
    optim/<param>/<state>           optim.state.<param>.<state>, as of `{"optim": get_optimizer_state_dict(...)}`
    all others                      as they are

They stand in `.metadata` alone, where several names may be of one tensor in the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from torchloom._torch.dcp import StoredTensor
from torchloom.shard import layout_of, owners_of


def for_others(
    index: Mapping[str, StoredTensor], tied: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], StoredTensor]]:
    """Yield the tensors of an index with the path of each in a nested state dict.

    Args:
        index: of a checkpoint, by its own names.
        tied: other names of parameters and buffers; see `tied_names`.
    """
    aliases: dict[str, list[str]] = {}
    for alias, name in tied.items():
        aliases.setdefault(name, []).append(alias)
    for key, stored in index.items():
        kind, _, rest = key.partition("/")
        if kind in ("model", "buffer"):
            for name in (rest, *aliases.get(rest, ())):
                yield (name,), stored
        elif kind == "optim":
            param, _, state = rest.rpartition("/")
            yield ("optim", "state", param, state), stored
        else:
            yield (key,), stored


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the names in `state_dict()` that are of a tensor which a checkpoint keeps under another one.

    Args:
        model: sharded.
    """
    owners = owners_of(model)
    kept = {id(owners[spec.name]): spec.name for spec in layout_of(model)}
    named = model.named_parameters(remove_duplicate=False)
    return {
        name: kept[id(param)]
        for name, param in named
        if id(param) in kept and kept[id(param)] != name
    }
