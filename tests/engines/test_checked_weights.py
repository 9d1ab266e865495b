"""The check of an engine's weights fails closed: nothing but matching numbers is agreement."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from small_models import VOCABULARY, engine_of, model_of
from sortedrl.core.engine import Change, Request, RequestFinished, Tokens
from sortedrl.core.rollout import Prompt
from sortedrl.engines import generate
from sortedrl.engines.checked_weights import CheckedWeights, WeightsDiffer
from sortedrl.engines.embedded.engine import EmbeddedEngine
from sortedrl.engines.pool import Pool
from sortedrl.training.engine import PROBE_CONTEXT, PROBE_TOKENS, checked_engine
from sortedrl.training.settings import ModelSettings
from tiny_llama import logprobs_of

PROBES = [[5, 6, 7], [9], [11, 12], [13, 14, 15, 16]]
Bend = Callable[[Change], list[Change]]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def immediate_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "RETRY_SECONDS", 0.0)


class Bent:
    """A real engine whose reports are bent on their way, as a broken server or adapter would."""

    def __init__(self, inner: EmbeddedEngine, bend: Bend) -> None:
        self.inner, self.slots, self._bend = inner, inner.slots, bend
        self.submitted: Counter[int] = Counter()

    def submit(self, requests: Sequence[Request]) -> None:
        self.submitted.update(request.id for request in requests)
        self.inner.submit(requests)

    def poll(self, until: float | None = None) -> list[Change]:
        return [bent for change in self.inner.poll(until) for bent in self._bend(change)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def tokens_with(change_segment: Callable[[list[int], list[Any]], tuple[list[int], list[Any]]]) -> Bend:
    def bend(change: Change) -> list[Change]:
        if not isinstance(change, Tokens):
            return [change]
        tokens, logprobs = change_segment(list(change.segment.tokens), list(change.segment.logprobs))
        return [change._replace(segment=replace(change.segment, tokens=tokens, logprobs=logprobs))]

    return bend


def silent(change: Change) -> list[Change]:
    return [change] if isinstance(change, RequestFinished) else []


FAULTS: dict[str, tuple[Bend, str]] = {
    "NaN": (tokens_with(lambda t, p: (t, [math.nan] * len(p))), "of the engine .*are not finite .*nan"),
    "one NaN": (tokens_with(lambda t, p: (t, [*p[:-1], math.nan])), "1 of 16 log-probabilities of the engine"),
    "infinite": (tokens_with(lambda t, p: (t, [-math.inf, *p[1:]])), "are not finite .*-inf"),
    "null": (tokens_with(lambda t, p: (t, [None, *p[1:]])), "a probe failed .*a log-probability"),
    "empty": (silent, "a probe failed .*it ended without a token"),
    "fewer": (tokens_with(lambda t, p: (t[:-1], p[:-1])), "has 15 tokens"),
    "more": (tokens_with(lambda t, p: ([*t, 3], [*p, -1.0])), "reported 17 tokens"),
}


def pair(bend: Bend, **options: Any) -> tuple[Bent, CheckedWeights]:
    model = model_of("Llama")
    engine = Bent(engine_of(model), bend)
    return engine, CheckedWeights(engine, logprobs_of(model), PROBES, **options)


def test_the_time_of_a_weight_update_is_measured_for_any_engine() -> None:
    """An engine with only the protocol does not report it."""

    class Slow(Bent):
        def update_weights(self, weights: Any, version: int) -> None:
            time.sleep(0.05)
            self.inner.update_weights(weights, version)

    model = model_of("Llama")
    checked = CheckedWeights(Slow(engine_of(model), lambda change: [change]), logprobs_of(model), PROBES)
    checked.update_weights(None, 1)
    assert checked.weight_update_seconds >= 0.05


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_a_whole_answer_of_numbers_is_a_failure(fault: str) -> None:
    bend, words = FAULTS[fault]
    _, checked = pair(bend)
    with pytest.raises(WeightsDiffer, match=f"weight update to version 3, .*{words}"):
        checked.update_weights(None, 3)


def test_a_learner_without_numbers_is_a_failure_too() -> None:
    model = model_of("Llama")
    checked = CheckedWeights(engine_of(model), lambda context, response: [math.nan] * len(response), PROBES)
    with pytest.raises(WeightsDiffer, match="log-probabilities of the learner"):
        checked.update_weights(None, 1)


def test_probes_do_not_end_by_eos() -> None:
    """Every token is an end token here: answers of one token, or of none, would check next to nothing."""
    model = model_of("Llama")
    checked = CheckedWeights(engine_of(model, eos_token_ids=range(VOCABULARY)), logprobs_of(model), PROBES)
    checked.update_weights(None, 1)
    assert checked.last_difference < 1e-4
    with torch.no_grad():
        next(model.parameters()).add_(1.0)  # the engine decodes with the same module, the learner below has another
    checked = CheckedWeights(checked.inner, logprobs_of(model_of("Llama")), PROBES)
    with pytest.raises(WeightsDiffer, match="nats per token"):
        checked.update_weights(None, 2)


def off_by(nats: float, count: int) -> Bend:
    return tokens_with(lambda t, p: (t, [value - nats for value in p[:count]] + p[count:]))


@pytest.mark.parametrize(
    ("nats", "count", "agrees"), [(2.0, 3, True), (0.3, 16, False), (0.3, 9, False), (8.0, 3, False)]
)
def test_rounding_of_a_few_unlikely_tokens_is_agreement(nats: float, count: int, agrees: bool) -> None:
    """In bfloat16 single tokens are a nat apart; wrong weights move most tokens, or some of them by much."""
    _, checked = pair(off_by(nats, count))
    with nullcontext() if agrees else pytest.raises(WeightsDiffer, match="nats per token"):
        checked.update_weights(None, 1)


def test_a_probe_that_is_never_answered_has_a_deadline() -> None:
    engine, checked = pair(lambda change: [], probe_seconds=0.5)
    with pytest.raises(WeightsDiffer, match=r"4 of 4 probes did not finish within 0.5 s"):
        checked.update_weights(None, 1)
    assert engine.inner.poll() == []


def test_one_wrong_member_of_a_pool_does_not_hide_behind_the_others() -> None:
    """A small error, which the mean over all probes would bring below the tolerance."""
    model, wrong = model_of("Llama"), model_of("Llama")
    with torch.no_grad():
        wrong.lm_head.weight.mul_(1.4)
    members = [engine_of(model) for _ in range(7)] + [engine_of(wrong)]
    pool = Pool(members)
    probes = [[3 + i, 4] for i in range(8)]
    checked = CheckedWeights(pool, logprobs_of(model), probes)
    alone = CheckedWeights(engine_of(wrong), logprobs_of(model), probes[:1], tolerance=math.inf)
    alone.update_weights(None, 1)
    assert 0.1 < alone.last_difference < 0.8, "too small or too large for this test"
    with pytest.raises(WeightsDiffer, match="nats per token"):
        checked.update_weights(None, 1)
    pool.close()


def test_long_prompts_are_probed_by_their_start() -> None:
    """A check runs after every weight update, so a probe costs little, however long the prompt is."""
    tokens = [5 + place % 20 for place in range(PROBE_CONTEXT + 500)]
    prompts = [Prompt(str(length), tokens[:length]) for length in (len(tokens), 3, PROBE_CONTEXT)]
    model = model_of("Llama", max_position_embeddings=2 * PROBE_CONTEXT)
    engine = engine_of(model, max_length=PROBE_CONTEXT + PROBE_TOKENS)
    checked = checked_engine(engine, ModelSettings(), prompts, logprobs_of(model))
    checked.update_weights(None, 1)  # a longer one does not fit into the engine
    assert 0 < checked.last_difference < 1e-4


def test_a_check_without_probes_is_refused() -> None:
    model = model_of("Llama")
    with pytest.raises(ValueError, match="check nothing"):
        CheckedWeights(engine_of(model), logprobs_of(model), [])
