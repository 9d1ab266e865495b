"""The engine of docs/engine_authors.md keeps the contract of all engines, and the suite finds engines that do not."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sortedrl.core.engine import Change, Request, RequestFinished, Tokens
from sortedrl.core.rollout import Segment
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.step_time import linear
from sortedrl.testing import BrokenRules, check_engine
from sortedrl.testing.__main__ import main
from sortedrl.testing.engine_contract import rules

ROOT = Path(__file__).parents[2]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sortedrl.testing", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_the_command_of_the_docs_checks_the_engine_of_the_docs() -> None:
    page = (ROOT / "docs/engine_authors.md").read_text(encoding="utf-8")
    assert "python -m sortedrl.testing examples.hugging_face_engine:engine" in page


@pytest.mark.parametrize(
    ("name", "flags"), [("hugging_face_engine", []), ("bring_your_own_engine", ["--deterministic"])]
)
def test_the_engines_of_the_examples_keep_all_rules(
    name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    code = main([f"examples.{name}:engine", *flags])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert printed.splitlines()[-1] == ("all rules kept" if flags else "all rules kept, 1 not checked")
    assert printed.count("kept    ") == len(rules()) - printed.count("skipped ")


@pytest.mark.parametrize("path", ["no.such.module:f", "json:nothing", "json", "json:__name__"])
def test_a_wrong_factory_is_one_line(path: str) -> None:
    done = command(path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and path in done.stderr


class Simulated(SimulatedEngine):
    def __init__(self, slots: int) -> None:
        super().__init__(slots=slots, step_time=linear(0.001, 0.0), length_of=lambda request: 20 + request.seed % 13)


class ReportsAnEndTwice(Simulated):
    def poll(self, until: float | None = None) -> list[Change]:
        changes = super().poll(until)
        return changes + [change for change in changes if isinstance(change, RequestFinished)]


class ExceedsTheLimit(Simulated):
    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([request._replace(max_new_tokens=request.max_new_tokens + 1) for request in requests])


class IgnoresPrefixes(Simulated):
    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([request._replace(prefix=()) for request in requests])


class ForgetsTheVersion(Simulated):
    def poll(self, until: float | None = None) -> list[Change]:
        for change in (changes := super().poll(until)):
            if isinstance(change, Tokens):
                self.spoil(change.segment)
        return changes

    def spoil(self, segment: Segment) -> None:
        segment.version = 0


class SamplesNoTokens(ForgetsTheVersion):
    def spoil(self, segment: Segment) -> None:
        segment.tokens = [-1] * len(segment)


class IsCertain(ForgetsTheVersion):
    def spoil(self, segment: Segment) -> None:
        segment.logprobs = [0.0] * len(segment)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (ReportsAnEndTwice, "every request ends once within its limit: AssertionError: an end is the last change"),
        (IgnoresPrefixes, "resumed requests continue behind their prefix: AssertionError: 0 of 3 do: the context is "),
        (ForgetsTheVersion, "segments carry the version that made them"),
        (SamplesNoTokens, "every request ends once within its limit: ValueError: token id -1, and ids count from 0"),
        (IsCertain, "log probabilities are log probabilities: AssertionError: all are 0"),
        (ExceedsTheLimit, "resume continues with what is left of the limit"),
    ],
)
def test_an_engine_that_breaks_a_rule_is_found_and_the_rule_named(kind: type[Simulated], rule: str) -> None:
    with pytest.raises(BrokenRules) as raised:
        check_engine(lambda spec: kind(spec.slots))
    assert rule in str(raised.value)


class DropsTokensAtAnAbort(Simulated):
    def abort(self, ids: Sequence[int]) -> list[Change]:
        del ids
        return []


def test_a_bare_assertion_is_shown_by_its_line() -> None:
    with pytest.raises(
        BrokenRules, match=r"leaves nothing: AssertionError: assert ledger\.engine\.poll\(\) == \[\] \("
    ):
        check_engine(lambda spec: DropsTokensAtAnAbort(spec.slots))


def no_gpu(spec: object) -> Any:
    raise RuntimeError("no GPU")


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (no_gpu, r"RuntimeError: no GPU \(.*test_hugging_face_example.py:\d+\)"),
        (lambda: None, r"TypeError: .* takes 0 positional arguments but 1 was given .*"),
        (lambda spec: None, "it returned a NoneType without now, submit, poll, abort, update_weights, slots"),
    ],
)
def test_a_factory_without_an_engine_is_one_line(factory: Any, why: str) -> None:
    with pytest.raises(BrokenRules, match=f"^the factory returns an engine: {why}$"):
        check_engine(factory)
