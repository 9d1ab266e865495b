"""Ray in tests: a cluster of their own, so that several suites may run at the same time."""

import atexit
import os
import shutil
import tempfile


def own_cluster() -> None:
    """Call it before Ray is initialized. Ray finds a running cluster by this variable, or by a file in its folder."""
    os.environ.pop("RAY_ADDRESS", None)
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the names of sockets have at most 107 characters
    os.environ["RAY_TMPDIR"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
