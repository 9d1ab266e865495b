"""The plug-in is found by verl, is quick where it is not needed, and refuses a verl that does not fit."""

import subprocess
import sys

import pytest
import verl
from verl_config import compose

from sortedrl.integrations.verl import plugin


def test_this_verl_fits() -> None:
    assert plugin.why_unfit() is None


@pytest.mark.parametrize("version", ["0.5.0", "0.8.0", "0.9.0", "0.10.0", "1.0.0.dev1"])
def test_other_versions_are_refused_with_those_that_work(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(verl, "__version__", version)
    reason = plugin.why_unfit()
    assert reason is not None and version in reason and "0.9.1" in reason


def test_a_missing_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.checkpoint_engine import CheckpointEngineManager

    monkeypatch.delattr(CheckpointEngineManager, "resume_generation_replicas")
    reason = plugin.why_unfit()
    assert reason is not None and "CheckpointEngineManager.resume_generation_replicas" in reason and "0.9.1" in reason


def test_a_hook_without_a_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.checkpoint_engine import CheckpointEngineManager

    monkeypatch.setattr(CheckpointEngineManager, "abort_replicas", lambda self: None)
    assert "abort_replicas" in str(plugin.why_unfit())


def test_a_verl_that_does_not_fit_is_refused_when_the_mode_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls

    monkeypatch.setattr(verl, "__version__", "0.8.0")
    with pytest.raises(RuntimeError, match=r"verl 0\.8\.0.*0\.9\.1"):
        get_trainer_cls("sortedrl")(config=None)


def test_a_wrong_setting_is_one_line_when_the_mode_is_chosen() -> None:
    from verl.trainer.ppo.v1 import get_trainer_cls

    config = compose("partial", "+trainer.v1.sortedrl.cohort=3")
    with pytest.raises(ValueError, match=r"^trainer\.v1\.sortedrl\.cohort = 3: no such key. Keys: [^\n]*$"):
        get_trainer_cls("sortedrl")(config=config)


@pytest.mark.parametrize(
    "first", ["verl.trainer.ppo.v1", "sortedrl.integrations.verl.agent", "sortedrl.integrations.verl.trainer"]
)
def test_the_mode_is_found_by_the_entry_point_whatever_is_imported_first(first: str) -> None:
    code = f"import {first}, verl.trainer.ppo.v1 as v1; print(v1.get_trainer_cls('sortedrl').__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip().splitlines()[-1:] == ["SortedRL"], done.stderr[-2000:]


def test_importing_verl_alone_does_not_import_the_trainer() -> None:
    code = "import sys, verl; print([m for m in sys.modules if m.startswith(('sortedrl', 'verl.trainer'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    loaded = done.stdout.strip().splitlines()[-1]
    assert "sortedrl.integrations.verl.plugin" in loaded, done.stderr[-2000:]
    assert "'verl.trainer" not in loaded and "sortedrl.integrations.verl.trainer" not in loaded
