"""Held-out scores are those of the update on whose line they stand, also where the engine has weights of its own."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from config_file import config_file
from scenarios import Run, scenario
from sortedrl.cli import main
from sortedrl.core import events
from sortedrl.core.engine import Change, Engine, Request, Tokens
from sortedrl.engines.embedded.engine import EmbeddedEngine
from sortedrl.log.reading import read_events
from sortedrl.training import evaluate as evaluating
from sortedrl.training import trainer
from toy_runs import SMALL, SMALL_TRAINING, flags, metrics_of

EVALUATED = flags(SMALL | {"max_response_tokens": 24, "eval_problems": 12})
TRAINED = flags(
    SMALL_TRAINING | {"max_response_tokens": 24, "eval_problems": 12, "learning_rate": 1e-2, "scoring": "at-once"}
)
OWN_WEIGHTS: dict[str, dict[str, Any]] = {"lora": {"lora_rank": 4}, "recomputation": {"gradient_checkpointing": True}}
Answers = dict[int, tuple[list[int], list[float]]]  # tokens and log-probabilities by request


class Recorded:
    """An engine, and what it answered."""

    def __init__(self, inner: Engine) -> None:
        self.inner, self.slots = inner, inner.slots
        self.answers: Answers = {}

    def submit(self, requests: Sequence[Request]) -> None:
        self.inner.submit(requests)

    def poll(self, until: float | None = None) -> list[Change]:
        changes = self.inner.poll(until)
        for change in changes:
            if isinstance(change, Tokens):
                tokens, logprobs = self.answers.setdefault(change.id, ([], []))
                tokens += change.segment.tokens
                logprobs += change.segment.logprobs
        return changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Answers]]:
    """What the engine answered in each evaluation so far."""
    found: list[Answers] = []
    evaluate = evaluating.evaluate

    def recorded(engine: Engine, *args: Any, **options: Any) -> Any:
        recorder = Recorded(engine)
        result = evaluate(recorder, *args, **options)
        found.append(recorder.answers)
        return result

    threads = torch.get_num_threads()
    monkeypatch.setattr(evaluating, "evaluate", recorded)
    monkeypatch.setattr(trainer, "evaluate", recorded)
    yield found
    torch.set_num_threads(threads)


def train(model: Path, out: Path, *words: str) -> None:
    rare = config_file(out.parent, warmup_updates=0)
    assert main(["train", "--model", str(model), "--out", str(out), *TRAINED, *rare, *words]) == 0


def answers_of(exported: Path, evaluations: list[Answers], *words: str) -> Answers:
    assert main(["eval", "--model", str(exported), *EVALUATED, *words]) == 0
    return evaluations.pop()


@pytest.mark.parametrize(("kind", "mode"), [("lora", "cohort-at-once"), ("recomputation", "partial+elevator")])
def test_an_evaluation_answers_as_the_model_exported_at_that_update(
    kind: str, mode: str, model: Path, tmp_path: Path, evaluations: list[Answers]
) -> None:
    if kind == "lora":
        pytest.importorskip("peft")
    words = [*config_file(tmp_path, **OWN_WEIGHTS[kind]), "--mode", mode]
    train(model, tmp_path / "run", *words, "--updates", "3", "--eval-every", "1")
    during = list(evaluations)
    assert len(during) == 4 and all(a != b for a, b in pairwise(during)), "weights changed"
    assert during[3] == answers_of(tmp_path / "run" / "model", evaluations)
    train(model, tmp_path / "shorter", *words, "--updates", "2")
    assert during[2] == evaluations[-1] == answers_of(tmp_path / "shorter" / "model", evaluations)
    assert [line["update"] for line in metrics_of(tmp_path / "run", "held_out")] == [0, 1, 2, 3]
    log = read_events(tmp_path / "run" / "events.jsonl")
    trained = {event.rollout for event in log if isinstance(event, events.Submitted)}
    assert trained.isdisjoint(during[0]), "a pool would forget where the KV cache of these rollouts is"


def test_a_lora_run_leaves_its_adapter_beside_the_merged_weights(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    run = tmp_path / "run"
    train(model, run, "--lora-rank", "4", "--updates", "2", "--eval-problems", "1")
    assert f"LoRA adapter in {run / 'adapter'} (peft format)" in capsys.readouterr().out
    assert peft.PeftConfig.from_pretrained(run / "adapter").base_model_name_or_path == str(model)
    base = AutoModelForCausalLM.from_pretrained(model).eval()
    tokens = torch.arange(3, 35)[None]
    with torch.no_grad():
        before = base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, run / "adapter").eval()(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(run / "model").eval()(tokens).logits
    assert torch.allclose(adapted, merged, atol=1e-5)
    assert (adapted - before).abs().max() > 1e-3, "the adapter has learned something"
    train(model, tmp_path / "plain", "--updates", "1", "--eval-problems", "1")
    assert not (tmp_path / "plain" / "adapter").exists()


def test_a_server_is_evaluated_under_the_weights_of_the_update(
    model: Path, tmp_path: Path, evaluations: list[Answers]
) -> None:
    """Over HTTP. `sortedrl eval` gives the server the weights that it names: another run's are in it."""
    pytest.importorskip("aiohttp")
    from transformers import AutoModelForCausalLM

    from sglang_stand_in import SglangStandIn

    server = SglangStandIn(AutoModelForCausalLM.from_pretrained(model).eval())
    at_server = ["--engine", "sglang", "--engine-urls", server.url, "--engine-options", "seeded", "True"]
    at_server += ["--eval-problems", "4", "--max-response-tokens", "8"]
    try:
        few = ["--rollouts-per-update", "4", "--prompts-per-cohort", "4", "--rollouts-per-prompt", "2"]
        train(model, tmp_path / "run", *at_server, *few, "--updates", "2", "--eval-every", "1")
        before, first, second = evaluations
        assert [line["update"] for line in metrics_of(tmp_path / "run", "weight_difference")] == [1, 2]
        assert before == answers_of(model, evaluations, *at_server)
        assert second == answers_of(tmp_path / "run" / "model", evaluations, *at_server)
        assert first not in (before, second)
    finally:
        server.close()


