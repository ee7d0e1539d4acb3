"""A package that consists of a map of names, for `import deepspeed` and each `from deepspeed.x.y import z`."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from peers.deepspeed_names import MODULES, NAMES, key_of_schedule
from peers.missing import missing

ROOT = "deepspeed"


def look_up(target: str) -> Any:
    """Return what `module:attribute` names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


class _Mapped(ModuleType):
    """A module of the map."""

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        if full in NAMES:
            try:
                found = look_up(NAMES[full])
            except (ImportError, AttributeError):  # an older torchloom
                found = missing(full)
        elif self.__name__ in MODULES and hasattr(
            importlib.import_module(MODULES[self.__name__]), name
        ):
            found = getattr(importlib.import_module(MODULES[self.__name__]), name)
        elif any(each.startswith(f"{full}.") for each in (*NAMES, *MODULES)) or full in MODULES:
            return importlib.import_module(full)
        elif name.startswith("__"):
            raise AttributeError(name)
        elif self.__name__.endswith(".lr_schedules") and key_of_schedule(name):
            found = key_of_schedule(name)
        else:
            found = missing(full)
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != ROOT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Mapped(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are looked up when they are used."""


def install() -> None:
    """Let this process import the map as the package `deepspeed`."""
    sys.meta_path.insert(0, _Finder())
