"""The folder that a run leaves behind.

runs/NAME/
  config.json       the resolved settings
  events.jsonl      the event log: every figure can be rebuilt from it
  metrics.jsonl     one line for each update and each evaluation
  rollouts.jsonl    a sample of each update's responses, to read
  checkpoints/      update-000040/ ... each whole or not there
  model/            the trained model in Hugging Face format
  summary.json      written at the end
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

from sortedrl.config import EXTENDING_KEYS, Train, as_json
from sortedrl.core.events import Event, read_events, without_rolled_back
from sortedrl.core.schedule import ConfigurationError


class RunFolder:
    """Owns the files of a run. A folder that exists is never overwritten: it is resumed or refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._files: dict[str, TextIO] = {}

    @classmethod
    def unused(cls, settings: Train) -> RunFolder:
        """The folder that the settings name, not made yet."""
        path = settings.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.mode}-seed{settings.seed}"
        if path.exists():
            raise ConfigurationError(
                "out",
                str(path),
                "this run folder exists already, and a run is never overwritten",
                f"Name another folder, or continue it with --resume {path}.",
            )
        return cls(path)

    def create(self, settings: Train) -> None:
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            reason = f"the run folder cannot be made ({error.strerror})"
            raise ConfigurationError("out", str(self.path), reason, "Name a folder that you may write to.") from None
        self.write("config.json", as_json(settings))

    def write(self, name: str, value: Any) -> None:
        temporary = self.path / f".{name}"
        temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
        temporary.replace(self.path / name)

    def append(self, name: str, line: dict[str, Any]) -> None:
        self.stream(name).write(json.dumps(line) + "\n")

    def stream(self, name: str) -> TextIO:
        if name not in self._files:
            _cut_torn_line(self.path / name)
            # Whoever watches the run sees whole lines at once; there are few, but for events, which have a sink for it.
            buffering = -1 if name == "events.jsonl" else 1
            self._files[name] = (self.path / name).open("a", encoding="utf-8", buffering=buffering)
        return self._files[name]

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def events(self) -> list[Event]:
        """The events that count."""
        path = self.path / "events.jsonl"
        return without_rolled_back(read_events(path)) if path.exists() else []

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.path / name
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def drop_lines_after(self, name: str, update: int) -> None:
        """Forget what a roll-back made void in a file whose lines carry their update."""
        path = self.path / name
        if not path.exists():
            return
        _cut_torn_line(path)
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if json.loads(line)["update"] <= update]
        temporary = path.with_name(f".{name}")
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        temporary.replace(path)


def _cut_torn_line(path: Path) -> None:
    """A killed run may leave half a line at the end."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        content = file.read()
        if content and not content.endswith(b"\n"):
            file.truncate(content.rfind(b"\n") + 1)


def refuse_changes(settings: Train, folder: RunFolder) -> None:
    """A run goes on with the settings that it began with, apart from those that only extend it."""
    saved = json.loads((folder.path / "config.json").read_text(encoding="utf-8"))
    defaults = as_json(type(settings)())  # of a run that an older version began, without this setting
    changed = {key: value for key, value in as_json(settings).items() if saved.get(key, defaults[key]) != value}
    refused = {key: value for key, value in changed.items() if key not in EXTENDING_KEYS}
    if refused:
        listed = ", ".join(f"{key}: {saved.get(key)!r} -> {value!r}" for key, value in refused.items())
        key = next(iter(refused))
        raise ConfigurationError(
            key, refused[key], f"the run in {folder.path} began with other settings ({listed})",
            f"Leave these flags out, or start a new run; only {', '.join(sorted(EXTENDING_KEYS))} may change.",
        )  # fmt: skip
    folder.write("config.json", as_json(settings))
