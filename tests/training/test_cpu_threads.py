"""How many threads PyTorch gets, and that those that wait sleep."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sortedrl.training.cpu_threads import PARAMETERS_PER_THREAD, set_passive_waiting, threads_for

BUILT_IN = 341_280


@pytest.mark.parametrize(
    ("parameters", "cores", "busy", "threads"),
    [
        (BUILT_IN, 2, 0.0, 1),
        (BUILT_IN, 64, 0.0, 1),
        (3 * PARAMETERS_PER_THREAD, 2, 0.0, 2),
        (3 * PARAMETERS_PER_THREAD, 16, 0.0, 4),
        (8_000_000_000, 16, 0.0, 16),
        (8_000_000_000, 2, 0.5, 1),
        (8_000_000_000, 16, 0.25, 12),
        (8_000_000_000, 16, 1.0, 1),
    ],
)
def test_threads_follow_model_size_and_load(parameters: int, cores: int, busy: float, threads: int) -> None:
    assert threads_for(parameters, cores, busy) == threads


def test_training_with_the_command_line_lets_waiting_threads_sleep() -> None:
    """It is set when PyTorch's own import begins, before that loads its OpenMP runtime."""
    code = """
import os, sys

class AtFirstPartOfTorch:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch."):
            print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("KMP_BLOCKTIME"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, AtFirstPartOfTorch())
from sortedrl.cli.output import training_module
training_module("trainer")
"""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "KMP_"))}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=plain, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["PASSIVE", "0"]


def test_what_the_user_set_about_waiting_threads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("KMP_BLOCKTIME", "200")
    set_passive_waiting()
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["KMP_BLOCKTIME"]) == ("ACTIVE", "200")


def test_the_users_threads_win() -> None:
    torch = pytest.importorskip("torch")
    from sortedrl.training.build import set_threads
    from sortedrl.training.settings import TrainSettings

    model: Any = SimpleNamespace(num_parameters=lambda: BUILT_IN)
    before = torch.get_num_threads()
    try:
        set_threads(TrainSettings(threads=3, device="cpu"), model)
        assert torch.get_num_threads() == 3
        set_threads(TrainSettings(device="cpu"), model)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
