"""Agent loops of several turns under the scheduler: verl's real ToolAgentLoop, tools, workers, client, TransferQueue
and replica control with real Ray. The rollout server is cpu_backend's; nothing is trained here."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import ray
import transfer_queue
from dialogue import TOOL_AGENT, dialogue_model, messages_and_tools
from loops import TOOL_TOKENS
from transformers import AutoTokenizer
from verl_stack import DrivenEngine, Row, Stack

from sortedrl.core import events
from sortedrl.core.controller import Batch, Controller
from sortedrl.core.engine import Request
from sortedrl.core.events import EventLog
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Prompt, Rollout, State
from sortedrl.core.schedule import Schedule
from sortedrl.observe.metrics import Metrics
from sortedrl.tasks.knights_dialogue import KnightsDialogue

HERE = Path(__file__).resolve().parent
PROMPTS = 16
DIALOGUES = KnightsDialogue(count=64).train()


def row(request: Request) -> Row:
    messages, tools_kwargs = messages_and_tools(DIALOGUES[int(request.prompt.id)])
    return {"agent_name": request.prompt.payload, "raw_prompt": messages, "tools_kwargs": tools_kwargs}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    loops = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={HERE / 'loops.yaml'}"
    model = dialogue_model(tmp_path_factory.mktemp("model") / "knights-dialogue")
    stack = Stack(loops, *TOOL_AGENT, row=row, model=model)
    yield stack
    stack.close()


class Run:
    """A scheduler over the stack. `agents`: the agent loop of each prompt, in turn."""

    def __init__(
        self, stack: Stack, mode: str, *agents: str, slots: int = 4, engine: DrivenEngine | None = None, **settings: Any
    ) -> None:
        sizes = {"rollouts_per_update": 4, "prompts_per_cohort": PROMPTS // 2, "max_response_tokens": 128}
        schedule = Schedule(mode=mode, **sizes, **settings)
        prompts = [Prompt(str(i), [1] * 20, agents[i % len(agents)]) for i in range(PROMPTS)]
        self.stack = stack
        self.engine = engine or stack.engine(slots, max_start_seconds=schedule.max_environment_seconds)
        self.log: list[events.Event] = []
        self.metrics = Metrics()
        self.controller = Controller(
            self.engine,
            Prompts(prompts, epochs=1, seed=0, shuffle=False),
            self.engine.scores,
            schedule,
            environments=self.engine.turns,
            log=EventLog(self.log.append, self.metrics),
        )
        self.batches: list[Batch] = []
        self.keys: dict[int, tuple[str, ...]] = {}

    def updates(self, most: int = 99) -> Self:
        for batch in self.controller:
            for rollout in batch:
                self.keys[rollout.id] = self.engine.loops[rollout.id].keys
            self.batches.append(batch)
            self.engine.trained(batch)
            self.engine.forget_all_but(self.controller.live)
            self.engine.sleep()
            self.controller.publish()
            if len(self.batches) == most:
                break
        return self

    @property
    def trained(self) -> list[Rollout]:
        return [rollout for batch in self.batches for rollout in batch]

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.log if isinstance(event, kind)]

    @property
    def rejected(self) -> dict[int, str]:
        return {event.rollout: event.reason for event in self.of(events.Rejected)}

    def check(self) -> None:
        """Every rollout is trained on once or rejected; no loop is left in the workers."""
        counts = Counter(rollout.id for rollout in self.trained)
        assert set(counts.values()) <= {1}
        assert sorted([*counts, *self.rejected]) == list(range(PROMPTS))
        deadline = time.monotonic() + 20
        while self.stack.open_loops() and time.monotonic() < deadline:
            self.engine.poll(self.engine.now() + 0.1)
        assert self.stack.open_loops() == 0


class Trajectory(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    mask: list[int]
    logprobs: list[float]


def trajectory(key: str) -> Trajectory:
    fields = ["prompts", "responses", "response_mask", "rollout_log_probs"]
    found = transfer_queue.kv_batch_get(keys=[key], partition_id="train", select_fields=fields)
    return Trajectory(*(found[name][0].tolist() for name in fields))


def check_trajectory(run: Run, rollout: Rollout) -> None:
    """verl trains on the rollout's ids, with mask 0 on tool tokens and the log-probabilities of the sampling model."""
    (key,) = run.keys[rollout.id]
    found = trajectory(key)
    assert found.tokens == rollout.tokens
    assert found.mask == rollout.mask
    assert found.logprobs == pytest.approx(rollout.logprobs, abs=1e-6)
    ids = found.prompt + found.tokens
    expected = ray.get(run.stack.server.log_probabilities.remote(ids))[len(found.prompt) - 1 :]
    for bit, value, reference in zip(found.mask, found.logprobs, expected, strict=True):
        assert value == (pytest.approx(reference, abs=1e-4) if bit else 0.0)


