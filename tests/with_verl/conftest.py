"""Real verl, Ray and TransferQueue on a CPU (`make test-verl`). What is added to verl is in cpu_backend.py."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from own_ray import own_cluster

HERE = Path(__file__).resolve().parent
JOB = HERE.parents[1] / "benchmarks" / "verl_job"

if find_spec("transfer_queue") is None:
    collect_ignore_glob = ["test_*.py"]  # verl is not installed in this environment
else:  # before verl is imported, here and in Ray's processes
    own_cluster()
    sys.path[:0] = [str(HERE), str(JOB)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(JOB), os.environ.get("PYTHONPATH", "")])
    os.environ |= {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "cpu_backend",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from data import write

    from sortedrl.tasks.knights_and_knaves import KnightsAndKnaves

    folder = tmp_path_factory.mktemp("data")
    write(folder, KnightsAndKnaves.small(count=200), held_out=4)
    return folder


@pytest.fixture(scope="module")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a model."""
    from dialogue import dialogue_model, write_dialogue

    folder = tmp_path_factory.mktemp("dialogue")
    write_dialogue(folder, count=200)
    dialogue_model(folder / "model")
    return folder
