"""The drafter that knows other responses to the same prompt, without vLLM: what it drafts, and from where."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.controller import Controller
from sortedrl.core.engine import ForwardingEngine
from sortedrl.core.events import EventLog
from sortedrl.core.prompts import Prompts
from sortedrl.core.schedule import Schedule
from sortedrl.core.strategies.registry import strategy_named
from sortedrl.engines import suffix_drafter
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.simulated_loop import SimulatedScorer
from sortedrl.engines.speculative import LoggedDrafts, own_drafter, why_no_drafts
from sortedrl.engines.step_time import PRESETS
from sortedrl.engines.suffix_drafter import SuffixDrafter, _Text, longest_match, places_in
from sortedrl.observe.metrics import Metrics
from sortedrl.studies.workload import SimulatedPrompts

PROMPT = [1, 2, 3, 4]
OTHER = [9, 8, 7]


def drafter_of(*prompts: list[int]) -> SuffixDrafter:
    config = SimpleNamespace(num_speculative_tokens=3, max_num_seqs=8)
    drafter = SuffixDrafter(SimpleNamespace(speculative_config=config, scheduler_config=config))
    for prompt in prompts:
        drafter.expect(prompt)
    return drafter


def drafts(drafter: SuffixDrafter, *contexts: list[int], sampled: int = 1) -> list[list[int]]:
    """After a step that sampled the last tokens of each context."""
    rows = np.zeros((len(contexts), 64), np.int32)
    for row, context in zip(rows, contexts, strict=True):
        row[: len(context)] = context
    made = [context[len(context) - sampled :] for context in contexts]
    return drafter.propose(made, np.array([len(context) for context in contexts]), rows)


@pytest.mark.parametrize(
    ("text", "end", "expected"),
    [
        ([5, 6, 7, 8, 5, 6, 7, 9], [1, 5, 6, 7], (3, 7)),  # the last of two
        ([4, 5, 6, 7, 8, 5, 6, 7, 9], [4, 5, 6, 7], (4, 4)),  # the longest
        ([5, 6, 7], [5, 6, 7], (0, 0)),  # nothing follows
        ([5], [5, 6, 7], (0, 0)),
        ([6, 7, 8, 9], [4, 6, 7, 8], (3, 3)),  # the text starts there
        ([6, 7, 9, 8], [6, 7, 8], (0, 0)),  # two tokens are too few
    ],
)
def test_the_longest_end_that_occurs_is_found(text: list[int], end: list[int], expected: tuple[int, int]) -> None:
    tokens, sought = np.array(text, np.int32), np.array(end, np.int32)
    for places in (places_in(tokens, sought), _Text(tokens).places(sought)):
        assert longest_match(tokens, sought, places) == expected


def test_what_followed_in_another_response_is_drafted_and_counted_by_source() -> None:
    drafter = drafter_of(PROMPT)
    assert drafts(drafter, [*PROMPT, 20]) == [[]], "nothing is known yet"
    drafter.learn(PROMPT, [20, 21, 22, 23, 24], "finished")
    assert drafts(drafter, [*PROMPT, 20]) == [[21, 22, 23]]
    assert drafts(drafter, [*PROMPT, 20, 21, 22, 30], sampled=3) == [[]]
    assert drafter.by_source == {"finished drafted": 3, "finished accepted": 2}
    assert drafter.counts.drafted == 3 and drafter.counts.accepted == 2


def test_a_draft_ends_with_the_response_that_it_comes_from() -> None:
    drafter = drafter_of(PROMPT)
    drafter.learn(PROMPT, [20, 21, 22], "aborted")
    drafter.learn(PROMPT, [30, 31, 32], "aborted")
    assert drafts(drafter, [*PROMPT, 20, 21]) == [[22]]


def test_responses_to_other_prompts_are_not_used() -> None:
    drafter = drafter_of(PROMPT, OTHER)
    drafter.learn(OTHER, [3, 4, 20, 21, 22], "finished")
    assert drafts(drafter, [*PROMPT, 20]) == [[]]


def test_running_responses_to_the_same_prompt_and_the_response_itself_are_used() -> None:
    drafter = drafter_of(PROMPT)
    ahead, behind = [*PROMPT, 20, 21, 22, 23], [*PROMPT, 20, 21]
    assert drafts(drafter, ahead, behind) == [[], [22, 23]]
    assert drafts(drafter, [50, 51, 52, 53, 50, 51, 52]) == [[53, 50, 51]], "of an unknown prompt, too"


def test_rows_may_change_places() -> None:
    drafter = drafter_of(PROMPT, OTHER)
    for prompt, response in ((PROMPT, [20, 21, 22]), (OTHER, [40, 41, 42])):
        drafter.learn(prompt, response, "finished")
    assert drafts(drafter, [*PROMPT, 20], [*OTHER, 40]) == [[21, 22], [41, 42]]
    assert drafts(drafter, [*OTHER, 40, 41]) == [[42]], "the first one ended, and the second took its row"


def test_nothing_is_drafted_during_a_prefill_or_while_many_run() -> None:
    drafter = drafter_of(PROMPT)
    drafter.learn(PROMPT, [20, 21, 22], "finished")
    rows = np.zeros((1, 64), np.int32)
    rows[0, :5] = [*PROMPT, 20]
    assert drafter.propose([[]], np.array([5]), rows) == [[]]
    own_drafter(drafter, 1)
    context = [*PROMPT, 20]
    assert drafts(drafter, context, context) == [[], []] and drafts(drafter, context) == [[21, 22]]


def test_the_oldest_prompts_are_forgotten_when_they_take_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_drafter, "MOST_TOKENS", 20)
    drafter = drafter_of()
    for prompt in (PROMPT, OTHER):
        drafter.expect(prompt)
        drafter.learn(prompt, [20, 21, 22, 23, 24, 25, 26], "finished")
    assert drafts(drafter, [*PROMPT, 20]) == [[]] and drafts(drafter, [*OTHER, 20]) == [[21, 22, 23]]
    drafter.learn(PROMPT, [20, 21], "finished")  # of a request that was running meanwhile
    assert drafts(drafter, [*PROMPT, 20]) == [[]]


def test_only_a_drafter_of_ours_can_be_switched() -> None:
    other: Any = object()
    assert own_drafter(other, None) is None
    with pytest.raises(ConfigurationError, match="draft_up_to 8"):
        own_drafter(other, 8)


def test_what_was_drafted_and_accepted_is_in_the_log_once_per_update_and_in_the_metrics() -> None:
    engine: Any = SimulatedEngine(slots=4, step_time=PRESETS["memory-bound"], length_of=lambda request: 5)
    metrics = Metrics()
    prompts = Prompts(SimulatedPrompts(8, 2), epochs=1)
    schedule = Schedule(mode="baseline", rollouts_per_update=4, max_response_tokens=8)
    controller = Controller(engine, prompts, SimulatedScorer(engine), schedule, log=EventLog(metrics))
    LoggedDrafts(engine).mark(controller)
    assert metrics.snapshot().tokens_per_step is None, "an engine without drafts logs nothing"
    drafter = drafter_of()
    engine.draft_counts = drafter.counts
    logged = LoggedDrafts(ForwardingEngine(engine))
    for _ in controller:
        drafts(drafter, [*PROMPT, 5, 6, 7, 5, 6, 7, 5, 6, 7], sampled=3)
        logged.mark(controller)
        controller.publish()
    found = metrics.run_metrics()
    assert (found.updates, found.drafted_tokens, found.accepted_tokens, found.tokens_per_step) == (2, 6, 4, 3.0)


@pytest.mark.parametrize(("method", "left_out"), [("ngram", True), ("custom_class", True), ("eagle3", False)])
def test_drafts_without_a_model_are_left_out_in_modes_that_keep_their_slots_full(method: str, left_out: bool) -> None:
    modes = "baseline", "on-policy+planned", "partial", "partial+elevator", "partial+lookahead", "april"
    config = {"speculative_config": {"method": method, "num_speculative_tokens": 3}}
    full = [mode for mode in modes if why_no_drafts(config, strategy_named(mode))]
    assert full == (["partial+elevator", "partial+lookahead", "april"] if left_out else [])
    assert why_no_drafts({}, strategy_named("april")) is None
