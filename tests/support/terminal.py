"""A terminal for tests: a command in a real pseudo-terminal, a screen that obeys it, and the panel on that screen."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forked import Command
from toy_runs import SMALL_TRAINING, flags

SUPPORT = Path(__file__).parent
INHERITED = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
ENVIRONMENT = INHERITED | {"PYTHONPATH": f"{SUPPORT.parents[1] / 'src'}:{SUPPORT}", "OMP_NUM_THREADS": "1"}
SMALL = SMALL_TRAINING | {
    "scoring": "at-once", "rollouts_per_update": 16, "max_response_tokens": 24, "eval_problems": 8,
    "learning_rate": 3e-3,
}  # fmt: skip
_TOKEN = re.compile(r"\x1b\[(?P<args>[?0-9;]*)(?P<verb>[A-Za-z])|(?P<plain>[^\x1b\r\n]+)|(?P<control>[\r\n])")


class Screen:
    """Understands what rich's live display uses and no more; anything else fails the test."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.lines: list[str] = [""]  # with all that has scrolled by
        self.row = self.column = 0
        self.cursor_is_shown = True

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            assert match, f"not understood: {text[at : at + 20]!r}"
            at = match.end()
            if match["plain"]:
                self._write(match["plain"])
            elif match["control"] == "\r":
                self.column = 0
            elif match["control"]:
                self._next_line()
            else:
                self._obey(match["verb"], match["args"])

    def _write(self, text: str) -> None:
        for character in text:
            if self.column == self.columns:
                self._next_line()
                self.column = 0
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1

    def _next_line(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _obey(self, verb: str, args: str) -> None:
        if verb == "m":
            return
        if verb in "lh" and args == "?25":
            self.cursor_is_shown = verb == "h"
        elif verb == "A":
            self.row = max(0, self.row - int(args or 1))
        elif verb == "K" and args == "2":
            self.lines[self.row] = ""
        elif verb == "H" and not args:
            self.row = self.column = 0
        elif verb == "J" and args == "2":
            self.lines = [""] * len(self.lines)
        else:
            raise AssertionError(f"not understood: CSI {args}{verb}")


@dataclass
class Session:
    code: int
    output: str
    seconds: float
    screen: Screen
    has_acted: bool  # the width changed, or Ctrl-C came


def in_terminal(
    words: Sequence[str],
    env: Mapping[str, str],
    *,
    columns: int = 80,
    when: Callable[[str], bool] = lambda output: False,
    resize_to: int | None = None,
    interrupt: bool = False,
    timeout: float = 240,
) -> Session:
    """Run `sortedrl WORDS` in a pseudo-terminal. Once, when the output is `when`, the width changes or Ctrl-C comes."""
    master, slave = pty.openpty()
    _set_columns(slave, columns)
    clean = {key: value for key, value in env.items() if key not in ("COLUMNS", "LINES")}
    began = time.monotonic()
    command = Command(words, environment={"TERM": "xterm-256color"} | clean, terminal=os.ttyname(slave))
    output, screen = "", Screen(columns)
    pending = b""
    has_acted = False
    try:
        while time.monotonic() - began < timeout:
            if not select.select([master], [], [], 0.1)[0]:
                if command.process.is_alive():
                    continue
                break
            pending += os.read(master, 65536)
            text, pending = _whole(pending)
            output += text
            screen.feed(text)
            if not has_acted and when(output):
                has_acted = True
                if interrupt:
                    command.send(signal.SIGINT)
                if resize_to is not None:
                    screen.columns = resize_to
                    _set_columns(master, resize_to)
        code = command.wait(10).returncode
    finally:
        command.process.kill()
        os.close(slave)
        os.close(master)
    return Session(code, output, time.monotonic() - began, screen, has_acted)


def _whole(content: bytes) -> tuple[str, bytes]:
    """Text up to the last whole sequence, and the rest."""
    cut = content.rfind(b"\x1b")
    if cut >= 0 and not re.match(rb"\x1b\[[?0-9;]*[A-Za-z]", content[cut:]):
        content, rest = content[:cut], content[cut:]
    else:
        rest = b""
    try:
        return content.decode(), rest
    except UnicodeDecodeError as error:
        return content[: error.start].decode(), content[error.start :] + rest


def _set_columns(descriptor: int, columns: int) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))


def train_command(model: Path, out: Path, *words: str) -> list[str]:
    return ["train", "--model", str(model), "--out", str(out), *flags(SMALL), *words]


def panel_of(session: Session) -> dict[str, str]:
    """The lines of the one panel that is left on the screen, by their labels."""
    framed = [line for line in session.screen.lines if line.startswith(("╭", "│", "╰"))]
    assert [line[0] for line in framed] == ["╭", *"│" * (len(framed) - 2), "╰"], "more than one panel, or half of one"
    rows = (line.strip("│").split(maxsplit=1) for line in framed[1:-1])
    return {label: rest.strip() for label, rest in rows}