def test_a_resumed_run_evaluates_its_own_update(model: Path, tmp_path: Path, evaluations: list[Answers]) -> None:
    words = [*config_file(tmp_path, gradient_checkpointing=True), "--eval-every", "1", "--checkpoint-every", "1"]
    train(model, tmp_path / "run", *words, "--updates", "2")
    assert main(["train", "--resume", str(tmp_path / "run"), "--updates", "3"]) == 0
    assert evaluations[-1] == answers_of(tmp_path / "run" / "model", evaluations)


def test_updates_on_one_harvest_cost_one_weight_update_unless_evaluated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cohort of 32 rollouts is one harvest here, and four updates."""
    versions: list[int] = []
    update_weights = EmbeddedEngine.update_weights

    def counted(engine: EmbeddedEngine, weights: Any, version: int) -> None:
        versions.append(version)
        update_weights(engine, weights, version)

    monkeypatch.setattr(EmbeddedEngine, "update_weights", counted)
    words = ["--mode", "cohort-at-once", *config_file(tmp_path, gradient_checkpointing=True), "--updates", "8"]
    train(model, tmp_path / "a", *words)
    assert versions == [4, 8]
    versions.clear()
    train(model, tmp_path / "b", *words, "--eval-every", "2")
    assert versions == [2, 4, 6, 8]


def test_the_log_books_a_weight_update_before_the_evaluation(model: Path, tmp_path: Path) -> None:
    recomputed = config_file(tmp_path, gradient_checkpointing=True)
    train(model, tmp_path / "run", *recomputed, "--updates", "2", "--eval-every", "1")
    log = read_events(tmp_path / "run" / "events.jsonl")
    phases = [event.phase for event in log if isinstance(event, events.Phase)]
    before = [phases[i - 1] for i, phase in enumerate(phases) if phase == "evaluation"]
    assert before[1:] == ["weights"] * (len(before) - 1)


def test_update_engine_is_done_once_and_tells_whether() -> None:
    run = Run(scenario("partial", [3, 1, 2, 4], slots=2, rollouts_per_update=2, weight_update_seconds=1.5))
    controller = run.controller
    assert not controller.update_engine(), "nothing is published"
    next(iter(controller))
    controller.publish()
    assert controller.engine_is_behind
    before = run.engine.now()
    assert controller.update_engine() and run.engine.now() == before + 1.5
    assert not controller.update_engine() and not controller.engine_is_behind
