"""The command `sortedrl`. Each command is a typed settings model (config.py) and a function here that runs it.

Exit codes: 0 done, 2 wrong input (one clear line, nothing written), 130 interrupted.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from sortedrl import __version__

_SUMMARY = {
    "simulate": "what would each schedule give on your lengths",
    "plan": "which schedule to use, and whether you need one",
}


def main(args: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words[0] in ("--version", "version"):
        print(f"sortedrl {__version__}")
        return 0
    command = _COMMANDS.get(words[0])
    if command is None:
        near = difflib.get_close_matches(words[0], _COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(_COMMANDS)}."
        return _refuse(f"no such command: {words[0]}. {hint}")
    try:
        return command(words[1:])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _usage() -> str:
    lines = [f"sortedrl {__version__}: length-aware scheduling for RL on language models", "", "commands:"]
    lines += [f"  {name:<10} {text}" for name, text in _SUMMARY.items()]
    return "\n".join([*lines, "", "sortedrl COMMAND --help shows the settings of a command."])


def _refuse(message: str) -> int:
    print(f"sortedrl: {message}", file=sys.stderr)
    return 2


def _guarded(kind: Any, words: Sequence[str], program: str, run: Callable[[Any], int]) -> int:
    """Parse, check, run; every wrong setting becomes one line that says where it was set."""
    from sortedrl.config import located, origins, parsed
    from sortedrl.core.schedule import ConfigurationError

    try:
        settings = parsed(kind, words, program)
        settings.check()
        return run(settings)
    except ConfigurationError as error:
        return _refuse(located(error, origins(kind, words)))


def _simulate(words: Sequence[str]) -> int:
    from sortedrl.config import Simulate

    return _guarded(Simulate, words, "sortedrl simulate", _run_simulate)


def _run_simulate(settings: Any) -> int:
    from sortedrl.config import as_json
    from sortedrl.studies import simulate, tables

    workload, schedule = settings.workload(settings.cohorts), settings.schedule()
    rows = simulate.cases(workload, schedule, settings.modes, settings.expectations)
    if settings.dry_run:
        return _print_dry_run(settings, schedule, workload.prompts)
    with _Progress("simulating", quiet=settings.json_output) as progress:
        modes = simulate.compare(rows, settings.seeds, max_updates=settings.updates, on_progress=progress)
    if settings.json_output:
        print(json.dumps({"modes": modes, "settings": as_json(settings), "version": __version__}))
        return 0
    limit = next(iter(modes.values()))["limit"]
    console = _console()
    console.print(f"{_workload_line(settings)}\nlimit of this workload: {limit:,.5g} tokens/s", highlight=False)
    tables.show(console, [tables.gain_table(modes), tables.cost_table(modes), tables.bubble_table(modes)])
    return 0


def _plan(words: Sequence[str]) -> int:
    from sortedrl.config import PlanSettings

    return _guarded(PlanSettings, words, "sortedrl plan", _run_plan)


def _run_plan(settings: Any) -> int:
    from dataclasses import replace

    from sortedrl.config import as_json
    from sortedrl.studies import plan, tables

    schedule = settings.schedule("partial")
    workload = replace(settings.workload(settings.cohorts), expectation=settings.expectation)
    if settings.dry_run:
        return _print_dry_run(settings, schedule, workload.prompts)
    with _Progress("planning", quiet=settings.json_output) as progress:
        found = plan.plan(workload, schedule, settings.allowed(), settings.seeds, progress)
    if settings.json_output:
        print(json.dumps({**asdict(found), "settings": as_json(settings), "version": __version__}))
        return 0
    console = _console()
    console.print(f"{_workload_line(settings)}\nexpected lengths: {settings.expectation}", highlight=False)
    tables.show(console, tables.plan_view(found))
    return 0


def _print_dry_run(settings: Any, schedule: Any, prompts: int) -> int:
    from sortedrl.config import as_json
    from sortedrl.core.strategy import updates_left

    per_cohort = schedule.rollouts_per_cohort
    derived = {
        "rollouts_per_cohort": per_cohort,
        "updates_per_cohort": updates_left(per_cohort, schedule.rollouts_per_update),
        "rollouts_in_all": prompts * schedule.rollouts_per_prompt,
        "update_size_over_slots": schedule.rollouts_per_update / settings.slots,
        "staleness_bound_versions": schedule.max_staleness,
        "kv_tokens_if_all_slots_are_at_the_limit": settings.slots
        * (settings.prompt_tokens + settings.max_response_tokens),
    }
    resolved = as_json(settings)
    if settings.json_output:
        print(json.dumps({"settings": resolved, "derived": derived}))
        return 0
    for key, value in resolved.items():
        print(f"{key} = {json.dumps(value)}")
    print("\n# what follows from it")
    for key, value in derived.items():
        print(f"# {key} = {json.dumps(value)}")
    return 0


def _workload_line(settings: Any) -> str:
    lengths = settings.lengths or (
        f"lognormal, median {settings.median_length:.5g}, sd {settings.length_sd_between:g} between"
        f" and {settings.length_sd_within:g} within prompts, limit {settings.max_response_tokens}"
    )
    return (
        f"lengths: {lengths}\nslots {settings.slots}, updates of {settings.rollouts_per_update}, cohorts of "
        f"{settings.prompts_per_cohort} x {settings.rollouts_per_prompt}, step time {settings.step_time}, "
        f"seeds {' '.join(map(str, settings.seeds))}"
    )


def _console() -> Any:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=160)


class _Progress:
    """A bar with an ETA on a terminal's stderr; nothing when piped."""

    def __init__(self, what: str, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._task = self._bar.add_task(what, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._bar.start()
        return lambda done, total: self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"simulate": _simulate, "plan": _plan}


if __name__ == "__main__":
    sys.exit(main())
