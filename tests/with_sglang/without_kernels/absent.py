"""Names without anything behind them."""

from __future__ import annotations

import sys
import types
from typing import Any, ClassVar


class Absent:
    """Can be named, and has attributes that can be named; calling it is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not there: no build for a CPU")

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")


class AbsentModule(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")


def put_in_place(package: str, *submodules: str) -> None:
    sys.modules[package].__class__ = AbsentModule
    for name in submodules:
        module = AbsentModule(f"{package}.{name}")
        sys.modules[module.__name__] = module
        parent, _, last = module.__name__.rpartition(".")
        setattr(sys.modules[parent], last, module)
