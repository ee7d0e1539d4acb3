"""Turns plain values into JSON and tensors, and back: what a checkpoint keeps besides weights.

    encode({"step": 3, "mean": tensor, 5: (1, inf)})
        {"$dict": [["step", 3], ["mean", {"$tensor": "0"}], [5, {"$tuple": [1, {"$float": "inf"}]}]]}

Nothing is pickled: what is read can only be numbers, texts, plain containers and tensors. A value of
another kind is refused when it is saved, by its place, instead of being lost when it is loaded.

Strides that are not those of a tensor's shape are kept beside it. A tensor of a class that wraps others is taken apart
into these and plain data; whoever reads says which classes may be put together again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchloom.errors import CheckpointError

KINDS = (
    "None, bool, int, float, str, bytes, list, tuple, set, dict, Counter, OrderedDict, deque, tensors, "
    "NumPy arrays, torch.Size, torch.dtype and torch.device"
)


@dataclass
class Value:
    """A plain value as JSON, and the tensors in it by the names that the JSON has for them."""

    tree: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def digest(self) -> str:
        """Return a hash that is equal for equal values."""
        digest = hashlib.sha256(json.dumps(self.tree).encode())
        for key, tensor in self.tensors.items():
            digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
            whole = tensor.detach().cpu().contiguous()
            # One element with a stride of two counts as contiguous, and has no view of its bytes.
            content: Any = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()
            digest.update(content)
        return digest.hexdigest()[:16]


Wrappers = Mapping[str, Any]
"""Classes of tensors that wrap others, by qualified name."""


def wrappers_of(optimizer: Any) -> Wrappers:
    """Return the classes of which an optimizer's states may be: those that the modules of its own class name.

    Only these are read back, so a file cannot name another one; a run that has taken no step yet knows them, too.

    Args:
        optimizer: or several that step as one.
    """
    members = getattr(optimizer, "optimizers", [optimizer])
    modules = {kind.__module__ for each in members for kind in type(each).__mro__}
    named = [list(vars(sys.modules[name]).values()) for name in modules if name in sys.modules]
    kinds = [kind for each in named for kind in each if isinstance(kind, type)]
    return {_name_of(kind): kind for kind in kinds if _wraps(kind)}


def value_of(
    where: str, value: Any, name: str | None = None, wrappers: Wrappers | None = None
) -> Value:
    """Return a plain value with the tensors in it taken apart.

    Args:
        where: what it is, for messages.
        value: plain data and tensors.
        name: under which its tensors are stored; default: `where`.
        wrappers: classes that tensors in it may be of.

    Raises:
        CheckpointError: it holds what a checkpoint cannot keep.
    """
    made = Value(None)

    def keep(tensor: Tensor) -> str:
        key = f"value/{name or where}/{len(made.tensors)}"
        made.tensors[key] = tensor
        return key

    made.tree = encode(value, keep, where, wrappers)
    return made


def add_state(
    states: Value, key: str | int, state: Any, name: str, where: str, wrappers: Wrappers
) -> None:
    """Add an optimizer's state that is not divided to those of its parameter.

    Args:
        states: of the parameter: a list of names, kinds and values.
        key: the state's name.
        state: a tensor, which is stored under `name`, or plain data.
        name: of its tensors.
        where: what it is, for messages.
        wrappers: classes that tensors in it may be of.
    """
    if isinstance(state, Tensor) and not is_wrapper(state):
        tree = encode(state, lambda _: name, where)
        made = Value(tree, {name: plain_tensor(state, where)})
    else:
        made = value_of(where, state, name, wrappers)
    states.tensors.update(made.tensors)
    states.tree.append([key, "value", made.tree])


def encode(
    value: Any, keep: Callable[[Tensor], str], where: str, wrappers: Wrappers | None = None
) -> Any:
    """Return `value` as what JSON can hold; tensors are handed to `keep`, which names them.

    Args:
        value: numbers, texts, tensors, and containers of them.
        keep: takes a tensor and returns the name to find it by.
        where: what the value is, for messages.
        wrappers: classes that tensors in it may be of.

    Raises:
        CheckpointError: a part of it is of a kind that cannot be kept.
    """
    kind = type(value)

    def inner(item: Any, at: str) -> Any:
        return encode(item, keep, at, wrappers)

    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Tensor):
        return _encode_tensor(value, keep, where, wrappers)
    if kind is list:
        return [inner(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inner(item, f"{where}[{key!r}]") for key, item in value.items()}
    row = _KINDS.get(np.generic if isinstance(value, np.generic) else kind)
    is_array = isinstance(value, (np.ndarray, np.generic))
    if row is None or (is_array and value.dtype.kind not in _NUMBERS):
        raise CheckpointError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot keep: it holds "
            f"JSON-able values and tensors ({KINDS}). Turn it into one of them, or leave it out"
        )
    mark, apart, _ = row
    if isinstance(value, dict):
        return {
            mark: [
                [inner(key, f"a key of {where}"), inner(item, f"{where}[{key!r}]")]
                for key, item in value.items()
            ]
        }
    return {mark: inner(apart(value), where)}


def _encode_tensor(
    value: Tensor, keep: Callable[[Tensor], str], where: str, wrappers: Wrappers | None
) -> dict[str, Any]:
    name = _name_of(type(value))
    if wrappers is not None and wrappers.get(name) is type(value):
        return {"$wrapper": [name, encode(_apart(value), keep, where, wrappers)]}
    plain = plain_tensor(value, where)
    found: dict[str, Any] = {"$tensor": keep(plain)}
    if plain.stride() != torch.empty(plain.shape, device="meta").stride():
        found["strides"] = strides_of(plain)
    return found


def decode(tree: Any, fetch: Callable[[str], Any], wrappers: Wrappers | None = None) -> Any:
    """Return the value that `encode` made `tree` of.

    Args:
        tree: what JSON held.
        fetch: returns the tensor of a name.
        wrappers: classes that tensors in it may be of.

    Raises:
        CheckpointError: the tree is not one that `encode` makes, or names another class.
    """
    if isinstance(tree, list):
        return [decode(item, fetch, wrappers) for item in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next(iter(tree), "")
    if not mark.startswith("$"):
        return {key: decode(item, fetch, wrappers) for key, item in tree.items()}
    if mark == "$tensor":
        return laid_out(fetch(tree[mark]), tree.get("strides"))
    if mark == "$wrapper":
        name, held = tree[mark]
        return _put_together(name, (wrappers or {}).get(name), decode(held, fetch, wrappers))
    if mark not in _BY_MARK:
        raise CheckpointError(
            f"a stored value is marked {mark!r}, which this version does not know"
        )
    return _BY_MARK[mark](decode(tree[mark], fetch, wrappers))


def bytes_in(tree: Any) -> Iterator[str]:
    """Yield the bytes in what `encode` returned, as they are spelled there."""
    if isinstance(tree, dict) and "$bytes" in tree:
        yield tree["$bytes"]
        return
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from bytes_in(each)


def is_wrapper(value: Any) -> bool:
    """Say whether a value is a tensor of a class that wraps others."""
    return _wraps(type(value))


def _wraps(kind: type) -> bool:
    return issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__")


def rewrapped(value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor of the same class that wraps what `change` makes of each tensor in it."""
    tensors, *rest = _apart(value)
    changed = {name: change(each) for name, each in tensors.items()}
    return _put_together(_name_of(type(value)), type(value), [changed, *rest])


