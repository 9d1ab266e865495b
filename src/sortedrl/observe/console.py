"""The live display of a run: a panel on a terminal, one plain line per update elsewhere.

    events, lines --> RunState --view--> panel(view, now)      drawing is a pure function of the view

A console is a sink of the event log and receives every line of metrics.jsonl. It never blocks a run: the run's thread
only folds events and takes a view, at most four times per second; a separate thread draws it. Drawing is limited to
`MOST_SHARE` of the time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console as Terminal
from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from sortedrl.core import events
from sortedrl.core.events import Event, Sink
from sortedrl.core.wording import printable
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_state import ROUNDING_NATS, RunState, RunView, is_update

REDRAW_SECONDS = 0.25
MOST_SHARE = 0.002  # maximum fraction of the time spent drawing
MOST_COLUMNS = 84
LABEL_COLUMNS = 11
_FORMATS = {
    "reward": "{:+.2f}",
    "correct": "{:.0%}",
    "held_out": "{:.3f}",
    "length": "{:.0f}",
    "bubble": "{:.1%}",
    "goodput": "{:,.0f} tok/s",
    "waste": "{:.0%}",
    "staleness": "{:.2f}",
    "mismatch": "{:.1e}",
}
_PHASE_STYLES = {"harvest": "green", "learner": "magenta", "evaluation": "cyan", "end": "default"}  # others: yellow
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"

Log = Callable[[str], None]


def shown(metric: str, value: float) -> str:
    """A metric, formatted as in every display of a run."""
    return _FORMATS[metric].format(value)


def clock(seconds: float) -> str:
    """m:ss, or h:mm:ss from one hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes_of_hour = divmod(minutes, 60)
    return f"{hours}:{minutes_of_hour:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


MAX_REASON = 60  # characters of a rejection's reason on the line of an update


def progress_line(line: dict[str, Any], remaining_seconds: float | None) -> str:
    """One plain line about an update; `line` is its line of metrics.jsonl."""
    eta = "-" if remaining_seconds is None else clock(remaining_seconds)
    return (
        f"update {line['update']}/{line['updates_in_all']}  reward {shown('reward', line['reward'])}  "
        f"correct {shown('correct', line['correct'])}  length {shown('length', line['length'])}  "
        f"bubble {shown('bubble', line['bubble'])}  goodput {shown('goodput', line['goodput'])}  "
        f"waste {shown('waste', line['waste'])}  staleness {shown('staleness', line['run_staleness_mean'])}  "
        f"{_update_warnings(line)}ETA {eta}"
    )


def _update_warnings(line: dict[str, Any]) -> str:
    """Parts of the line that only some runs have: an engine that differs from the learner, a slow or failing reward."""
    parts = []
    if line.get("mismatch_kl", 0.0) > ROUNDING_NATS:
        parts.append(f"mismatch {shown('mismatch', line['mismatch_kl'])}")
    if line.get("scoring_backlog"):
        parts.append(f"scoring backlog {line['scoring_backlog']}")
    if line.get("rejected"):
        most = _cut(printable(str(line.get("rejected_most", ""))), MAX_REASON)
        parts.append(f"rejected {line['rejected']}" + (f" ({most})" if most else ""))
    return "".join(f"{part}  " for part in parts)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: max(0, characters - 3)] + "..."


# The panel


class RunPanel:
    """Draws a view at the available width."""

    def __init__(self, view: RunView, now: float, note: str = "") -> None:
        self._view = view
        self._now = now
        self._note = note

    def __rich_console__(self, console: Terminal, options: ConsoleOptions) -> RenderResult:
        """Draws the frame itself: rich's panel wraps and measures every line again, at three times the cost."""
        view = self._view
        width = min(options.max_width, MOST_COLUMNS)
        rows = panel_rows(view, self._now, width - 4, ascii_only=options.ascii_only)
        if self._note:
            rows.append(_row("note", [Text(self._note, style="yellow")], width - 4))
        top, bottom, side = ("+-+", "+-+", "|") if options.ascii_only else ("╭─╮", "╰─╯", "│")
        border = console.get_style(_phase_style(view.phase))
        yield from _edge(console, top, Text.assemble((f"sortedrl {view.mode}", "bold")), width, border, left=True)
        for row in rows:
            yield Segment(f"{side} ", border)
            yield from row.render(console)
            yield Segment(" " * (width - 4 - row.cell_len))
            yield Segment(f" {side}\n", border)
        yield from _edge(console, bottom, Text.assemble((view.name, "dim")), width, border, left=False)


