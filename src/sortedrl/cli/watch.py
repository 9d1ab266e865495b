"""`sortedrl watch`: follow a run from another terminal."""

import json
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from sortedrl.cli.output import console_of_run, print_settings
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.wording import printable
from sortedrl.observe import watch
from sortedrl.settings.base import Settings


class WatchSettings(Settings):
    """Follow a run from another terminal, or see how it ended."""

    positional: ClassVar[tuple[str, ...]] = ("run",)

    run: Path | None = None
    """run folder; default: the newest in runs/"""
    stopped_after_seconds: Annotated[float, Field(gt=0)] = watch.STOPPED_AFTER_SECONDS
    """treat a run as stopped after this many seconds without output, if its process cannot be checked"""


SETTINGS = WatchSettings


def run(settings: WatchSettings) -> int:
    """Exit code 1 if the log stopped growing."""
    folder = settings.run or watch.newest_run(Path("runs"))
    if not watch.is_run(folder):
        raise ConfigurationError("run", str(folder), "there is no run", "Name a run folder, as in runs/NAME.")
    if settings.dry_run:
        return print_settings(settings, {"run": str(folder)})
    try:
        if settings.json_output:
            seen = watch.state(folder, settings.stopped_after_seconds)
            print(json.dumps(seen))
            return int(seen.get("outcome") in watch.FAILED)
        with console_of_run(settings) as console:
            watched = watch.follow(folder, console, settings.stopped_after_seconds)
    except KeyboardInterrupt:
        return 130
    for line in watch.outcome_line(folder, watched).split("\n"):
        print(printable(line))
    return int(watched.outcome in watch.FAILED)
