"""`python -m sortedrl.studies.compare.pinned PARENT CORES COMMAND...`: becomes the command, pinned to CPU cores.

The command gets SIGTERM when the process PARENT ends, however it ends: a training run then saves and ends, too, and
leaves a folder that can be resumed. Cores and signal outlive `exec`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def main(parent: str, cores: str, *command: str) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it ended before the line above
        sys.exit(1)
    os.sched_setaffinity(0, map(int, cores.split(",")))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