def _edge(console: Terminal, corners: str, words: Text, width: int, border: Style, *, left: bool) -> Iterator[Segment]:
    """The upper or lower edge of the frame with a title, truncated if necessary."""
    words.truncate(max(0, width - 6), overflow="ellipsis" if corners.startswith("╰") else "crop")
    line = corners[1] * (width - 6 - words.cell_len)
    yield Segment(f"{corners[:2]}{'' if left else line} ", border)
    yield from words.render(console)
    yield Segment(f" {line if left else ''}{corners[1:]}\n", border)


def _phase_style(phase: str) -> str:
    return _PHASE_STYLES.get(phase, "yellow")


def panel_rows(view: RunView, now: float, width: int, *, ascii_only: bool = False) -> list[Text]:
    """The lines of the panel. Lines never wrap: on a narrow terminal, their last parts are left out."""
    snapshot, places, lengths = view.snapshot, view.places, view.lengths
    reward = [Text(shown("reward", view.rewards[-1]), style="bold")] if view.rewards else [Text("-")]
    if view.correct is not None:
        reward.append(_named("correct", shown("correct", view.correct)))
    if len(view.rewards) > 1:
        room = width - LABEL_COLUMNS - sum(len(part) + 3 for part in reward)
        reward.insert(1, Text(sparkline(view.rewards, max(0, room), ascii_only=ascii_only), style="green"))
    held_out = [shown("held_out", score) for score in view.held_out]
    length_parts = [Text("-")]
    if lengths is not None:
        length_parts = [
            _named("mean", shown("length", lengths.mean)),
            _named("shortest", str(lengths.shortest)),
            _named("longest", str(lengths.longest)),
        ]
    staleness = [
        _named("mean", shown("staleness", snapshot.staleness_mean)),
        _named("max", str(snapshot.staleness_max)),
    ]
    if view.mismatch is not None and view.mismatch > ROUNDING_NATS:
        staleness.append(_named("mismatch", shown("mismatch", view.mismatch)))
    goodput = [Text(shown("goodput", snapshot.goodput), style="bold"), _named("waste", shown("waste", snapshot.waste))]
    scoring = [_named("backlog", str(places.finished)), _named("rejected", str(snapshot.rejected))]
    if snapshot.rejected:
        scoring.append(Text(_cut(snapshot.rejected_most, width - LABEL_COLUMNS - sum(len(p) + 3 for p in scoring))))
    waiting = [_named(name, str(count)) for name, count in _places_shown(places._asdict())]
    return [
        _update_row(view, now, width, ascii_only),
        _row("phase", _phase_parts(view, now), width),
        _row("reward", reward, width),
        _row("held-out", [Text(" -> ".join((held_out[0], held_out[-1])[: len(held_out)]) if held_out else "-")], width),
        _row("slots", _slot_parts(places.running, view.slots, width, ascii_only), width),
        _row("rollouts", waiting, width),
        _row("scoring", scoring, width),
        _row(
            "bubble",
            [_named("now", shown("bubble", snapshot.bubble_now)), _named("run", shown("bubble", snapshot.bubble))],
            width,
        ),
        _row("goodput", goodput, width),
        _row("length", length_parts, width),
        _row("staleness", staleness, width),
    ]


def sparkline(values: Sequence[float], columns: int, *, ascii_only: bool = False) -> str:
    """The latest values as blocks, scaled between their min and max."""
    newest = list(values)[-columns:] if columns > 0 else []
    if not newest:
        return ""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    least, span = min(newest), max(newest) - min(newest)
    return "".join(blocks[round((value - least) / span * (len(blocks) - 1)) if span else 0] for value in newest)


