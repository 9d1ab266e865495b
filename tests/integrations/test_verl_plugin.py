"""The entry point that verl loads: needs neither verl nor wrapt. With both it is tested in with_verl/."""

import importlib
import sys

import pytest

from sortedrl.integrations.verl import plugin
from sortedrl.settings.install_hint import install_hint


def test_without_wrapt_the_log_says_why_the_mode_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """verl hides the error of a plugin that cannot be imported."""
    monkeypatch.setitem(sys.modules, "wrapt", None)
    importlib.reload(plugin)
    (record,) = caplog.records
    assert record.levelname == "ERROR" and "\n" not in record.message
    assert "trainer mode sortedrl is not registered" in record.message and "wrapt" in record.message
    assert record.message.endswith(install_hint("verl"))
