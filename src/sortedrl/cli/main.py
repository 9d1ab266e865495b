"""The command `sortedrl`: a table of commands, and how one is run.

A command NAME is the module `cli/NAME.py`, with its settings as `SETTINGS` and `run(settings)`, which returns the exit
code: 0 success, 2 wrong input (one line, nothing written) or a run that had to stop (one line), 130 interrupted.
"""

import difflib
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from sortedrl import __version__
from sortedrl.core.errors import UserError
from sortedrl.core.wording import printable

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMMANDS = {
    "simulate": "what each schedule would gain on your response lengths",
    "plan": "which schedule to use, and whether you need one at all",
    "train": "train a model with RL on this machine",
    "eval": "score a model on held-out problems",
    "compare": "run a study: train several settings with the same seeds, and compare them",
    "bench": "measure the throughput of each schedule on a real engine",
    "profile": "measure an engine, to calibrate simulate and plan to your hardware",
    "watch": "follow a run from another terminal",
    "trace": "write a run as a timeline for ui.perfetto.dev",
    "report": "write an HTML page about one or several runs",
    "doctor": "check what is installed and whether it works here",
}


def main(args: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if args is None else args)
    replace_what_cannot_be_encoded(sys.stdout, sys.stderr)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words[0] in ("--version", "version"):
        print(f"sortedrl {__version__}")
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(COMMANDS)}."
        return _refuse(f"no such command: {words[0]}. {hint}")
    try:
        code = _run(words[0], words[1:])
        sys.stdout.flush()
        return code
    except UserError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one ends the process at once, without a traceback
        print("interrupted", file=sys.stderr)
        return 130
    except MemoryError:
        return _refuse(f"{words[0]} needs more memory than there is")
    except BrokenPipeError:
        discard(sys.stdout, sys.stderr)
        return 0
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return _refuse(f"{words[0]} needs more open files than are allowed. Raise the limit: ulimit -n 1024")
        if error.errno not in NO_SPACE:
            raise
        discard(sys.stdout)
        return _refuse(f"cannot write {error.filename or 'the output'}: {error.strerror}")


def _run(name: str, words: Sequence[str]) -> int:
    """Parse, check, run. An error about a setting names the flag or file that set it."""
    from sortedrl.cli.parse import located, parsed
    from sortedrl.core.configuration import ConfigurationError
    from sortedrl.core.import_path import fault_in_your_code

    command = importlib.import_module(f"sortedrl.cli.{name}")
    settings = None
    try:
        settings = parsed(command.SETTINGS, words, f"sortedrl {name}")
        settings.check()
        return int(command.run(settings))
    except ConfigurationError as error:
        return _refuse(located(error, command.SETTINGS, words))
    except SystemExit as error:
        if settings is None:  # --help
            raise
        if isinstance(error.__context__, BrokenPipeError):  # rich ends the process in its place
            raise error.__context__ from None
        return _refuse(f"your code ended the command: {fault_in_your_code(error)}")


def _usage() -> str:
    lines = [f"sortedrl {__version__}: length-aware scheduling for RL on language models", "", "commands:"]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "sortedrl COMMAND --help shows the settings of a command."])


def _refuse(message: str) -> int:
    print(f"sortedrl: {printable(message)}", file=sys.stderr)
    return 2


# Output that cannot be written: a character is not in the encoding, the reader is gone, the disk is full


def replace_what_cannot_be_encoded(*streams: TextIO) -> None:
    """A terminal that is not UTF-8, or a file name that is not, costs some characters and not the command."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def discard(*streams: TextIO) -> None:
    """Let the rest of the output go nowhere. Else Python tries to write it when it exits, and fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
