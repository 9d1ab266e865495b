"""`sortedrl train`: train a model with RL on this machine."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sortedrl.cli.main import discard
from sortedrl.cli.output import console_of_run, print_schedule, stdout_reserved_for_json, training_module
from sortedrl.training.settings import (
    TrainSettings,
    changed_on_resume,
    check_what_must_exist,
    saved_settings,
    schedule_of,
)

SETTINGS = TrainSettings


def run(settings: TrainSettings) -> int:
    if settings.resume is not None:  # refuse a change before PyTorch is imported, which takes seconds
        changed_on_resume(settings, saved_settings(settings.resume))
    with stdout_reserved_for_json(settings):
        check_what_must_exist(settings, import_user_code=settings.dry_run, asks_engine=not settings.dry_run)
    if settings.dry_run:
        context_tokens, whole_groups = settings.longest_context(), settings.wants_whole_groups()
        more = {"whole_groups": whole_groups, "context_tokens": context_tokens}
        return print_schedule(settings, schedule_of(settings), settings.slots * context_tokens, **more)
    with stdout_reserved_for_json(settings):
        trainer = training_module("trainer")
        console = console_of_run(settings, ends_with_reader=False)
        summary = trainer.train(settings, console.log, console)
    with _reader_may_be_gone():
        _print_outcome(settings, summary)
    return 130 if summary["interrupted"] else 0


def _print_outcome(settings: TrainSettings, summary: dict[str, Any]) -> None:
    if settings.json_output:
        print(json.dumps(summary), flush=True)
    elif not summary["interrupted"]:
        before, after, gain = summary["score_before"], summary["score_after"], summary["gain"]
        print(
            f"score {before['value']:.3f} -> {after['value']:.3f}: gain {gain['value']:+.3f} "
            f"[{gain['low']:+.3f}, {gain['high']:+.3f}] in {summary['seconds']:.0f} s\n"
            f"model in {summary['folder']}/model",
            flush=True,
        )
    if summary["interrupted"]:
        print(f"interrupted and saved. Continue with: sortedrl train --resume {summary['folder']}", file=sys.stderr)


@contextmanager
def _reader_may_be_gone() -> Iterator[None]:
    """A closed terminal or pipe does not change how a run ended."""
    try:
        yield
    except OSError:
        discard(sys.stdout, sys.stderr)
