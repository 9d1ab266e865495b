"""The metrics sent to experiment trackers: one table of names, and the trackers.

Every tracker, of which the Prometheus endpoint is one, receives the lines of metrics.jsonl: they show the numbers of
that file and compute none. docs/metrics.md explains each metric; a test keeps it in sync with the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING, Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.settings.install_hint import install_hint

if TYPE_CHECKING:
    from pathlib import Path

STEP = "update"  # counts from 1; an evaluation before the first update is at 0
PROJECT = "sortedrl"
LOOPBACK = "127.0.0.1"
METRICS = (  # docs/metrics.md has their units
    *("reward", "correct", "held_out_score", "length", "truncated_fraction", "rejected", "scoring_backlog"),
    *("bubble", "idle", "goodput", "waste", "filtered_fraction", "tokens_per_step"),
    *("run_staleness_mean", "staleness_mean", "staleness_max", "stale_fraction", "stale_kl"),
    *("ess_token_fraction", "ess_rollout_fraction", "mismatch_kl", "mismatch_max_abs", "clipped_fraction"),
    *("importance_weight_mean", "entropy", "grad_norm", "zero_variance_groups", "skipped_steps", "kl_reference"),
    "explained_variance",
)


def tracked(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a line of metrics.jsonl, by name. Missing ones are left out."""
    score = line.get("held_out", {}).get("value")
    values = {**line, "held_out_score": score}
    return {name: values[name] for name in METRICS if values.get(name) is not None}


@dataclass(frozen=True)
class Tracker:
    name: str
    log: Callable[[int, Mapping[str, float]], None]  # values after an update
    close: Callable[[], None]


class Trackers:
    """Sends every line to all trackers. If one fails, its error is logged and the run continues without it."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._open: list[Tracker | Endpoint] = []

    def add(self, tracker: Tracker | Endpoint) -> None:
        self._open.append(tracker)

    def line(self, line: Mapping[str, Any]) -> None:
        values = tracked(line)
        for tracker in list(self._open):
            self._guarded(tracker, tracker.log, line[STEP], values)

    def close(self) -> None:
        for tracker in self._open:
            self._guarded(tracker, tracker.close)
        self._open = []

    def _guarded(self, tracker: Tracker | Endpoint, act: Callable[..., None], *given: Any) -> None:
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
    if name == "tensorboard":
        return _tensorboard(folder)
    named: dict[str, Any] = {"project": PROJECT, "name": folder.name, "group": folder.name, "config": dict(settings)}
    if name == "wandb":
        import wandb

        run = wandb.init(**named, dir=folder)
        run.define_metric("*", step_metric=STEP)
        finish = run.finish
    else:
        import trackio

        with redirect_stdout(sys.stderr):  # stdout may carry the command's JSON
            run = trackio.init(**named)
        finish = trackio.finish  # run.finish would be called again at exit

    def log(update: int, values: Mapping[str, float]) -> None:
        """The update is a separate metric, not the tracker's step, which must never decrease as it would in a resumed
        run."""
        run.log({STEP: update, **values})

    def close() -> None:
        with redirect_stdout(sys.stderr):
            finish()

    return Tracker(name, log, close)


def _tensorboard(folder: Path) -> Tracker:
    """View with `tensorboard --logdir RUN/tensorboard`. Values are 32-bit floats."""
    from tensorboard.summary import Writer

    writer = Writer(str(folder / "tensorboard"))

    def log(update: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, update)
        writer.flush()

    return Tracker("tensorboard", log, writer.close)


# Prometheus


class Endpoint:
    """The latest value of each metric as `sortedrl_NAME` at http://127.0.0.1:PORT/metrics, in Prometheus' text format.

    Port 0 picks a free port; see `url`. For access from other machines, set up a proxy.
    """

    name = "prometheus"

    def __init__(self, port: int) -> None:
        values: dict[str, float] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path == "/metrics"
                body = exposition(dict(values)).encode() if is_known else b"metrics are at /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *parts: object) -> None:
                """Silent: scrapes come every few seconds."""

        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        except OSError as error:
            fix = "Use another port, or 0 for a free one."
            raise ConfigurationError("prometheus_port", port, f"{error.strerror}", fix) from None
        self._values = values
        self.url = f"http://{LOOPBACK}:{self._server.server_port}/metrics"
        Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    def log(self, update: int, values: Mapping[str, float]) -> None:
        self._values |= {STEP: update, **values}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def exposition(values: Mapping[str, float]) -> str:
    """Metrics in the text format. Numbers are printed with full precision."""
    return "".join(
        f"# TYPE sortedrl_{name} gauge\nsortedrl_{name} {values[name]!r}\n"
        for name in (STEP, *METRICS)
        if name in values
    )
