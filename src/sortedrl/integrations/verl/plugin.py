"""The entry point of group `verl.plugins`: registers the trainer mode `sortedrl` when verl is imported.

verl loads its plugins in every process and hides their errors. So this module must be fast and must not fail: it waits
until verl's own trainers are imported, and all other modules are imported when the mode is used.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

MODE = "sortedrl"
TRAINERS = "verl.trainer.ppo.v1"
Act = Callable[[ModuleType], None]


def after_import(name: str, act: Act) -> None:
    """Call `act` with the module of this name: now, or as soon as it has been imported."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, act))


class _Watch(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, act: Act) -> None:
        self._name, self._act = name, act

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._act)
        return spec


class _Then(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, act: Act) -> None:
        self._loader, self._act = loader, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._act(module)


def register(trainers: ModuleType) -> None:
    """Add the mode to verl's registry of V1 trainers."""
    trainers.register_trainer(MODE)(type("SortedRL", (trainers.PPOTrainer,), {"__new__": _make_trainer}))


def _make_trainer(cls: type, config: object) -> object:
    """Check the verl version when the mode is used. Our modules import verl, so they are imported only now."""
    from sortedrl.integrations.verl.versions import why_unfit

    reason = why_unfit()
    if reason is not None:
        raise RuntimeError(reason)
    from sortedrl.integrations.verl.trainer import PPOTrainerSortedRL

    return PPOTrainerSortedRL(config)


after_import(TRAINERS, register)
