"""What a rank of the pool forgets between two tests, so that each meets the state of a new process.

torch: the process group, Dynamo's code and counters, configurations, seeds, modes, the default type.
torchloom: the contents of its modules' tables, functions put in place of its own, its counters, open lines, movers and their threads, where it
stands in a step. The process: logging; its variables, folder and warnings are set anew by the next function.
"""

from __future__ import annotations

import copy
import gc
import importlib
import itertools
import logging
import os
import pkgutil
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

import torchloom
from torchloom.position import POSITION, Position
from torchloom.runtime import lines
from torchloom.runtime.host import mover

_TABLES = (
    dict, list, set, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, WeakIdKeyDictionary,
)  # fmt: skip
_STAY = {"_IS_HOOKED", "_BEFORE", "_EXPLAIN", "_HELD", "__path__", "__all__"}
"""Say that a hook of the process is in place; it stays in place."""
_SKIPPED = ("torchloom.integrations", "torchloom.__main__")
"""Rooms of frameworks that may not be installed."""
_HARMLESS = {"tqdm_monitor"}
"""Threads that libraries start once: functorch shows its progress with tqdm."""
_CONFIGS: tuple[Any, ...] = (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
_MATMUL: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
_SEED = torch.random.default_generator.initial_seed()
_MOST_BYTES = 3 << 30
"""Resident memory beyond which a rank is replaced."""


class State:
    """The process as it was when this was made."""

    def __init__(self) -> None:
        modules = _modules()
        self._tables = [(table, copy.copy(table)) for table in _values(modules, *_TABLES)]
        self._counts = [
            (module, name, int(repr(value)[len("count(") : -1]))
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, itertools.count)
        ]
        self._parts = list(_parts(modules))
        self._configs = [config.get_config_copy() for config in _CONFIGS]
        self._threads = _threads()
        self._precisions = [backend.fp32_precision for backend in _MATMUL]
        torch.manual_seed(_SEED)  # imports have drawn from it
        gc.collect()
        gc.freeze()  # what is here now is looked through no more: 0.1 s of each restore
        self._loggers = {logger: _settings(logger) for logger in _loggers()}

    def restore(self) -> str:
        """Forget what has happened since; return what could not be forgotten, empty if all was."""
        lines._LINES.close("has left the process group")
        lines._LINES.group, lines._LINES.limits = None, lines.TimeoutsConfig()
        mover._stop()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._restore_torchloom()
        self._restore_torch()
        for logger in _loggers():
            level, logger.propagate, logger.disabled, handlers, filters = self._loggers.get(
                logger, (logging.NOTSET, True, False, [], [])
            )
            logger.setLevel(level)
            logger.handlers[:], logger.filters[:] = handlers, filters
        gc.collect()
        return self._left()

    def _restore_torchloom(self) -> None:
        for table, before in self._tables:
            if isinstance(table, list):
                table[:] = before
            else:
                table.clear()
                table.update(before)
        for module, name, value in self._counts:
            setattr(module, name, itertools.count(value))
        vars(POSITION).update(vars(Position()))
        for owner, name, part in self._parts:  # a test may have put its own in their place
            if vars(owner).get(name) is not part:
                setattr(owner, name, part)

    def _restore_torch(self) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for config, before in zip(_CONFIGS, self._configs, strict=True):
            now = config.get_config_copy()
            for name, value in before.items():
                if now[name] != value:
                    setattr(config, name, value)
        torch.manual_seed(_SEED)
        random.seed()
        np.random.seed()  # noqa: NPY002  users' datasets draw from it
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
        # Sets "ieee" where a new process has "none", which torch's cache keys tell apart.
        torch.set_float32_matmul_precision("highest")
        for backend, precision in zip(_MATMUL, self._precisions, strict=True):
            backend.fp32_precision = precision

    def _left(self) -> str:
        if more := _threads() - self._threads:
            return f"threads {sorted(thread.name for thread in more)}"
        if children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            return f"processes {children}"
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        num_bytes = pages * os.sysconf("SC_PAGE_SIZE")
        return f"{num_bytes >> 20} MiB" if num_bytes > _MOST_BYTES else ""


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name not in _HARMLESS}


def _modules() -> list[types.ModuleType]:
    for found in pkgutil.walk_packages(torchloom.__path__, "torchloom."):
        if not found.name.startswith(_SKIPPED):
            importlib.import_module(found.name)
    return [module for name, module in [*sys.modules.items()] if name.startswith("torchloom.")]


def _values(modules: list[types.ModuleType], *kinds: type) -> Iterator[Any]:
    seen: set[int] = set()
    for module in modules:
        for name, value in [*vars(module).items()]:
            is_state = type(value) in kinds and name not in _STAY and not name.startswith("__")
            if is_state and id(value) not in seen:
                seen.add(id(value))
                yield value


def _parts(modules: list[types.ModuleType]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the functions and classes of modules, and what classes hold, with their owner and name."""
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType | type):
                yield module, name, value
            if isinstance(value, type) and value.__module__ == module.__name__:
                for part, held in vars(value).items():
                    if isinstance(held, types.FunctionType | property | classmethod | staticmethod):
                        yield value, part, held


def _loggers() -> list[logging.Logger]:
    named = [*logging.root.manager.loggerDict.values()]
    return [logging.root, *(each for each in named if isinstance(each, logging.Logger))]


def _settings(logger: logging.Logger) -> tuple[Any, ...]:
    return logger.level, logger.propagate, logger.disabled, [*logger.handlers], [*logger.filters]