def _apart(value: Any) -> list[Any]:
    names, context = value.__tensor_flatten__()
    tensors = {name: getattr(value, name) for name in names}
    return [tensors, context, list(value.shape), list(value.stride())]


def _put_together(name: str, kind: Any, held: list[Any]) -> Tensor:
    if kind is None:
        raise CheckpointError(
            f"a stored state is a {name}, which the modules of this run's optimizer do not name: use the optimizer that "
            "wrote it, or load with load_optimizer_states=False"
        )
    tensors, context, shape, strides = held
    made = kind.__tensor_unflatten__(tensors, context, torch.Size(shape), tuple(strides))
    if type(made) is not kind or made.shape != torch.Size(shape):
        raise CheckpointError(f"a stored {name} of shape {list(shape)} comes back as another one")
    return made


def strides_of(value: Tensor) -> list[int] | None:
    """Return the strides of a tensor that fills its memory once; None of another one, which comes back contiguous."""
    strides = list(value.stride())
    return strides if _fills_memory(value.shape, strides) else None


def laid_out(value: Tensor, strides: Sequence[int] | None) -> Tensor:
    """Return a tensor with these strides; None: it stays as it is.

    Raises:
        CheckpointError: such a tensor would not fill its memory once.
    """
    if strides is None or value.stride() == tuple(strides):
        return value
    if not _fills_memory(value.shape, strides):
        raise CheckpointError(f"a stored tensor {list(value.shape)} has strides {list(strides)}")
    return value.new_empty_strided(value.shape, list(strides)).copy_(value)


