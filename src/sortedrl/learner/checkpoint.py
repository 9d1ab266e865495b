"""Checkpoints: folders that are written atomically and verified when read.

Everything is written to a temporary folder, flushed to disk, and renamed; a manifest holds the size and hash of each
file. A kill at any moment leaves an intact checkpoint:

    .writing-update-000040     being written; removed by `clean_up`
    update-000040              complete
    .replaced-update-000040    the old one, while a new one of the same update replaces it; `clean_up` restores it if
                               the new one is missing, and removes it otherwise
    damaged-update-000040      set aside by `load_newest_intact`, for you to inspect or remove
"""

import errno
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sortedrl.core.errors import UserError

FORMAT = 3  # changes with the content of a checkpoint; 2 was that of sortedrl 0.2, which had no filter
READABLE_FORMATS = (2, FORMAT)
_MANIFEST = "manifest.json"
_PREFIX = "update-"
_WRITING, _REPLACED, _DAMAGED = ".writing-", ".replaced-", "damaged-"
_FILES = ("learner.pt", "state.json")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written or read; the message has the fix."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    learner: dict[str, Any]
    controller: dict[str, Any]
    notes: dict[str, Any]  # data of the run, such as its best score
    random: dict[str, Any]  # state of the random number generators, for `restore_random`


def save(folder: Path, update: int, learner: dict[str, Any], controller: dict[str, Any], notes: dict[str, Any]) -> Path:
    """Write the checkpoint after `update` updates. A failure leaves nothing behind, and older checkpoints stay."""
    target = folder / f"{_PREFIX}{update:06d}"
    try:
        folder.mkdir(exist_ok=True)
        replace_folder(target, lambda temporary: _write_files(temporary, learner, controller, notes))
    except (OSError, RuntimeError) as error:
        reason, fix = _reason_and_fix(error)
        raise CheckpointError(
            f"checkpoint {target} could not be written: {reason}. Older checkpoints are intact. "
            f"{fix}, then continue with --resume {folder.parent}"
        ) from error
    return target


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Replace a folder in one step by what `write` writes to a temporary one. A failure leaves the old one."""
    temporary = target.with_name(f"{_WRITING}{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        write(temporary)
        _put_in_place(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename a complete folder to `target`; an old one is removed only after that."""
    aside = target.with_name(f"{_REPLACED}{target.name}")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    try:
        temporary.rename(target)
    except BaseException:
        if aside.exists() and not target.exists():
            aside.rename(target)
        raise
    _flush(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def clean_up(folder: Path) -> None:
    """Remove leftovers of killed runs from `folder`. Only for the process that holds the run's lock."""
    for aside in folder.glob(f"{_REPLACED}*"):
        target = folder / aside.name.removeprefix(_REPLACED)
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(target)
    for leftover in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def load_newest_intact(folder: Path, log: Callable[[str], None]) -> Checkpoint:
    """The latest intact checkpoint. Later damaged ones are renamed and logged.

    They must not keep their names: the run repeats these updates, and until then a damaged one that becomes readable
    again would count as the latest.
    """
    found = all_in(folder)
    if not found:
        raise CheckpointError(
            f"no checkpoint in {folder}: the run ended before its first one. Remove {folder.parent} and start again"
        )
    damaged: list[tuple[Path, str]] = []
    for path in reversed(found):
        damage = damage_of(path)
        if damage is None:
            checkpoint = _read(path)
            for bad, why in damaged:
                aside = bad.with_name(f"{_DAMAGED}{bad.name}")
                shutil.rmtree(aside, ignore_errors=True)
                bad.rename(aside)
                log(f"checkpoint {bad} is damaged: {why}. Renamed to {aside.name}; the run continues from {path.name}")
            return checkpoint
        damaged.append((path, damage))
    path, why = damaged[0]
    others = f", and so are the {len(damaged) - 1} before it" if len(damaged) > 1 else ""
    raise CheckpointError(f"checkpoint {path} is damaged: {why}{others}. Start the run again in another folder")


def all_in(folder: Path) -> list[Path]:
    """Oldest first."""
    names = re.compile(rf"{_PREFIX}\d{{6,}}")
    found = [path for path in folder.glob(f"{_PREFIX}*") if names.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def remove_old(folder: Path, keep: int, also_keep: Path | None = None) -> None:
    for path in all_in(folder)[:-keep]:
        if path != also_keep:
            shutil.rmtree(path, ignore_errors=True)


def damage_of(path: Path) -> str | None:
    """What is wrong with the files; None if they are intact."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        expected = {name: (int(manifest[name]["size"]), str(manifest[name]["sha256"])) for name in _FILES}
    except (OSError, ValueError, RecursionError) as error:
        return f"its manifest cannot be read ({error})"
    except (KeyError, TypeError):
        return f"its manifest does not list {' and '.join(_FILES)} with size and hash"
    for name, (size, digest) in expected.items():
        file = path / name
        try:
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if _hash(file) != digest:
                return f"{name} has changed since it was written (its hash differs)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def _require_known_format(path: Path, state: dict[str, Any]) -> None:
    found = state.get("format", 1)
    if found not in READABLE_FORMATS:
        age = "an older" if type(found) is int and found < FORMAT else "a newer"
        raise CheckpointError(
            f"checkpoint {path} has format {found}, written by {age} sortedrl; this one reads format {FORMAT}. "
            "Resume it with the version that wrote it, or start a new run"
        )


def _read(path: Path) -> Checkpoint:
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    _require_known_format(path, state)
    learner = torch.load(path / "learner.pt", map_location="cpu", weights_only=True)
    with what_it_lacks(path):
        return Checkpoint(path, learner, state["controller"], state["notes"], state["random"])


@contextmanager
def what_it_lacks(path: Path) -> Iterator[None]:
    """Around what reads the content of a checkpoint: a part that is missing is one line."""
    try:
        yield
    except KeyError as error:
        raise unusable(path, f"it lacks {error}") from error


def unusable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} cannot be used: {reason}. Move it out of {path.parent}: the one before it is used then"
    )


def _write_files(folder: Path, learner: dict[str, Any], controller: dict[str, Any], notes: dict[str, Any]) -> None:
    with (folder / "learner.pt").open("wb") as file:
        torch.save(learner, file)
    state = {"format": FORMAT, "controller": controller, "notes": notes, "random": _random_state()}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    paths = [folder / name for name in _FILES]
    manifest = {path.name: {"size": path.stat().st_size, "sha256": _hash(path)} for path in paths}
    (folder / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    for path in folder.iterdir():
        _flush(path)
    _flush(folder)


def _reason_and_fix(error: BaseException) -> tuple[str, str]:
    """The reason and the fix. PyTorch raises its own error for a failed write; the reason is in its cause."""
    first_line = str(error).strip().split("\n")[0]
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            full = cause.errno in (errno.ENOSPC, errno.EDQUOT)
            return cause.strerror or first_line, "Free some disk space" if full else "Fix that"
        cause = cause.__cause__ or cause.__context__
    return first_line, "Fix that"


def _random_state() -> dict[str, Any]:
    kind, numbers, gauss = random.getstate()
    return {"python": [kind, list(numbers), gauss], "torch": torch.get_rng_state().tolist()}


def restore_random(state: dict[str, Any]) -> None:
    """Python's and PyTorch's generators continue where they were. Call it last: a model or a task that is made may draw
    random numbers, or seed a generator."""
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
