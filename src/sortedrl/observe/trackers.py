"""The metrics sent to experiment trackers: one table of names, and the trackers.

Every tracker and the Prometheus endpoint receives the lines of metrics.jsonl: they show the numbers of that file and
compute none. docs/metrics.md explains each metric; a test keeps it in sync with the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sortedrl.core.configuration import ConfigurationError
from sortedrl.settings.install_hint import install_hint

if TYPE_CHECKING:
    from pathlib import Path

STEP = "update"  # counts from 1; an evaluation before the first update is at 0
PROJECT = "sortedrl"


class Metric(NamedTuple):
    name: str
    field: str  # of a line of metrics.jsonl; a dot denotes a nested field
    unit: str
    healthy: str


METRICS = (
    Metric("reward", "reward", "reward", "rises, then levels off"),
    Metric("correct", "correct", "fraction", "rises; 0.1 to 0.9 is most informative"),
    Metric("held_out_score", "held_out.value", "fraction", "rises with correct"),
    Metric("length", "length", "tokens", "well below the limit"),
    Metric("truncated_fraction", "truncated_fraction", "fraction", "below 0.05"),
    Metric("rejected", "rejected", "rollouts", "0"),
    Metric("scoring_backlog", "scoring_backlog", "rollouts", "no trend"),
    Metric("bubble", "bubble", "fraction", "below 0.1 in partial modes"),
    Metric("idle", "idle", "fraction", "bubble and the learner's part, little else"),
    Metric("goodput", "goodput", "tokens/s", "steady, near the limit of sortedrl simulate"),
    Metric("waste", "waste", "fraction", "0 in partial and planned modes"),
    Metric("run_staleness_mean", "run_staleness_mean", "versions", "below 1; 0 on-policy"),
    Metric("staleness_mean", "staleness_mean", "versions", "around run_staleness_mean"),
    Metric("staleness_max", "staleness_max", "versions", "at most max_staleness"),
    Metric("stale_fraction", "stale_fraction", "fraction", "0 on-policy"),
    Metric("stale_kl", "stale_kl", "nats", "below 0.05"),
    Metric("ess_token_fraction", "ess_token_fraction", "fraction", "above 0.9"),
    Metric("ess_rollout_fraction", "ess_rollout_fraction", "fraction", "no sudden fall"),
    Metric("mismatch_kl", "mismatch_kl", "nats", "below 1e-3, and flat"),
    Metric("mismatch_max_abs", "mismatch_max_abs", "nats", "below 0.5 in bf16, 1e-3 in fp32"),
    Metric("clipped_fraction", "clipped_fraction", "fraction", "below 0.05"),
    Metric("importance_weight_mean", "importance_weight_mean", "ratio", "0.9 to 1.1"),
    Metric("entropy", "entropy", "nats", "falls slowly, stays above 0"),
    Metric("grad_norm", "grad_norm", "norm", "no trend, no jumps"),
    Metric("zero_variance_groups", "zero_variance_groups", "groups", "below half of the update's groups"),
    Metric("skipped_steps", "skipped_steps", "steps", "0"),
    Metric("kl_reference", "kl_reference", "nats", "grows slowly"),
    Metric("explained_variance", "explained_variance", "fraction", "rises above 0.3"),
)


def tracked(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line of metrics.jsonl, by name. Missing ones are left out."""
    found = {metric.name: _reached(line, metric.field) for metric in METRICS}
    return {name: value for name, value in found.items() if value is not None}


def _reached(line: Mapping[str, Any], field: str) -> Any:
    value: Any = line
    for key in field.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


class Tracker(Protocol):
    name: str

    def log(self, update: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """Sends every line to all trackers. If one fails, its error is logged and the run continues without it."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._open: list[Tracker] = []

    def add(self, tracker: Tracker) -> None:
        self._open.append(tracker)

    def line(self, line: Mapping[str, Any]) -> None:
        values = tracked(line)
        for tracker in list(self._open):
            self._guarded(tracker, tracker.log, line[STEP], values)

    def close(self) -> None:
        for tracker in self._open:
            self._guarded(tracker, tracker.close)
        self._open = []

    def _guarded(self, tracker: Tracker, act: Callable[..., None], *given: Any) -> None:
        """A failing tracker must not end the run."""
        try:
            act(*given)
        except Exception as error:
            self._open = [other for other in self._open if other is not tracker]
            self._log(f"tracker {tracker.name} failed and is now off ({type(error).__name__}: {error})")


def require_packages(names: Sequence[str]) -> None:
    for name in names:
        if find_spec(name) is None:
            raise ConfigurationError("tracker", name, f"the package {name} is not installed", f"{install_hint(name)}.")


def require_login(names: Sequence[str]) -> None:
    """Weights & Biases needs a login or its offline mode: check before the run writes anything."""
    if "wandb" in names:
        import wandb

        try:
            wandb.login()
        except wandb.errors.Error as error:
            why = str(error).partition("\n")[0].rstrip(".")
            fix = "Log in with `wandb login`, or set the environment variable WANDB_MODE=offline."
            raise ConfigurationError("tracker", "wandb", why, fix) from None


def open_tracker(name: str, folder: Path, settings: Mapping[str, Any]) -> Tracker:
    """`folder` is the run folder; its name is the run's name in the tracker."""
    return OPENERS[name](folder, dict(settings))


class TensorBoard:
    """View with `tensorboard --logdir RUN/tensorboard`. Values are 32-bit floats."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder / self.name))

    def log(self, update: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class RunTracker:
    """Weights & Biases and trackio, which log dictionaries.

    The update is a separate metric, not the tracker's step, which must never decrease as it would in a resumed run.
    """

    def __init__(self, name: str, log: Callable[[dict[str, float]], None], finish: Callable[[], None]) -> None:
        self.name = name
        self._log = log
        self._finish = finish

    def log(self, update: int, values: Mapping[str, float]) -> None:
        self._log({STEP: update, **values})

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self._finish()


def _open_wandb(folder: Path, settings: dict[str, Any]) -> Tracker:
    import wandb

    run = wandb.init(project=PROJECT, name=folder.name, group=folder.name, dir=folder, config=settings)
    run.define_metric("*", step_metric=STEP)
    return RunTracker("wandb", run.log, run.finish)


def _open_trackio(folder: Path, settings: dict[str, Any]) -> Tracker:
    import trackio

    with redirect_stdout(sys.stderr):  # stdout may carry the command's JSON
        run = trackio.init(project=PROJECT, name=folder.name, group=folder.name, config=settings)
    return RunTracker("trackio", run.log, trackio.finish)  # run.finish would be called again at exit


OPENERS: dict[str, Callable[[Path, dict[str, Any]], Tracker]] = {
    "tensorboard": lambda folder, settings: TensorBoard(folder),
    "wandb": _open_wandb,
    "trackio": _open_trackio,
}