def _update_row(view: RunView, now: float, width: int, ascii_only: bool) -> Text:
    known = view.updates_in_all is not None
    count = Text(f"{view.updates}/{view.updates_in_all}" if known else str(view.updates), style="bold")
    eta = _named("ETA", "-" if view.ends_at is None else clock(max(0.0, view.ends_at - now)))
    room = width - LABEL_COLUMNS - len(count) - len(eta) - 6
    if not view.updates_in_all or room < 4:
        return _row("update", [count, eta], width)
    return _row("update", [count, _bar(view.updates / view.updates_in_all, room, "cyan", ascii_only), eta], width)


def _phase_parts(view: RunView, now: float) -> list[Text]:
    words = view.phase if view.evaluated is None else f"{view.phase} {view.evaluated[0]}/{view.evaluated[1]}"
    return [
        Text(words, style=f"bold {_phase_style(view.phase)}"),
        _named("elapsed", clock(max(0.0, now - view.began_at))),
    ]


def _slot_parts(running: int, slots: int, width: int, ascii_only: bool) -> list[Text]:
    count = Text.assemble((f"{running}/{slots}", "bold"), (" running", "dim"))
    return [count, _bar(running / slots if slots else 0.0, width - LABEL_COLUMNS - len(count) - 3, "green", ascii_only)]


def _places_shown(places: dict[str, int]) -> list[tuple[str, int]]:
    """Waiting rollouts by state; rare states only while they are in use. Unscored ones have a row of their own."""
    always = ("waiting", "resumable", "ready")
    order = ("waiting", "resumable", "ready", "queued", "environment")
    names = {"queued": "queued in the engine", "environment": "in environments"}
    return [(names.get(name, name), places[name]) for name in order if name in always or places[name]]


def _bar(share: float, columns: int, style: str, ascii_only: bool) -> Text:
    full = round(min(1.0, share) * columns)
    filled, empty = ("#", ".") if ascii_only else ("█", "░")
    return Text.assemble((filled * full, style), (empty * (columns - full), "dim"))


def _named(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), value)


def _row(label: str, parts: Sequence[Text], width: int) -> Text:
    """The label, and as many parts as fit."""
    row = Text.assemble((label.ljust(LABEL_COLUMNS), "dim"))
    for place, part in enumerate(part for part in parts if part):
        gap = "   " if place else ""
        if place and len(row) + len(gap) + len(part) > width:
            break
        row.append(gap)
        row.append_text(part)
    row.truncate(width)
    return row


# The consoles


