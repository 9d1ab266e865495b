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
    "train": "RL-train a model on this machine",
    "eval": "held-out score of a model",
    "compare": "train with several modes, interleaved, and hold them side by side",
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
    except RuntimeError as error:
        if type(error).__name__ != "CheckpointError":  # its module needs PyTorch
            raise
        return _refuse(str(error))


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


def _train(words: Sequence[str]) -> int:
    from sortedrl.config import Train

    return _guarded(Train, words, "sortedrl train", _run_train)


def _run_train(settings: Any) -> int:
    if settings.dry_run:
        return _print_train_plan(settings)
    app = _needs_train_extra()
    summary = app.train(settings, _say(settings))
    if settings.json_output:
        print(json.dumps(summary))
    elif not summary["interrupted"]:
        before, after, gain = summary["score_before"], summary["score_after"], summary["gain"]
        print(
            f"score {before['value']:.3f} -> {after['value']:.3f}: gain {gain['value']:+.3f} "
            f"[{gain['low']:+.3f}, {gain['high']:+.3f}] in {summary['seconds']:.0f} s\n"
            f"model in {summary['folder']}/model"
        )
    if summary["interrupted"]:
        print(f"interrupted; saved. Go on with: sortedrl train --resume {summary['folder']}", file=sys.stderr)
        return 130
    return 0


def _eval(words: Sequence[str]) -> int:
    from sortedrl.config import Evaluate

    return _guarded(Evaluate, words, "sortedrl eval", _run_eval)


def _run_eval(settings: Any) -> int:
    from sortedrl.config import as_json

    if settings.dry_run:
        derived = {"samples_in_all_at_most": settings.eval_problems * settings.eval_samples}
        _print_settings(as_json(settings), derived, as_object=settings.json_output)
        return 0
    result = _needs_train_extra().evaluate_model(settings, _say(settings))
    if settings.json_output:
        print(json.dumps(result))
        return 0
    for name in ("mean_at_k", "pass_at_k"):
        value = result[name]
        print(
            f"{name.replace('_at_k', '@' + str(result['samples']))} {value['value']:.3f} "
            f"[{value['low']:.3f}, {value['high']:.3f}]"
        )
    return 0


def _compare(words: Sequence[str]) -> int:
    from sortedrl.config import Compare

    return _guarded(Compare, words, "sortedrl compare", _run_compare)


def _run_compare(settings: Any) -> int:
    from sortedrl.studies import tables

    if settings.dry_run:
        return _print_train_plan(settings)
    app = _needs_train_extra()
    summaries = app.compare(settings, _say(settings))
    if settings.json_output:
        print(json.dumps({"runs": summaries}))
    else:
        tables.show(_console(), [tables.comparison_table(summaries)])
    return 0


def _print_train_plan(settings: Any) -> int:
    from sortedrl.config import as_json
    from sortedrl.core.strategy import updates_left

    per_cohort = settings.prompts_per_cohort * settings.rollouts_per_prompt
    derived = {
        "rollouts_per_cohort": per_cohort,
        "updates_per_cohort": updates_left(per_cohort, settings.rollouts_per_update),
        "update_size_over_slots": settings.rollouts_per_update / settings.slots,
        "whole_sibling_sets": settings.compares_siblings(),
        "staleness_bound_versions": settings.max_staleness,
        "context_tokens": settings.max_prompt_tokens + settings.max_response_tokens,
        "kv_tokens_if_all_slots_are_at_the_limit": settings.slots
        * (settings.max_prompt_tokens + settings.max_response_tokens),
    }
    _print_settings(as_json(settings), derived, as_object=settings.json_output)
    return 0


def _needs_train_extra() -> Any:
    try:
        from sortedrl import app
    except ImportError as error:
        raise SystemExit(_refuse(f"{error.name} is not installed: pip install 'sortedrl[train]'")) from None
    return app


def _say(settings: Any) -> Callable[[str], None]:
    """Progress lines: to stdout, or to stderr where stdout is JSON."""
    stream = sys.stderr if settings.json_output else sys.stdout
    return lambda line: print(line, file=stream, flush=True)


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
    _print_settings(as_json(settings), derived, as_object=settings.json_output)
    return 0


def _print_settings(resolved: dict[str, Any], derived: dict[str, Any], *, as_object: bool) -> None:
    if as_object:
        print(json.dumps({"settings": resolved, "derived": derived}))
        return
    for key, value in resolved.items():
        print(f"{key} = {json.dumps(value)}")
    print("\n# what follows from it")
    for key, value in derived.items():
        print(f"# {key} = {json.dumps(value)}")


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


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "simulate": _simulate,
    "plan": _plan,
    "train": _train,
    "eval": _eval,
    "compare": _compare,
}


if __name__ == "__main__":
    sys.exit(main())
