"""Real processes that are killed: at random and inside checkpoint replacement, and while the learner works during a
harvest. The whole campaign: benchmarks/kill_campaign.py."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "streamed_run.py"
ENDINGS = (  # the signal, and the part that the learner has started on; an update has one part or more
    (signal.SIGKILL, 1),
    (signal.SIGINT, 2),
    (signal.SIGKILL, 2),
)


def life(folder: Path, mode: str, ending: tuple[signal.Signals, int] | None) -> str:
    """Its output until it ends, by itself or by the signal."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{SCRIPT.parent}"}
    words = [sys.executable, str(SCRIPT), str(folder), mode, *([str(ending[1])] if ending is not None else [])]
    lines: list[str] = []
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if ending is not None and line == "working\n":
                process.send_signal(ending[0])
    is_killed = ending is not None and ending[0] is signal.SIGKILL
    assert process.returncode == (-signal.SIGKILL if is_killed else 0)
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["baseline", "on-policy", "partial+elevator"])
def test_kills_and_interrupts_in_mid_harvest_lose_no_rollout(mode: str, tmp_path: Path) -> None:
    for ending in ENDINGS:
        assert "done" not in life(tmp_path, mode, ending)
    last = life(tmp_path, mode, None).splitlines()[-1]
    found = json.loads(last.removeprefix("done "))
    assert sorted(found["trained"]) == list(range(32))
    assert found["updates"] == 4


@pytest.mark.slow
def test_forty_kills_leave_runs_equal_to_uninterrupted_ones() -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "kill_campaign.py"), "--kills", "40", "--seed", "7"]
    words += ["--modes", "partial+elevator", "on-policy", "--tasks", "one-turn", "slow-turns"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 7: 40 kills" in done.stdout