def versions(rollout: Rollout) -> list[int]:
    return [segment.version for segment in rollout.segments if not segment.is_environment]


def test_a_stop_parks_an_agent_loop_and_it_goes_on_under_the_new_weights(stack: Stack) -> None:
    run = Run(stack, "partial+elevator", "three_turns", max_staleness=3).updates()
    run.check()
    assert not run.rejected
    assert stack.sent == sorted(set(stack.sent)), "no agent loop was started twice"
    assert any(event.prefix for event in run.of(events.Submitted) if event.rollout in _aborted(run))
    assert any(len(set(versions(rollout))) > 1 for rollout in run.trained), "tokens of several versions in one rollout"
    for batch in run.batches:
        for rollout in batch:
            assert all(0 <= batch.version - version <= 3 for version in versions(rollout))
            observations = [segment.tokens for segment in rollout.segments if segment.is_environment]
            assert observations and all(tokens == TOOL_TOKENS for tokens in observations)
            check_trajectory(run, rollout)
    assert run.metrics.run_metrics().waste == 0


def _aborted(run: Run) -> set[int]:
    return {event.rollout for event in run.of(events.Aborted)}


@pytest.mark.parametrize("mode", ["on-policy", "on-policy+planned"])
def test_on_policy_modes_cancel_the_loop_and_start_again_under_the_new_weights(stack: Stack, mode: str) -> None:
    run = Run(stack, mode, "three_turns").updates()
    run.check()
    assert not run.rejected
    for batch in run.batches:
        for rollout in batch:
            assert set(versions(rollout)) == {batch.version}
            check_trajectory(run, rollout)
    dropped = [event for event in (*run.of(events.Aborted), *run.of(events.Regenerated)) if event.dropped]
    again = Counter(stack.sent)
    assert all(again[event.rollout] > 1 for event in dropped)
    assert dropped or mode == "on-policy+planned"


def test_verls_tool_agent_with_a_tool(stack: Stack) -> None:
    """The dialogue model asks, the tool answers, the model goes on; stops in between change nothing."""
    run = Run(stack, "partial+elevator", "scored_tool_agent", max_staleness=3).updates()
    run.check()
    assert not run.rejected
    tokenizer = AutoTokenizer.from_pretrained(stack.config.actor_rollout_ref.model.path)
    answers = 0
    for rollout in run.trained:
        check_trajectory(run, rollout)
        puzzle = DIALOGUES[int(rollout.prompt.id)].answer
        statements = {puzzle.statement(one) for one in range(puzzle.puzzle.characters)}
        for segment in rollout.segments:
            if segment.is_environment:
                text = tokenizer.decode(segment.tokens, skip_special_tokens=True).strip().replace(" .", ".")
                answers += text in statements
    assert answers > PROMPTS // 4
    assert run.metrics.run_metrics().turns_mean > 1.2


def test_no_slot_is_held_during_a_tool_call(stack: Stack) -> None:
    run = Run(stack, "partial", "slow_tool", slots=1, max_staleness=9).updates()
    run.check()
    inside: set[int] = set()
    in_tool: set[int] = set()
    most_in_tool = overlapped = 0
    for event in run.log:
        if isinstance(event, events.Started):
            inside.add(event.rollout)
            overlapped += bool(in_tool)
        elif isinstance(event, events.TurnEnded):
            inside.discard(event.rollout)
            in_tool.add(event.rollout)
        elif isinstance(event, events.Observed | events.Finished | events.Aborted):
            inside.discard(event.rollout)
            in_tool.discard(event.rollout)
        assert len(inside) <= 1
        most_in_tool = max(most_in_tool, len(in_tool))
    assert most_in_tool > 2 and overlapped > PROMPTS, "the one slot served others during the tool calls"


