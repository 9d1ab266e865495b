"""Checkpoints: a folder that is either whole or not there, and says so when it has been damaged.

Everything is written to a temporary folder, flushed to disk, and renamed; a manifest holds the size and hash of each
file. A kill at any instant leaves the older checkpoints intact.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_MANIFEST = "manifest.json"
_PREFIX = "update-"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    learner: dict[str, Any]
    controller: dict[str, Any]
    notes: dict[str, Any]  # what the run wants to find again, such as its best score


def save(folder: Path, update: int, learner: dict[str, Any], controller: dict[str, Any], notes: dict[str, Any]) -> Path:
    """Write the checkpoint after `update` updates. On failure nothing of it is left, and older ones stay."""
    target = folder / f"{_PREFIX}{update:06d}"
    temporary = folder / f".{target.name}.{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        _write_files(temporary, learner, controller, notes)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        _flush(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {target} could not be written: {error.strerror or error}. Older checkpoints are intact. "
            f"Free some disk space, then go on with --resume {folder.parent}"
        ) from error
    return target


def load(path: Path) -> Checkpoint:
    """Read a checkpoint back, verified against its manifest."""
    damage = damage_of(path)
    if damage is not None:
        raise CheckpointError(f"checkpoint {path} is damaged: {damage}")
    learner = torch.load(path / "learner.pt", map_location="cpu", weights_only=True)
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    _restore_random(state["random"])
    return Checkpoint(path, learner, state["controller"], state["notes"])


def newest(folder: Path) -> Path:
    """The newest checkpoint. If it is damaged, the error offers the newest one that is not."""
    found = all_in(folder)
    if not found:
        raise CheckpointError(f"no checkpoint in {folder}: the run ended before its first one. Start it anew")
    damage = damage_of(found[-1])
    if damage is None:
        return found[-1]
    intact = next((path for path in reversed(found[:-1]) if damage_of(path) is None), None)
    offer = (
        f"The one before it is intact: remove the damaged folder and resume again, to go on from {intact.name}"
        if intact
        else "No other one is intact: start the run anew"
    )
    raise CheckpointError(f"checkpoint {found[-1]} is damaged: {damage}. {offer}")


def all_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def remove_old(folder: Path, keep: int, also_keep: Path | None = None) -> None:
    for path in all_in(folder)[:-keep]:
        if path != also_keep:
            shutil.rmtree(path, ignore_errors=True)


def damage_of(path: Path) -> str | None:
    """What is wrong with the files, in words; None if they are as they were written."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"its manifest cannot be read ({error})"
    for name, expected in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["size"]:
            return f"{name} has {file.stat().st_size} bytes, {expected['size']} were written"
        if _hash(file) != expected["sha256"]:
            return f"{name} has changed since it was written (its hash differs)"
    return None


def _write_files(folder: Path, learner: dict[str, Any], controller: dict[str, Any], notes: dict[str, Any]) -> None:
    with (folder / "learner.pt").open("wb") as file:
        torch.save(learner, file)
    state = {"controller": controller, "notes": notes, "random": _random_state()}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    manifest = {
        path.name: {"size": path.stat().st_size, "sha256": _hash(path)}
        for path in (folder / "learner.pt", folder / "state.json")
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for path in folder.iterdir():
        _flush(path)
    _flush(folder)


def _random_state() -> dict[str, Any]:
    kind, numbers, gauss = random.getstate()
    return {"python": [kind, list(numbers), gauss], "torch": torch.get_rng_state().tolist()}


def _restore_random(state: dict[str, Any]) -> None:
    kind, numbers, gauss = state["python"]
    random.setstate((kind, tuple(numbers), gauss))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
