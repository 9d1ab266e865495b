"""The command `sortedrl`, also as `python -m sortedrl`."""

import signal
import sys


def run() -> int:
    """An interrupt before the command has started ends the process at once, without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from sortedrl.cli import main

    signal.signal(signal.SIGINT, handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