@pytest.mark.parametrize("mode", ["partial+elevator", "on-policy"])
def test_a_loop_that_hangs_in_a_tool_is_rejected_and_the_rest_is_trained(stack: Stack, mode: str) -> None:
    run = Run(
        stack, mode, "three_turns", "hangs_in_tool", "three_turns", "hangs_before_first_turn",
        max_environment_seconds=6.0, max_retries=0,
    ).updates()  # fmt: skip
    run.check()
    assert {id % 4 for id in run.rejected} == {1, 3} and len(run.rejected) == PROMPTS // 2
    assert all("max_environment_seconds = 6" in reason for reason in run.rejected.values())
    assert all("did not call generate" in reason for id, reason in run.rejected.items() if id % 4 == 3)


def test_what_a_loop_must_not_do_is_rejected_with_a_reason(stack: Stack) -> None:
    run = Run(stack, "partial+elevator", "three_turns", "encodes_again", "fails_in_tool", "never_ends", max_retries=1)
    run.updates().check()
    reasons = {id % 4: reason for id, reason in run.rejected.items()}
    assert sorted(reasons) == [1, 2, 3] and len(run.rejected) == 3 * PROMPTS // 4
    assert "response_mask 1" in reasons[1] and "failed 2 times" in reasons[1]
    assert "OSError: the tool's server is gone" in reasons[2]
    assert "response_length is used up" in reasons[3]


def test_two_contexts_of_one_loop_are_two_turns_one_after_the_other(stack: Stack) -> None:
    run = Run(stack, "partial+elevator", "two_contexts").updates()
    run.check()
    assert not run.rejected
    for rollout in run.trained:
        sampled = [segment.tokens for segment in rollout.segments if not segment.is_environment]
        found = [trajectory(key) for key in run.keys[rollout.id]]
        assert len(found) == 2 and found[0].prompt == found[1].prompt
        assert [token for tokens in sampled for token in tokens] == found[0].tokens + found[1].tokens


def test_a_request_that_a_server_loses_is_sent_again_from_the_same_loop(stack: Stack) -> None:
    ray.get(stack.server.fail_next.remote(3))
    run = Run(stack, "partial+elevator", "three_turns").updates()
    run.check()
    assert not run.rejected and len(run.of(events.Failed)) == 3
    assert stack.sent == sorted(set(stack.sent))
    for rollout in run.trained:
        check_trajectory(run, rollout)


def test_after_a_kill_rollouts_of_several_turns_are_regenerated(stack: Stack) -> None:
    before = Run(stack, "partial+elevator", "slow_tool", max_staleness=3).updates(most=2)
    controller_state, engine_state = before.controller.state(), before.engine.state()
    ended = (State.FINISHED, State.READY)
    started = {id for id, one in before.controller.live.items() if one.observations and one.state not in ended}
    engine = stack.engine(4, version=2)
    engine.restore(engine_state | {"count": stack.made}, version=2)
    after = Run(stack, "partial+elevator", "slow_tool", max_staleness=3, engine=engine)
    after.controller.restore(controller_state)
    after.updates()
    trained = [rollout.id for rollout in (*before.trained, *after.trained)]
    assert sorted(trained) == list(range(PROMPTS)), "none is lost, none is trained on twice"
    lost = {event.rollout for event in after.of(events.Regenerated) if "cannot bring back" in event.reason}
    had_ended = {event.rollout for event in after.of(events.Finished) if not event.made}  # its result was saved
    assert started & lost and started <= lost | had_ended
    for batch in after.batches:
        for rollout in batch:
            assert all(0 <= batch.version - version <= 3 for version in versions(rollout))
            if rollout.id in lost:
                check_trajectory(after, rollout)
