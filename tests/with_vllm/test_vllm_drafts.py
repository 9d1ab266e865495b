"""vLLM in process with speculative decoding: several tokens per step, and none that the policy would not have sampled.

`Foretold` drafts from responses that it is told, so that greedy responses are accepted whole and the ends of responses
fall within steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from test_vllm_engine import BASE, TOLERANCE, Numbers, engine_of
from vllm.v1.sample import rejection_sampler

from ledgers import completed
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Engine, Request, Sampling
from sortedrl.core.rollout import Prompt
from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.engines.speculative import Drafter
from sortedrl.engines.vllm import VllmEngine
from sortedrl.models import BUILT_IN_MODEL
from sortedrl.testing.engine_contract import EngineContract, Ledger, resumed
from tiny_llama import ON_GPU, PROBES, logprobs_of, parted_after_a_load, shake, tiny_model
from turns_on_engines import largest_gap_of_turns

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SUFFIX = {
    "method": "custom_class",
    "model": "sortedrl.engines.suffix_drafter.SuffixDrafter",
    "num_speculative_tokens": 3,
}
EAGLE3 = {
    "method": "eagle3",
    "model": str(Path(__file__).parents[2] / "benchmarks" / "shapes" / "tiny-eagle3"),
    "num_speculative_tokens": 3,
}
FORETOLD = {"method": "custom_class", "model": f"{__name__}.Foretold", "num_speculative_tokens": 3}
BROKEN = rejection_sampler.expand_batch_to_tokens
GREEDY = Sampling(temperature=0.0)


class Foretold(Drafter):
    told: ClassVar[list[list[int]]] = []  # prompts with their responses

    def drafts(self, sampled: Any, contexts: Any) -> list[list[int]]:
        return [self._draft(context.tolist()) if made else [] for made, context in zip(sampled, contexts, strict=True)]

    def _draft(self, known: list[int]) -> list[int]:
        follows = (told[len(known) : len(known) + self.tokens] for told in self.told if told[: len(known)] == known)
        return next(follows, [known[-1]] * self.tokens)


def expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    return torch.where(x == replace_from, replace_to, x).repeat_interleave(counts, output_size=num_tokens)


@pytest.fixture(scope="module", autouse=True)
def _repaired() -> Iterator[None]:
    """On a CPU, vLLM 0.32.0 leaves the temperatures of drafts unwritten. All else of it is tested as it is."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setattr(rejection_sampler, "expand_batch_to_tokens", expanded)
        yield


@pytest.fixture(scope="module")
def engine(_repaired: None) -> Iterator[VllmEngine]:
    made = engine_of(BUILT_IN_MODEL, 4, speculative_config=FORETOLD, tokenizer=Numbers())
    yield made
    made.close()


def greedy(id: int, max_new_tokens: int, **sampling: Any) -> Request:
    return Request(id, Prompt(str(id), [3 + id, 4, 5]), (), max_new_tokens, id, replace(GREEDY, **sampling))


def run(engine: VllmEngine, *requests: Request) -> Ledger:
    return completed(engine, requests)


def foretell(engine: VllmEngine, request: Request) -> list[int]:
    """Its response without drafts, which is told to the drafter."""
    engine.drafter.most_running = 0
    response = run(engine, request).tokens(request.id)
    engine.drafter.most_running = engine.slots
    Foretold.told = [[*request.prompt.tokens, *response]]
    return response


class TestVllmWithNgram(EngineContract):
    """One engine for all tests, as in test_vllm_engine.py."""

    deterministic = False  # noise is drawn for the whole batch, and drafts take of it
    config: ClassVar[dict[str, Any]] = NGRAM

    made: ClassVar[dict[int, VllmEngine]] = {}

    @pytest.fixture(scope="class", autouse=True)
    def _shared(self) -> Iterator[None]:
        yield
        while self.made:
            self.made.popitem()[1].close()

    def make_engine(self, slots: int) -> Engine:
        if slots not in self.made:
            self.made[slots] = engine_of(BUILT_IN_MODEL, slots, speculative_config=self.config)
        engine = self.made[slots]
        engine.abort(list(engine._name_of))
        return engine


class TestVllmWithOwnDrafter(TestVllmWithNgram):
    config = FORETOLD


def test_a_response_has_as_many_tokens_as_without_drafts_in_fewer_steps(engine: VllmEngine) -> None:
    request = greedy(0, 30, ignore_eos=True)
    expected = foretell(engine, request)
    before = dict(engine.drafter.counts.steps)
    assert run(engine, request).tokens(0) == expected and len(expected) == 30
    assert sum(engine.drafter.counts.steps.values()) - sum(before.values()) <= 9, "4 tokens per step"


@pytest.mark.parametrize("limit", range(1, 9))
def test_the_limit_holds_within_a_step(engine: VllmEngine, limit: int) -> None:
    expected = foretell(engine, greedy(0, 30, ignore_eos=True))
    ledger = run(engine, greedy(0, limit, ignore_eos=True))
    assert ledger.tokens(0) == expected[:limit] and ledger.finished == {0: True}
    assert len(ledger.logprobs(0)) == limit