class RunConsole(Protocol):
    """Shows runs, one after the other. `note`: a message shown below the metrics."""

    note: str

    def log(self, line: str) -> None: ...

    def begin(self, metrics: Metrics, name: str, updates_in_all: int | None) -> Sink:
        """Start a run. Feed the returned sink after `metrics`."""

    def resumed(self, updates: int) -> None:
        """The run was resumed after this many updates; their lines follow."""

    def line(self, line: dict[str, Any], *, seen_at: float | None = None, old: bool = False) -> None:
        """A line of metrics.jsonl; `old`: it existed before watching started, so it is not printed."""

    def evaluating(self, done: int, total: int) -> None: ...

    def look(self, seen_at: float) -> None:
        """Show the current state of the run; its latest event was seen at `seen_at`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PlainConsole:
    """One line per update: for pipes, files and dumb terminals."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.note = ""
        self.state = RunState(Metrics(), "", None)

    def log(self, line: str) -> None:
        self._log(line)

    def begin(self, metrics: Metrics, name: str, updates_in_all: int | None) -> Sink:
        self.state = RunState(metrics, name, updates_in_all)
        return self.state

    def resumed(self, updates: int) -> None:
        self.state.resumed(updates)

    def line(self, line: dict[str, Any], *, seen_at: float | None = None, old: bool = False) -> None:
        self.state.add_line(line, time.monotonic() if seen_at is None else seen_at)
        if is_update(line) and not old:
            self.log(progress_line(line, self.state.remaining_seconds()))

    def evaluating(self, done: int, total: int) -> None:
        """Ignored: one line per sample would be noise."""

    def look(self, seen_at: float) -> None:
        """Nothing to do: lines are printed as they arrive."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...


class PanelConsole:
    """The panel, shown between `__enter__` and `__exit__`; log lines scroll by above it."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.state = RunState(Metrics(), "", None)
        self.note = ""
        self._view = self.state.view(time.monotonic())
        self._due = 0.0  # when to take the next view
        self._drawn_columns = 0
        self._is_over = False
        self._live: Live | None = None
        self._closing = threading.Event()
        self._drawer: threading.Thread | None = None

    def log(self, line: str) -> None:
        with suppress(OSError):  # the terminal is gone, but the run continues
            self._terminal.print(printable(line), markup=False, emoji=False, highlight=False, soft_wrap=True)

    def begin(self, metrics: Metrics, name: str, updates_in_all: int | None) -> Sink:
        self.state = RunState(metrics, name, updates_in_all)
        return self.sink

    def resumed(self, updates: int) -> None:
        self.state.resumed(updates)

    def sink(self, event: Event) -> None:
        self.state(event)
        now = time.monotonic()
        if now >= self._due or type(event) is events.Phase:
            self.look(now)

    def line(self, line: dict[str, Any], *, seen_at: float | None = None, old: bool = False) -> None:
        now = time.monotonic() if seen_at is None else seen_at
        self.state.add_line(line, now)
        self.look(now)

    def evaluating(self, done: int, total: int) -> None:
        self.state.evaluated = (done, total)
        now = time.monotonic()
        if now >= self._due:
            self.look(now)

    def look(self, seen_at: float) -> None:
        self._view = self.state.view(seen_at)
        self._due = time.monotonic() + REDRAW_SECONDS

    def __enter__(self) -> Self:
        self._is_over = False
        self._closing.clear()
        # Redirection makes other output appear above the panel. Leave a piped stdout alone.
        redirect = sys.stdout.isatty()
        self._live = Live(
            console=self._terminal, auto_refresh=False, get_renderable=self._drawing, redirect_stdout=redirect
        )
        self._live.start(refresh=True)
        self._drawer = threading.Thread(target=self._draw_until_closed, args=(self._live,), daemon=True)
        self._drawer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        if self._drawer is not None:
            self._drawer.join()
        self._is_over = True
        self._view = self.state.view(self._view.seen_at)
        if self._live is not None:
            with suppress(OSError):
                self._live.stop()

    def _drawing(self) -> RunPanel:
        view = self._view
        columns = self._terminal.width
        if columns < min(self._drawn_columns, MOST_COLUMNS):
            # A narrower terminal has rewrapped the old drawing, so its row count is wrong: clear the screen.
            self._terminal.clear()
        self._drawn_columns = columns
        return RunPanel(view, view.seen_at if self._is_over else time.monotonic(), self.note)

    def _draw_until_closed(self, live: Live) -> None:
        pause = REDRAW_SECONDS
        while not self._closing.wait(pause):
            began = time.thread_time()
            try:
                live.refresh()
            except OSError:
                return
            pause = max(REDRAW_SECONDS, (time.thread_time() - began) / MOST_SHARE)


def run_console(stream: TextIO, *, ends_with_reader: bool = True) -> PlainConsole | PanelConsole:
    """A panel if the stream is a capable terminal, otherwise plain lines.

    `ends_with_reader`: raise `BrokenPipeError` when the reader is gone. A training run continues instead.
    """
    terminal = Terminal(file=stream)
    if stream.isatty() and not terminal.is_dumb_terminal:
        return PanelConsole(terminal)

    def log(line: str) -> None:
        try:
            print(printable(line), file=stream, flush=True)
        except OSError:
            if ends_with_reader:
                raise

    return PlainConsole(log)
