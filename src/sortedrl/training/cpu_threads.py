"""How many CPU threads PyTorch gets, and how they wait.

The threads of one operation wait for each other. By default they wait spinning: beside one busy process the thread that
shares its core is late for every operation while the other burns its own core, and an update of a small model
takes 30 times as long. So waiting threads sleep, and a model that is too small for several threads gets one.
"""

import os

PARAMETERS_PER_THREAD = 5_000_000  # below this a second thread gains little and has to be waited for


def set_passive_waiting() -> None:
    """Call before PyTorch is imported: its OpenMP runtime (GNU's or Intel's) reads this once. What is set stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")


def threads_for(parameters: int, cores: int, busy: float) -> int:
    """Threads for a model of so many parameters, on `cores` of which the fraction `busy` is taken by others."""
    worthwhile = 1 + parameters // PARAMETERS_PER_THREAD
    free = round(cores * (1 - busy))
    return max(1, min(worthwhile, free, cores))


def threads_here(parameters: int) -> int:
    busy = min(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # of the machine's cores, in the last minute
    return threads_for(parameters, len(os.sched_getaffinity(0)), busy)