def _fills_memory(shape: Sequence[int], strides: Sequence[int]) -> bool:
    end = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1:
            if stride != end:
                return False
            end *= size
    return True


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def plain_tensor(value: Tensor, where: str) -> Tensor:
    """Return a tensor as one that a file can hold and that is the same when it is read.

    Raises:
        CheckpointError: it is of a class, layout or device that would not come back.
    """
    kind, dtype, layout = type(value), value.dtype, value.layout
    is_dense = layout == torch.strided and not (
        value.is_meta or value.is_quantized or value.is_nested
    )
    if not is_dense or kind not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise CheckpointError(
            f"{where} is a {kind.__module__}.{kind.__qualname__} ({dtype}, {layout}, {value.device}), which a "
            "checkpoint cannot keep: it holds plain dense tensors. Turn it into one, or leave it out"
        )
    return value.detach().resolve_conj().resolve_neg()


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


def _bytes_of(value: np.ndarray[Any, Any]) -> Tensor:
    # A copy: torch warns of memory that it may not write.
    return torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))


def _array(dtype: str, shape: list[int], content: Tensor) -> np.ndarray[Any, Any]:
    return content.numpy().view(_numeric(dtype)).reshape(shape).copy()


_NUMBERS = "biufc"
_Row = tuple[str, Callable[[Any], Any], Callable[[Any], Any]]
_KINDS: dict[type, _Row] = {
    tuple: ("$tuple", list, tuple),
    set: ("$set", lambda value: sorted(value, key=repr), set),
    deque: (
        "$bounded",
        lambda value: [value.maxlen, list(value)],
        lambda held: deque(held[1], maxlen=held[0]),
    ),
    dict: ("$dict", dict, dict),  # with keys that are no texts
    OrderedDict: ("$ordered", dict, OrderedDict),
    Counter: ("$counter", dict, lambda pairs: Counter(dict(pairs))),
    float: ("$float", repr, float),  # a finite one is written as it is
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode),
    torch.Size: ("$size", list, torch.Size),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch."), dtype_of),
    torch.device: ("$device", str, torch.device),
    np.ndarray: (
        "$array",
        lambda value: [value.dtype.str, list(value.shape), _bytes_of(value)],
        lambda held: _array(*held),
    ),
    np.generic: (
        "$scalar",
        lambda value: [value.dtype.str, value.tobytes()],
        lambda held: np.frombuffer(held[1], _numeric(held[0]))[0],
    ),
}
"""Per kind the mark, what takes a value apart into simpler ones, and what puts it together again."""
_BY_MARK = {mark: together for mark, _, together in _KINDS.values()}
