"""The live display of a run: a panel on a terminal, one plain line per update elsewhere.

    events --> Metrics, lines --> RunState --view--> panel(view, now)      drawing is a pure function of the view

A console is a sink of the event log and receives every line of metrics.jsonl. It never blocks a run: the run's thread
only folds events and takes a view, at most four times per second; rich's thread draws it once per second.
"""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self, TextIO

from rich.console import Console as Terminal
from rich.console import ConsoleOptions
from rich.live import Live
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from sortedrl.core.events import Event, Phase, Sink
from sortedrl.core.wording import printable
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_state import RunState, RunView, is_update

VIEW_SECONDS = 0.25
DRAWS_PER_SECOND = 1
MOST_COLUMNS = 84
LABEL_COLUMNS, BAR_COLUMNS = 11, 24
ROUNDING_NATS = 1e-6  # a smaller KL is rounding, as between engine and learner of one model on a CPU: not shown
MAX_REASON = 60  # characters of a rejection's reason on the line of an update
_FORMATS = {
    "reward": "{:+.2f}", "correct": "{:.0%}", "held_out": "{:.3f}", "length": "{:.0f}", "bubble": "{:.1%}",
    "goodput": "{:,.0f} tok/s", "waste": "{:.0%}", "filtered": "{:.0%}", "staleness": "{:.2f}", "mismatch": "{:.1e}",
}  # fmt: skip
_PHASE_STYLES = {"harvest": "green", "learner": "magenta", "evaluation": "cyan", "end": "default"}  # others: yellow
_BLOCKS, _BAR = "▁▂▃▄▅▆▇█", "█░"
_PLACES = ("waiting", "resumable", "ready")
_RARE_PLACES = {"queued": "queued in the engine", "environment": "in environments"}  # shown while they are in use

Log = Callable[[str], None]


def shown(metric: str, value: float) -> str:
    """A metric, formatted as in every display of a run."""
    return _FORMATS[metric].format(value)


