"""Scripts in several processes on this machine, which talk over gloo."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent


def start(
    script: str | Path, *arguments: str, processes: int = 2, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])
    environment = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": paths}
    return subprocess.Popen(
        [*launch, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment | dict(variables or {}),
    )


def run(script: str | Path, *arguments: str, seconds: float = 480, **options: Any) -> str:
    """Its output. Fails if a process fails.

    On a CPU, DeepSpeed compiles an extension at its first start, for 2 to 3 minutes. If it is killed during that time,
    its lock file remains, and all later starts wait for it forever.
    """
    started = start(script, *arguments, **options)
    try:
        output, _ = started.communicate(timeout=seconds)
    finally:
        started.kill()
    assert started.returncode == 0, output[-6000:]
    return output
