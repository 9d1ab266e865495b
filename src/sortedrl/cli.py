"""The command `sortedrl`. Each command has a settings model (config.py) and a function here that runs it.

Exit codes: 0 success, 2 wrong input (one line, nothing written) or a run that had to stop (one line), 130 interrupted.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

from sortedrl import __version__
from sortedrl.core.install_hint import install_hint
from sortedrl.training.cpu_threads import let_waiting_threads_sleep

_ONE_LINE_ERRORS = (  # by name: some are defined in modules that need PyTorch
    "CheckpointError",
    "EngineDied",
    "FolderInUse",
    "NothingLearnt",
    "RunFolderError",
    "TooManyRejected",
    "WeightsDiffer",
)
_SUMMARY = {
    "simulate": "what each schedule would gain on your response lengths",
    "plan": "which schedule to use, and whether you need one at all",
    "train": "train a model with RL on this machine",
    "eval": "score a model on held-out problems",
    "compare": "train with several modes, interleaved, and compare them",
    "bench": "measure the throughput of each schedule on a real engine",
    "profile": "measure an engine, to calibrate simulate and plan to your hardware",
    "watch": "follow a run from another terminal",
    "trace": "write a run as a timeline for ui.perfetto.dev",
    "report": "write an HTML page about one or several runs",
    "doctor": "check what is installed and whether it works here",
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
    """Parse, check, run; a wrong setting becomes one line that names where it was set."""
    from sortedrl.command_line import FlagError, located, origins, parsed
    from sortedrl.core.schedule import ConfigurationError

    try:
        settings = parsed(kind, words, program)
        settings.check()
        return run(settings)
    except ConfigurationError as error:
        return _refuse(located(error, origins(kind, words)))
    except FlagError as error:
        return _refuse(str(error))
    except RuntimeError as error:
        if type(error).__name__ not in _ONE_LINE_ERRORS:
            raise
        return _refuse(str(error))


def _simulate(words: Sequence[str]) -> int:
    from sortedrl.config import Simulate

    return _guarded(Simulate, words, "sortedrl simulate", _run_simulate)


def _run_simulate(settings: Any) -> int:
    from sortedrl.config import as_json
    from sortedrl.studies import answer, simulate, tables

    workload, schedule = settings.workload(settings.cohorts), settings.schedule()
    rows = simulate.cases(workload, schedule, *settings.modes_and_expectations())
    if settings.dry_run:
        return _print_dry_run(settings, schedule, workload.prompts)
    _warn_of_cut_lengths(settings)
    with _Progress("simulating", quiet=settings.json_output) as progress:
        modes = simulate.compare(rows, settings.seeds, max_updates=settings.updates, on_progress=progress)
    if settings.json_output:
        print(json.dumps({"modes": modes, "settings": as_json(settings), "version": __version__}))
        return 0
    limit = next(iter(modes.values()))["limit"]
    console = _console()
    source = f" ({workload.step_time.source})" if workload.step_time.source else ""
    console.print(
        f"{_workload_line(settings)}\nlimit of this workload: {limit:,.5g} tokens/s{source}\n", highlight=False
    )
    tables.show(console, [tables.answer_table(modes)])
    console.print(f"\n{answer.conclusion(rows, modes)}", style="bold", highlight=False)
    console.print(answer.spread(rows, modes, len(settings.seeds), settings.cohorts), highlight=False)
    if settings.details:
        tables.show(console, ["", tables.gain_table(modes), tables.cost_table(modes), tables.bubble_table(modes)])
    return 0


def _plan(words: Sequence[str]) -> int:
    from sortedrl.config import PlanSettings

    return _guarded(PlanSettings, words, "sortedrl plan", _run_plan)


def _run_plan(settings: Any) -> int:
    from dataclasses import replace

    from sortedrl.config import as_json
    from sortedrl.studies import plan, tables

    schedule = settings.schedule()
    workload = replace(settings.workload(settings.cohorts), expectation=settings.expectation)
    if settings.dry_run:
        return _print_dry_run(settings, schedule, workload.prompts)
    _warn_of_cut_lengths(settings)
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
    console = _run_console(settings, ends_with_reader=False)
    summary = app.train(settings, console.log, console)
    with _reader_may_be_gone():
        _print_outcome(settings, summary)
    return 130 if summary["interrupted"] else 0


def _print_outcome(settings: Any, summary: dict[str, Any]) -> None:
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
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # else Python tries to write what is left when it exits, and fails
            with suppress(OSError, ValueError):
                os.dup2(nowhere, stream.fileno())


def _eval(words: Sequence[str]) -> int:
    from sortedrl.config import Evaluate

    return _guarded(Evaluate, words, "sortedrl eval", _run_eval)


def _run_eval(settings: Any) -> int:
    from sortedrl.config import as_json

    if settings.dry_run:
        derived = {"samples_in_all_at_most": settings.eval_problems * settings.eval_samples}
        _print_settings(as_json(settings), derived, as_object=settings.json_output)
        return 0
    app = _needs_train_extra()
    with _Progress("evaluating", quiet=settings.json_output) as progress:
        result = app.evaluate_model(settings, _log(settings), progress)
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
    console = _run_console(settings, ends_with_reader=False)
    summaries = app.compare(settings, console.log, console)
    if settings.json_output:
        print(json.dumps({"runs": summaries}))
    else:
        tables.show(_console(), [tables.comparison_table(summaries)])
    return 0


def _bench(words: Sequence[str]) -> int:
    from sortedrl.config import Bench

    return _guarded(Bench, words, "sortedrl bench", _run_bench)


def _run_bench(settings: Any) -> int:
    from sortedrl.config import as_json
    from sortedrl.studies import tables

    schedule = settings.schedule()
    if settings.dry_run:
        return _print_dry_run(settings, schedule, settings.cohorts * settings.prompts_per_cohort)
    from sortedrl.bench_run import run_bench

    found = run_bench(settings, _log(settings))
    if settings.json_output:
        print(json.dumps({**found, "settings": as_json(settings), "version": __version__}))
        return 0
    tables.show(_console(), [tables.bench_table(found["modes"]), tables.bubble_table(found["modes"])])
    return 0


def _profile(words: Sequence[str]) -> int:
    from sortedrl.config import ProfileSettings

    return _guarded(ProfileSettings, words, "sortedrl profile", _run_profile)


def _run_profile(settings: Any) -> int:
    from sortedrl.config import as_json

    if settings.dry_run:
        _print_settings(as_json(settings), {}, as_object=settings.json_output)
        return 0
    from sortedrl.bench_run import run_profile

    profile = run_profile(settings, _log(settings))
    if settings.json_output:
        print(json.dumps(asdict(profile)))
    else:
        print(f"written to {settings.out}; try: sortedrl simulate --step-time {settings.out} --slots {settings.slots}")
    return 0


def _watch(words: Sequence[str]) -> int:
    from sortedrl.config import Watch

    return _guarded(Watch, words, "sortedrl watch", _run_watch)


def _run_watch(settings: Any) -> int:
    """Exit code 1 where the log stopped growing or is damaged."""
    from pathlib import Path

    from sortedrl.config import as_json
    from sortedrl.core.schedule import ConfigurationError
    from sortedrl.observe import watch

    folder = settings.run or watch.newest_run(Path("runs"))
    if folder is None or not watch.is_run(folder):
        raise ConfigurationError("run", str(folder or "runs"), "there is no run", "Name a run folder, as in runs/NAME.")
    if settings.dry_run:
        _print_settings(as_json(settings), {"run": str(folder)}, as_object=settings.json_output)
        return 0
    try:
        if settings.json_output:
            seen = watch.state(folder, settings.stopped_after_seconds)
            print(json.dumps(seen))
            return int(seen.get("outcome") == watch.STOPPED)
        with _run_console(settings) as console:
            watched = watch.follow(folder, console, stopped_after_seconds=settings.stopped_after_seconds)
    except watch.DamagedLog as error:
        print(f"sortedrl: {error}; `sortedrl report` shows the intact part", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(watch.outcome_line(folder, watched))
    return int(watched.outcome == watch.STOPPED)


def _report(words: Sequence[str]) -> int:
    from sortedrl.config import Report

    return _guarded(Report, words, "sortedrl report", _run_report)


def _run_report(settings: Any) -> int:
    """With --json the page is written only where --out names it."""
    from pathlib import Path

    from sortedrl.command_line import train_command
    from sortedrl.config import as_json
    from sortedrl.core.schedule import ConfigurationError
    from sortedrl.observe import watch
    from sortedrl.observe.report import build as report
    from sortedrl.observe.report import runs as report_runs

    newest = watch.newest_run(Path("runs"))
    paths = settings.runs or ([newest] if newest else [])
    if not paths:
        raise ConfigurationError("runs", "runs", "there is no run", "Name a run folder, as in runs/NAME.")
    page = settings.out or report.default_page(paths)
    if settings.dry_run:
        _print_settings(as_json(settings), {"page": str(page)}, as_object=settings.json_output)
        return 0
    with _Progress("reading runs", quiet=settings.json_output) as progress:
        runs = report_runs.read_runs(paths, progress)
    if settings.out is not None or not settings.json_output:
        commands = [train_command(run.settings) if run.has_configuration else None for run in runs]
        report.write(page, runs, commands, __version__)
    if settings.json_output:
        written = str(page) if settings.out is not None else None
        print(json.dumps({**report.as_json(runs), "page": written, "version": __version__}))
        return 0
    print(report.as_json(runs)["conclusion"])
    for run in runs:
        for notice in run.notices:
            print(f"{run.name}: {notice}", file=sys.stderr)
    print(f"report in {page} ({page.stat().st_size / 1e6:.1f} MB)")
    return 0


def _trace(words: Sequence[str]) -> int:
    from sortedrl.config import Trace

    return _guarded(Trace, words, "sortedrl trace", _run_trace)


def _run_trace(settings: Any) -> int:
    from sortedrl.config import as_json
    from sortedrl.core.events import Started

    source = settings.run / "events.jsonl" if settings.run.is_dir() else settings.run
    out = settings.out or source.with_name("trace.json")
    if settings.dry_run:
        _print_settings(as_json(settings), {"reads": str(source), "writes": str(out)}, as_object=settings.json_output)
        return 0
    log, unreadable = _intact_log(source)
    _write_trace(log, out)
    slices = sum(isinstance(event, Started) for event in log)
    if settings.json_output:
        print(json.dumps({"trace": str(out), "slices": slices, "unreadable_lines": unreadable}))
        return 0
    if unreadable:
        print(f"sortedrl: {unreadable} lines of {source} cannot be read and are left out", file=sys.stderr)
    print(f"{slices} slices in {out}: open it at https://ui.perfetto.dev (the file stays on your machine)")
    return 0


def _intact_log(source: Any) -> tuple[list[Any], int]:
    """The readable events of a log, and the number of unreadable lines."""
    from sortedrl.core.events import read_intact
    from sortedrl.core.schedule import ConfigurationError
    from sortedrl.observe.report.repair import repaired

    fix = "Name a run folder, as in runs/NAME, or an event log."
    try:
        intact, damage = read_intact(source)
    except OSError as error:
        raise ConfigurationError("run", str(source), f"{error.strerror}", fix) from None
    if not intact:
        raise ConfigurationError("run", str(source), "it has no events", fix)
    return repaired(intact).log, len(damage)


def _write_trace(log: list[Any], out: Any) -> None:
    """Writes the whole file or nothing."""
    from sortedrl.core.atomic_write import atomic_writer
    from sortedrl.core.schedule import ConfigurationError
    from sortedrl.observe.trace import write_trace

    if out.is_dir():
        raise ConfigurationError("out", str(out), "a folder, not a file", f"Use {out / 'trace.json'}.")
    try:
        with atomic_writer(out) as file:
            write_trace(log, file)
    except OSError as error:
        raise ConfigurationError("out", str(out), f"{error.strerror}", "Name a file in a folder that exists.") from None


def _doctor(words: Sequence[str]) -> int:
    from sortedrl.config import Doctor

    return _guarded(Doctor, words, "sortedrl doctor", _run_doctor)


def _run_doctor(settings: Any) -> int:
    """Exit code 1 where the self-test failed."""
    from sortedrl.models import BUILT_IN_MODEL
    from sortedrl.studies import doctor

    if settings.dry_run:
        _print_settings({}, {"self_test": list(doctor.SELF_TESTS)}, as_object=settings.json_output)
        return 0
    installed = doctor.installation()
    if not settings.json_output:
        doctor.show_installation(_console(), installed)
    checks = doctor.self_test(BUILT_IN_MODEL)
    if settings.json_output:
        print(json.dumps({**asdict(installed), "self_test": [asdict(check) for check in checks]}))
    else:
        doctor.show_checks(_console(), checks)
    return int(any(check.failed for check in checks))


def _print_train_plan(settings: Any) -> int:
    from sortedrl.config import as_json
    from sortedrl.core.strategies.base import updates_left

    per_cohort = settings.prompts_per_cohort * settings.rollouts_per_prompt
    derived = {
        "rollouts_per_cohort": per_cohort,
        "updates_per_cohort": updates_left(per_cohort, settings.rollouts_per_update),
        "update_size_over_slots": settings.rollouts_per_update / settings.slots,
        "whole_groups": settings.wants_whole_groups(),
        "staleness_bound_versions": settings.max_staleness,
        "context_tokens": settings.max_prompt_tokens + settings.max_response_tokens,
        "kv_tokens_if_all_slots_are_at_the_limit": settings.slots
        * (settings.max_prompt_tokens + settings.max_response_tokens),
    }
    _print_settings(as_json(settings), derived, as_object=settings.json_output)
    return 0


def _needs_train_extra() -> Any:
    let_waiting_threads_sleep()
    try:
        from sortedrl.training import trainer as app
    except ImportError as error:
        raise SystemExit(_refuse(f"{error.name} is not installed: {install_hint('train')}")) from None
    return app


def _log(settings: Any) -> Callable[[str], None]:
    """Progress lines: to stdout, or to stderr where stdout is JSON."""
    stream = sys.stderr if settings.json_output else sys.stdout
    return lambda line: print(line, file=stream, flush=True)


def _run_console(settings: Any, *, ends_with_reader: bool = True) -> Any:
    """The panel on a terminal, else lines; on stderr where stdout is JSON."""
    from sortedrl.observe.console import run_console

    return run_console(sys.stderr if settings.json_output else sys.stdout, ends_with_reader=ends_with_reader)


def _print_dry_run(settings: Any, schedule: Any, prompts: int) -> int:
    from sortedrl.config import as_json
    from sortedrl.core.strategies.base import updates_left

    per_cohort = schedule.rollouts_per_cohort
    derived = {
        "rollouts_per_cohort": per_cohort,
        "updates_per_cohort": updates_left(per_cohort, schedule.rollouts_per_update),
        "rollouts_in_all": prompts * schedule.rollouts_per_prompt,
        "update_size_over_slots": schedule.rollouts_per_update / settings.slots,
        "staleness_bound_versions": schedule.max_staleness,
        "kv_tokens_if_all_slots_are_at_the_limit": settings.slots
        * (settings.prompt_tokens + settings.response_limit()),
    }
    _print_settings(as_json(settings), derived, as_object=settings.json_output)
    return 0


def _print_settings(resolved: dict[str, Any], derived: dict[str, Any], *, as_object: bool) -> None:
    if as_object:
        print(json.dumps({"settings": resolved, "derived": derived}))
        return
    for key, value in resolved.items():
        print(f"{key} = {json.dumps(value)}")
    print("\n# derived")
    for key, value in derived.items():
        print(f"# {key} = {json.dumps(value)}")


def _warn_of_cut_lengths(settings: Any) -> None:
    notice = settings.lengths_cut()
    if notice:
        print(f"sortedrl: {notice}", file=sys.stderr)


def _workload_line(settings: Any) -> str:
    limit = settings.response_limit()
    lengths = (
        f"{settings.lengths}, limit {limit:,} tokens"
        if settings.lengths
        else f"lognormal, median {settings.median_length:.5g}, sd {settings.length_sd_between:g} between"
        f" and {settings.length_sd_within:g} within prompts, limit {limit:,}"
    )
    seconds = settings.resolved_weight_update_seconds()
    more = (f", {seconds:.3g} s per weight update" if seconds else "") + (
        ", KV cache kept across weight updates" * settings.reuse_kv_cache
    )
    return (
        f"lengths: {lengths}\nslots {settings.slots}, updates of {settings.rollouts_per_update}, cohorts of "
        f"{settings.prompts_per_cohort} x {settings.rollouts_per_prompt}, step time {settings.step_time}, "
        f"seeds {' '.join(map(str, settings.seeds))}{more}"
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
    "bench": _bench,
    "profile": _profile,
    "watch": _watch,
    "trace": _trace,
    "report": _report,
    "doctor": _doctor,
}


if __name__ == "__main__":
    sys.exit(main())