def clock(seconds: float) -> str:
    """m:ss, or h:mm:ss from one hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    return f"{hours}:{minutes_of_hour:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def progress_line(line: dict[str, Any], remaining_seconds: float | None) -> str:
    """One plain line about an update; `line` is its line of metrics.jsonl."""
    fields = ("reward", "correct", "length", "bubble", "goodput", "waste", "staleness")
    values = line | {"staleness": line["run_staleness_mean"]}
    parts = [f"update {line['update']}/{line['updates_in_all']}", *(f"{f} {shown(f, values[f])}" for f in fields)]
    if line.get("mismatch_kl", 0.0) > ROUNDING_NATS:
        parts.append(f"mismatch {shown('mismatch', line['mismatch_kl'])}")
    if line.get("scoring_backlog"):
        parts.append(f"scoring backlog {line['scoring_backlog']}")
    if line.get("filtered_fraction"):
        parts.append(f"filtered {shown('filtered', line['filtered_fraction'])}")
    if line.get("rejected"):
        most = printable(str(line.get("rejected_most", "")))
        most = most if len(most) <= MAX_REASON else f"{most[: MAX_REASON - 3]}..."
        parts.append(f"rejected {line['rejected']}" + (f" ({most})" if most else ""))
    return "  ".join([*parts, f"ETA {'-' if remaining_seconds is None else clock(remaining_seconds)}"])


# The panel


def panel(view: RunView, now: float, options: ConsoleOptions, note: str = "") -> Panel:
    """A view at the available width. Lines never wrap: on a narrow terminal they are cut."""
    phase, width = _PHASE_STYLES.get(view.phase, "yellow"), min(options.max_width, MOST_COLUMNS)
    styles = {"update": "cyan", "phase": f"bold {phase}", "reward": "green", "slots": "green", "note": "yellow"}
    lines = Table.grid(Column(style="dim", width=LABEL_COLUMNS), Column(no_wrap=True, overflow="crop"))
    for label, words in panel_rows(view, now, note).items():
        lines.add_row(label, Text(words, styles.get(label, "")))
    title, name = Text(f"sortedrl {view.mode}"[: width - 6], "bold"), Text(view.name[: width - 6], "dim")
    return Panel(
        lines, title=title, title_align="left", subtitle=name, subtitle_align="right", border_style=phase, width=width
    )


def panel_rows(view: RunView, now: float, note: str = "") -> dict[str, str]:
    """The lines of the panel, by label."""
    snapshot, places = view.snapshot, view.places
    eta = f"ETA {'-' if view.ends_at is None else clock(max(0.0, view.ends_at - now))}"
    done = [f"{view.updates}/{view.updates_in_all}", _bar(view.updates / (view.updates_in_all or 1)), eta]
    evaluated = "" if view.evaluated is None else f" {view.evaluated[0]}/{view.evaluated[1]}"
    reward = [shown("reward", view.rewards[-1])] if view.rewards else ["-"]
    reward += [] if view.correct is None else [f"correct {shown('correct', view.correct)}"]
    held_out = [shown("held_out", score) for score in (*view.held_out[:1], *view.held_out[1:][-1:])]
    waiting = [f"{place} {places[place]}" for place in _PLACES]
    waiting += [f"{name} {places[place]}" for place, name in _RARE_PLACES.items() if places[place]]
    staleness = [f"mean {shown('staleness', snapshot.staleness_mean)}", f"max {snapshot.staleness_max}"]
    if view.mismatch is not None and view.mismatch > ROUNDING_NATS:
        staleness.append(f"mismatch {shown('mismatch', view.mismatch)}")
    fraction = snapshot.filtered_fraction
    filtered = f"filtered {shown('filtered', fraction)}" if fraction else ""
    rows = {
        "update": done if view.updates_in_all else [str(view.updates), eta],
        "phase": [f"{view.phase}{evaluated}", f"elapsed {clock(max(0.0, now - view.began_at))}"],
        "reward": [*reward, sparkline(view.rewards)],
        "held-out": [" -> ".join(held_out) or "-"],
        "slots": [f"{places['running']}/{view.slots} running", _bar(places["running"] / (view.slots or 1))],
        "rollouts": waiting,
        "scoring": [f"backlog {places['finished']}", f"rejected {snapshot.rejected}", snapshot.rejected_most],
        "bubble": [f"now {shown('bubble', snapshot.bubble_now)}", f"run {shown('bubble', snapshot.bubble)}"],
        "goodput": [shown("goodput", snapshot.goodput), f"waste {shown('waste', snapshot.waste)}", filtered],
        "length": [f"{which} {shown('length', length)}" for which, length in (view.lengths or {}).items()] or ["-"],
        "staleness": staleness,
        **({"note": [note]} if note else {}),
    }
    return {label: "   ".join(filter(None, parts)) for label, parts in rows.items()}


def sparkline(values: Sequence[float]) -> str:
    """The latest values as blocks, scaled between their min and max."""
    newest = list(values)[-BAR_COLUMNS:]
    if len(newest) < 2:
        return ""
    least, span = min(newest), max(newest) - min(newest)
    return "".join(_BLOCKS[round((value - least) / span * 7) if span else 0] for value in newest)


def _bar(share: float) -> str:
    full = round(min(1.0, share) * BAR_COLUMNS)
    return _BAR[0] * full + _BAR[1] * (BAR_COLUMNS - full)


# The consoles


class PlainConsole:
    """Shows runs, one after the other, with one line per update: for pipes, files and dumb terminals."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.note = ""  # shown below the metrics
        self.state = RunState(Metrics(), "", None)

    def begin(self, metrics: Metrics, name: str, updates_in_all: int | None) -> Sink:
        """Start a run. Feed the returned sink after `metrics`."""
        self.state = RunState(metrics, name, updates_in_all)
        return self.see

    def see(self, event: Event) -> None:
        """Its metrics have counted the event."""

    def line(self, line: dict[str, Any], *, seen_at: float | None = None, old: bool = False) -> None:
        """A line of metrics.jsonl; `old`: it existed before watching started, so it is not printed."""
        now = time.monotonic() if seen_at is None else seen_at
        self.state.add_line(line, now)
        if is_update(line) and not old:
            self.print_update(line)
        self.look(now)

    def print_update(self, line: dict[str, Any]) -> None:
        self.log(progress_line(line, self.state.remaining_seconds()))

    def evaluating(self, done: int, total: int) -> None:
        self.state.evaluating(done, total)

    def look(self, seen_at: float) -> None:
        """Show the current state of the run; its latest event was seen at `seen_at`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...


class PanelConsole(PlainConsole):
    """The panel, shown between `__enter__` and `__exit__`; log lines scroll by above it."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(self._print)
        self._terminal = terminal
        self._due = 0.0  # when to take the next view
        self._drawn_columns = 0
        self._is_over = False
        self.look(time.monotonic())
        # Redirection makes other output appear above the panel. Leave a piped stdout alone.
        redirect = sys.stdout.isatty()
        self._live = _Lasting(
            console=terminal, refresh_per_second=DRAWS_PER_SECOND, get_renderable=self._drawn, redirect_stdout=redirect
        )

    def _print(self, line: str) -> None:
        with suppress(OSError):  # the terminal is gone, but the run continues
            self._terminal.print(printable(line), markup=False, emoji=False, highlight=False, soft_wrap=True)

    def see(self, event: Event) -> None:
        if type(event) is Phase:
            self._due = 0.0
        self._look_if_due()

    def print_update(self, line: dict[str, Any]) -> None:
        """The panel shows it."""

    def evaluating(self, done: int, total: int) -> None:
        super().evaluating(done, total)
        self._look_if_due()

    def _look_if_due(self) -> None:
        if (now := time.monotonic()) >= self._due:
            self.look(now)

    def look(self, seen_at: float) -> None:
        self._view = self.state.view(seen_at)
        self._due = time.monotonic() + VIEW_SECONDS

    def __enter__(self) -> Self:
        self._is_over = False
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over = True
        self.look(self._view.seen_at)
        with suppress(OSError):
            self._live.stop()

    def _drawn(self) -> Panel:
        view, columns = self._view, self._terminal.width
        if columns < min(self._drawn_columns, MOST_COLUMNS):
            # A narrower terminal has rewrapped the old drawing, so its row count is wrong: clear the screen.
            self._terminal.clear()
        self._drawn_columns = columns
        now = view.seen_at if self._is_over else time.monotonic()
        return panel(view, now, self._terminal.options, self.note)


class _Lasting(Live):
    """Goes on without a terminal that is gone."""

    def refresh(self) -> None:
        with suppress(OSError):
            super().refresh()


def run_console(stream: TextIO, *, ends_with_reader: bool = True) -> PlainConsole:
    """A panel if the stream is a capable terminal whose encoding has its characters, otherwise plain lines.

    `ends_with_reader`: raise `BrokenPipeError` when the reader is gone. A training run continues instead.
    """
    terminal = Terminal(file=stream)
    if stream.isatty() and not terminal.is_dumb_terminal and _can_write(stream, _BLOCKS + _BAR):
        return PanelConsole(terminal)

    def log(line: str) -> None:
        try:
            print(printable(line), file=stream, flush=True)
        except OSError:
            if ends_with_reader:
                raise

    return PlainConsole(log)


def _can_write(stream: TextIO, characters: str) -> bool:
    try:
        return bool(characters.encode(stream.encoding or "utf-8"))
    except UnicodeEncodeError:
        return False
