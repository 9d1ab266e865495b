"""`sortedrl compare`: train with several modes, interleaved, and compare them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from sortedrl.cli import train_extra
from sortedrl.cli.output import console_of_run, table_console
from sortedrl.cli.train import print_dry_run
from sortedrl.core.schedule import ConfigurationError
from sortedrl.core.strategies.registry import strategy_named
from sortedrl.observe.console import RunConsole
from sortedrl.studies import tables
from sortedrl.training.run_dir import locked
from sortedrl.training.settings import TrainingSettings, TrainSettings

Log = Callable[[str], None]
Train = Callable[[TrainSettings, Log, RunConsole], dict[str, Any]]


class CompareSettings(TrainingSettings):
    """Train once per mode and seed, interleaved, with the same data order."""

    not_here: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("mode", "seed", "resume"), "compare makes several runs: use --modes and --seeds"
    )

    modes: Annotated[tuple[str, ...], Field(min_length=1, description="schedules to train with")] = (
        "baseline",
        "on-policy+planned",
        "partial+elevator",
    )
    seeds: Annotated[tuple[int, ...], Field(min_length=1, description="one run per mode and seed")] = (0,)

    def of(self, mode: str, seed: int, out: Path) -> TrainSettings:
        plain = self.model_dump(exclude={"modes", "seeds", "json_output"})
        plain |= {"mode": mode, "seed": seed, "out": out}
        if not strategy_named(mode).keeps_tokens:
            plain |= {"max_staleness": None, "overlap": False}
        return TrainSettings.model_validate(plain)

    def check(self) -> None:
        for key in ("modes", "seeds"):
            if len(set(getattr(self, key))) < len(getattr(self, key)):
                raise ConfigurationError(key, getattr(self, key), "one is named twice", "Name each one once.")
        for mode in self.modes:
            self.of(mode, 0, Path()).check()


SETTINGS = CompareSettings


def run(settings: CompareSettings) -> int:
    if settings.dry_run:
        return print_dry_run(settings)
    trainer = train_extra.module("trainer")
    console = console_of_run(settings, ends_with_reader=False)
    summaries = compare(settings, trainer.train, console.log, console)
    if settings.json_output:
        print(json.dumps({"runs": summaries}))
    else:
        tables.show(table_console(), [tables.comparison_table(summaries)])
    return 0


def compare(settings: CompareSettings, train: Train, log: Log, console: RunConsole) -> list[dict[str, Any]]:
    """One run per mode and seed; modes alternate, so that a slowdown of the machine affects all of them."""
    folder = settings.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-compare"
    summaries = []
    with locked(folder, log):
        for seed in settings.seeds:
            for mode in settings.modes:
                log(f"--- {mode}, seed {seed}")
                summaries.append(train(settings.of(mode, seed, folder / f"{mode}-seed{seed}"), log, console))
                if summaries[-1]["interrupted"]:
                    raise KeyboardInterrupt
    return summaries