@pytest.mark.parametrize("place", range(4, 9))
def test_a_stop_string_within_a_step_ends_the_response_there(engine: VllmEngine, place: int) -> None:
    request = greedy(0, 30, ignore_eos=True)
    expected = foretell(engine, request)
    string = Numbers().decode(expected[place - 3 : place])
    stops = replace(GREEDY, stop_strings=(string,))
    first = next(n for n in range(3, 30) if expected[n - 3 : n] == expected[place - 3 : place])
    ledger = run(engine, request._replace(sampling=stops))
    if 2 in expected[:first]:
        pytest.skip("EOS comes first")
    assert ledger.tokens(0) == expected[:first] and ledger.finished == {0: False}
    assert len(ledger.logprobs(0)) == first


@pytest.mark.parametrize("place", range(4, 9))
def test_eos_within_a_step_ends_the_response_there(place: int, monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    request = greedy(0, 30)
    expected = foretell(engine, greedy(0, 30, ignore_eos=True))
    monkeypatch.setattr(engine, "_eos", [expected[place]])
    ledger = run(engine, request)
    assert ledger.tokens(0) == expected[: expected.index(expected[place]) + 1]
    assert ledger.finished == {0: False} and len(ledger.logprobs(0)) == len(ledger.tokens(0))


def test_an_aborted_response_continues_as_without_drafts(engine: VllmEngine) -> None:
    request = greedy(0, 40, ignore_eos=True)
    expected = foretell(engine, request)
    ledger = Ledger(engine)
    ledger.submit([request])
    for _ in range(4):
        engine._step()
    ledger.abort([0])
    made = ledger.tokens(0)
    assert 1 < len(made) < 40
    ledger.submit([resumed(request, ledger.segments[0])._replace(id=1)])
    ledger.run()
    assert [*made, *ledger.tokens(1)] == expected


def test_a_drafter_is_silent_while_many_run(engine: VllmEngine) -> None:
    request = greedy(0, 20, ignore_eos=True)
    foretell(engine, request)
    engine.drafter.most_running = 1
    drafted = engine.drafter.counts.drafted
    run(engine, greedy(1, 20, ignore_eos=True), greedy(2, 20, ignore_eos=True))
    assert engine.drafter.counts.drafted <= drafted + 3, "but for the last one, alone for a step at most"
    run(engine, request)
    assert engine.drafter.counts.drafted > drafted + 10
    engine.drafter.most_running = engine.slots


@pytest.mark.parametrize("config", [NGRAM, FORETOLD], ids=["ngram", "custom_class"])
def test_log_probabilities_are_the_policys_own_across_weight_updates(tmp_path: Path, config: dict[str, Any]) -> None:
    model = tiny_model(tmp_path, tied=True)
    engine = engine_of(tmp_path, 4, speculative_config=config, enable_prefix_caching=True)
    Foretold.told = [[*probe, *range(3, 40)] for probe in PROBES]
    checked = CheckedWeights(engine, logprobs_of(model), PROBES)
    assert checked.difference() < TOLERANCE
    for version in (1, 2):
        shake(model, seed=version)
        checked.update_weights(dict(model.named_parameters()), version)
        assert checked.last_difference < TOLERANCE
    engine.close()


def test_new_weights_reach_the_policy_beside_a_draft_model(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, tied=False, vocab_size=512)
    engine = engine_of(tmp_path, 4, speculative_config=EAGLE3, load_format="dummy")
    checked = CheckedWeights(engine, logprobs_of(model), PROBES)
    for version in (1, 2):
        shake(model, seed=version)
        checked.update_weights(dict(model.named_parameters()), version)
        assert checked.last_difference < TOLERANCE
    assert engine.draft_counts is not None and sum(engine.draft_counts.tokens.values()) >= 32, "steps are counted"
    engine.close()


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_and_top_p_are_in_the_log_probabilities(tmp_path: Path, temperature: float) -> None:
    model = tiny_model(tmp_path, tied=False)
    engine = engine_of(tmp_path, 2, speculative_config=NGRAM)
    prompt = [5, 6, 7, 5, 6, 7]
    sampling = Sampling(temperature=temperature, ignore_eos=True)
    ledger = run(engine, Request(0, Prompt("p", prompt), (), 60, 0, sampling))
    expected = logprobs_of(model, temperature)(prompt, ledger.tokens(0))
    assert ledger.logprobs(0) == pytest.approx(expected, abs=10 * TOLERANCE)
    narrow = run(engine, Request(0, Prompt("p", prompt), (), 60, 0, replace(sampling, top_p=1e-4)))
    assert narrow.logprobs(0) == pytest.approx([0.0] * 60, abs=TOLERANCE), "one token is left of the distribution"
    engine.close()


@pytest.mark.parametrize("reuse_kv_cache", [False, True])
def test_reused_kv_belongs_to_accepted_tokens_only(tmp_path: Path, *, reuse_kv_cache: bool) -> None:
    model = tiny_model(tmp_path, tied=False)
    engine = engine_of(tmp_path, 4, reuse_kv_cache=reuse_kv_cache, speculative_config=NGRAM)
    apart = parted_after_a_load(engine, model)
    assert apart > 0.1 if reuse_kv_cache else apart < TOLERANCE
    # The same weights under a new version: what is reused is right, so rejected drafts have left nothing behind.
    ledger = Ledger(engine)
    first = Request(7, Prompt("again", PROBES[0]), (), 70, 0, Sampling(ignore_eos=True))
    ledger.submit([first])
    while len(engine._inside[engine._name_of[7]].tokens) < 20:
        engine._step()
    ledger.abort([7])
    engine.update_weights(None, 3)
    ledger.submit([resumed(first, ledger.segments[7])._replace(id=8, max_new_tokens=20)])
    ledger.run()
    expected = logprobs_of(model)([*PROBES[0], *ledger.tokens(7)], ledger.tokens(8))
    assert ledger.logprobs(8) == pytest.approx(expected, abs=10 * TOLERANCE)
    engine.close()


def test_log_probabilities_are_the_learners_after_each_turn(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, tied=False)
    engine = VllmEngine(
        str(tmp_path), slots=3, eos_token_ids=[2, 3, 4, 5], max_length=256, speculative_config=SUFFIX, **BASE
    )
    assert largest_gap_of_turns(engine, model) < 10 * TOLERANCE
    engine.close()


@pytest.mark.skipif(ON_GPU, reason="Triton's kernel is right")
def test_a_build_that_drops_the_temperature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", BROKEN)
    with pytest.raises(ConfigurationError, match="does not apply the temperature"):
        engine_of(BUILT_IN_MODEL, 2, speculative_config=NGRAM)


@pytest.mark.skipif(not ON_GPU, reason="vLLM has synthetic acceptance on GPUs only")
def test_synthetic_acceptance_measures_a_random_model(tmp_path: Path) -> None:
    tiny_model(tmp_path, tied=False)
    synthetic = {**FORETOLD, "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.25, 0.25]}
    engine = engine_of(tmp_path, 2, speculative_config=synthetic, load_format="dummy")
    run(engine, Request(0, Prompt("p", [5, 6, 7]), (), 200, 0, Sampling(ignore_eos=True)))
    counts = engine.drafter.counts
    assert counts.tokens[1] / counts.steps[1] == pytest.approx(2.0, abs=0.4)
    engine.close()


WORDS, POSITIONS, RESPONSES = 12, 8, 2500


class TestDistribution:
    """Of 20,000 tokens on a small vocabulary, with drafts from responses to the same prompt."""

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: Any) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("small")
        return folder, tiny_model(folder, tied=False, seed=3, vocab_size=WORDS)

    def sampled(self, engine: VllmEngine, temperature: float = 1.0) -> tuple[np.ndarray, Ledger]:
        sampling = Sampling(temperature=temperature, ignore_eos=True)
        ledger = completed(
            engine, [Request(i, Prompt("p", [3, 4, 5, 6]), (), POSITIONS, i, sampling) for i in range(RESPONSES)]
        )
        return np.array([ledger.tokens(i) for i in range(RESPONSES)]), ledger

    def test_drafts_change_no_position_and_no_log_probability(self, model: tuple[Path, Any]) -> None:
        folder, learner = model
        plain = engine_of(folder, 50)
        expected, _ = self.sampled(plain)
        colder, _ = self.sampled(plain, temperature=0.5)
        plain.close()
        engine = engine_of(folder, 50, speculative_config=SUFFIX)
        found, ledger = self.sampled(engine)
        counts, by_source = engine.drafter.counts, engine.drafter.by_source
        engine.close()
        print(f"{counts.drafted} drafted, {counts.accepted} accepted: {dict(by_source)}")
        assert counts.accepted > 2000
        assert least_p_value(found, expected) > 0.001
        assert least_p_value(found, colder) < 1e-6, "the test would notice a temperature of 0.5"
        for id in range(0, RESPONSES, 100):
            own = logprobs_of(learner)([3, 4, 5, 6], ledger.tokens(id))
            assert ledger.logprobs(id) == pytest.approx(own, abs=TOLERANCE)


def least_p_value(one: np.ndarray, other: np.ndarray) -> float:
    """Of a chi-square test per position, times their number. Tokens that are rare in both are one cell."""
    found = []
    for position in range(POSITIONS):
        counts = np.stack([np.bincount(some[:, position], minlength=WORDS) for some in (one, other)])
        common = counts.sum(axis=0) >= 20
        table = np.concatenate([counts[:, common], counts[:, ~common].sum(axis=1, keepdims=True)], axis=1)
        table = table[:, table.sum(axis=0) > 0]
        even = table.sum(axis=0) / 2
        statistic = ((table - even) ** 2 / even).sum()
        freedom = torch.tensor((table.shape[1] - 1) / 2)
        found.append(float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2))))
    return POSITIONS * min(found)
