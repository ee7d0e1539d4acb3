"""Values as JSON and tensors, and back: what a checkpoint keeps besides weights.

    encode({"step": 3, "mean": tensor, 5: (1, inf)})
        {"$dict": [["step", 3], ["mean", {"$tensor": "0"}], [5, {"$tuple": [1, {"$float": "inf"}]}]]}

Nothing is pickled: what is read can only be numbers, texts, plain containers and tensors. A value of
another kind is refused when it is saved, by its place, instead of being lost when it is loaded.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchloom.errors import CheckpointError

KINDS = (
    "None, bool, int, float, complex, str, bytes, list, tuple, set, dict, defaultdict, Counter, "
    "OrderedDict, deque, tensors, NumPy arrays, torch.dtype and torch.device"
)
_LISTS: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset, "$deque": deque}
_LIST_NAMES: dict[type, str] = {list: "", **{kind: mark for mark, kind in _LISTS.items()}}
_MAPS: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}
_MAP_NAMES: dict[type, str] = {
    dict: "$dict",
    OrderedDict: "$ordered",
    Counter: "$counter",
}
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (int, float, list, dict, set)}


def encode(value: Any, keep: Callable[[Tensor], str], where: str) -> Any:
    """Return `value` as what JSON can hold; tensors are handed to `keep`, which names them.

    Args:
        value: numbers, texts, tensors, and containers of them.
        keep: takes a tensor and returns the name to find it by.
        where: what the value is, for messages.

    Raises:
        CheckpointError: a part of it is of a kind that cannot be kept.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Tensor):
        return {"$tensor": keep(plain_tensor(value, where))}
    if kind in _MAP_NAMES:
        return _encode_map(value, keep, where)
    mark = _LIST_NAMES.get(kind)
    if mark is None or getattr(value, "maxlen", None) is not None:
        return _encode_rare(value, keep, where)
    ordered = value if mark not in ("$set", "$frozenset") else sorted(value, key=repr)
    items = [encode(item, keep, f"{where}[{i}]") for i, item in enumerate(ordered)]
    return items if mark == "" else {mark: items}


def decode(tree: Any, fetch: Callable[[str], Any]) -> Any:
    """Return the value that `encode` made `tree` of.

    Args:
        tree: what JSON held.
        fetch: returns the tensor of a name.

    Raises:
        CheckpointError: the tree is not one that `encode` makes.
    """
    if isinstance(tree, list):
        return [decode(item, fetch) for item in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next(iter(tree), "")
    if not mark.startswith("$"):
        return {key: decode(item, fetch) for key, item in tree.items()}
    held = tree[mark]
    if mark in _MAPS:
        return _MAPS[mark]([(decode(k, fetch), decode(v, fetch)) for k, v in held])
    if mark in _LISTS:
        return _LISTS[mark]([decode(item, fetch) for item in held])
    if mark not in _RARE:
        raise CheckpointError(
            f"a stored value is marked {mark!r}, which this version does not know"
        )
    return _RARE[mark](held, fetch)


def plain_tensor(value: Tensor, where: str) -> Tensor:
    """Return a tensor as one that a file can hold and that is the same when it is read.

    Raises:
        CheckpointError: it is of a class, layout or device that would not come back.
    """
    odd = None
    if type(value) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        odd = f"a {type(value).__module__}.{type(value).__qualname__}"
    elif value.is_meta:
        odd = "a tensor on meta, without values"
    elif value.layout != torch.strided or value.is_quantized or value.is_nested:
        odd = f"a {'quantized' if value.is_quantized else value.layout} tensor"
    if odd is not None:
        raise CheckpointError(
            f"{where} is {odd}, which a checkpoint cannot keep: it holds plain dense tensors. Turn it "
            "into one, or leave it out"
        )
    return value.detach().resolve_conj().resolve_neg()


def _factory_name(value: defaultdict[Any, Any], where: str) -> str | None:
    factory = value.default_factory
    name = getattr(factory, "__name__", "")
    if factory is None or _FACTORIES.get(name) is factory:
        return name or None
    raise CheckpointError(
        f"{where} is a defaultdict that makes missing values by {factory!r}, which a checkpoint cannot "
        f"keep: use one of {', '.join(_FACTORIES)}, or a dict"
    )


def _encode_map(value: Mapping[Any, Any], keep: Callable[[Tensor], str], where: str) -> Any:
    mark = _MAP_NAMES[type(value)]
    if mark == "$dict" and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, keep, f"{where}[{key!r}]") for key, item in value.items()}
    pairs = [
        [encode(key, keep, f"a key of {where}"), encode(item, keep, f"{where}[{key!r}]")]
        for key, item in value.items()
    ]
    return {mark: pairs}


def _encode_rare(value: Any, keep: Callable[[Tensor], str], where: str) -> Any:
    if type(value) is deque:
        return {"$bounded": [value.maxlen, encode(list(value), keep, where)]}
    if type(value) is defaultdict:
        return {"$default": [_factory_name(value, where), encode(dict(value), keep, where)]}
    if type(value) in (np.ndarray, np.memmap) and value.dtype.kind in _NUMBERS:
        content = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        # torch warns of memory that it may not write.
        name = keep(torch.from_numpy(content if content.flags.writeable else content.copy()))
        return {"$numpy": [value.dtype.str, list(value.shape), name]}
    if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
        return {"$scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    for kind, mark, spell in _SPELLINGS:
        if type(value) is kind:
            return {mark: spell(value)}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        f"keep: it holds JSON-able values and tensors ({KINDS}). Turn it into one of them, or leave "
        "it out"
    )


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a name such as "float32".

    Raises:
        CheckpointError: torch has no such dtype.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"a stored tensor has dtype {name!r}, which torch does not know")
    return found


def _numeric(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMBERS:
        raise CheckpointError(f"a stored NumPy value has dtype {name!r}, which holds no numbers")
    return dtype


def _array(held: Any, fetch: Callable[[str], Any]) -> Any:
    dtype, shape, name = held
    return fetch(name).numpy().view(_numeric(dtype)).reshape(shape).copy()


_NUMBERS = "biufc"
_SPELLINGS: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
    (float, "$float", repr),  # of a finite one is written as it is
    (complex, "$complex", lambda value: [repr(value.real), repr(value.imag)]),
    (bytes, "$bytes", lambda value: base64.b64encode(value).decode()),
    (torch.Size, "$size", list),
    (torch.dtype, "$dtype", lambda value: str(value).removeprefix("torch.")),
    (torch.device, "$device", str),
)
_RARE: dict[str, Callable[[Any, Callable[[str], Any]], Any]] = {
    "$tensor": lambda held, fetch: fetch(held),
    "$numpy": _array,
    "$scalar": lambda held, _: np.frombuffer(base64.b64decode(held[1]), _numeric(held[0]))[0],
    "$float": lambda held, _: float(held),
    "$complex": lambda held, _: complex(float(held[0]), float(held[1])),
    "$bytes": lambda held, _: base64.b64decode(held),
    "$size": lambda held, _: torch.Size(held),
    "$dtype": lambda held, _: dtype_of(held),
    "$device": lambda held, _: torch.device(held),
    "$bounded": lambda held, fetch: deque(decode(held[1], fetch), maxlen=int(held[0])),
    "$default": lambda held, fetch: defaultdict(
        None if held[0] is None else _FACTORIES[held[0]], decode(held[1], fetch)
    ),
}
