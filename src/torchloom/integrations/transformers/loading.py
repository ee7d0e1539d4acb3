"""Models that are whole on one rank at most: rank 0 loads, the others build on meta.

rank 0        AutoModelForCausalLM.from_pretrained(folder)
other ranks   the same class from the same configuration, on meta: no memory
sharding      rank 0 sends one weight after the other; each rank keeps its part
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from torchloom import envs
from torchloom.shard import on_meta


def from_pretrained(auto_class: Any, folder: str, **kwargs: Any) -> nn.Module:
    """Load pretrained weights on rank 0 and build the same model without memory on the other ranks.

    The host then holds one model, not one for each rank. `TorchloomTrainer` and `TorchloomAccelerator` shard it
    as any other: the weights of rank 0 reach all ranks. Until then only rank 0 may call it.

    Args:
        auto_class: a class of transformers with `from_pretrained`, such as `AutoModelForCausalLM`.
        folder: what its `from_pretrained` takes.
        kwargs: likewise; each rank passes the same.

    Example:
        >>> model = from_pretrained(AutoModelForCausalLM, "llama-8b")  # doctest: +SKIP
    """
    rank = dist.get_rank() if dist.is_initialized() else envs.launch().rank
    if rank == 0:
        return auto_class.from_pretrained(folder, **kwargs)
    config = kwargs.pop("config", None)
    if config is None:
        config = _config_of(auto_class, folder, kwargs)
    dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
    with on_meta():
        if hasattr(auto_class, "from_config"):
            model = auto_class.from_config(config, **({} if dtype is None else {"dtype": dtype}))
        else:
            model = auto_class(config) if dtype is None else auto_class(config).to(dtype)
    return model.eval()  # as rank 0's is, or dropout would differ between ranks


def _config_of(auto_class: Any, folder: str, kwargs: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    config_class = getattr(auto_class, "config_class", None) or AutoConfig
    names = ("trust_remote_code", "revision", "cache_dir", "token", "local_files_only", "subfolder")
    return config_class.from_pretrained(folder, **{n: kwargs[n] for n in names if n in kwargs})
