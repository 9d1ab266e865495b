"""The engine contract, kept by verl's real parts: Ray, TransferQueue, agent loop manager and workers, client, load
balancer and replica control. The rollout server is cpu_backend's; nothing is trained here, so there is no worker group.
"""

import time
from collections.abc import Iterator, Sequence

import pytest
import ray
from cpu_backend import CONTROL_CALLS
from verl.checkpoint_engine import CheckpointEngineManager
from verl_stack import Row, Stack

from sortedrl.core.engine import EngineDied, Request, RequestFailed, RequestFinished, Tokens
from sortedrl.integrations.verl import agent
from sortedrl.integrations.verl import engine as verl_engine
from sortedrl.integrations.verl.engine import VerlEngine
from sortedrl.testing.engine_contract import TOKEN_LIMITS, EngineContract, Ledger, resumed

SLOTS = 4
FAILS = 666  # the id of a request whose agent loop raises


def row(request: Request) -> Row:
    agent = "no_such_agent" if request.id == FAILS else "single_turn_agent"
    return {"agent_name": agent, "raw_prompt": [{"role": "user", "content": "Ann says Bob is a knave."}]}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack(row=row)
    yield stack
    stack.close()


class TestVerlEngine(EngineContract):
    deterministic = False  # verl's servers are given no seeds
    honors_ignore_eos = False  # nor this

    @pytest.fixture(autouse=True)
    def _with_stack(self, stack: Stack) -> None:
        self.stack = stack

    def make_engine(self, slots: int) -> VerlEngine:
        return self.stack.engine(slots)

    def test_starts_in_order_and_fills_the_slots(self) -> None:
        """They are handed to verl in order; several workers may bring them to the servers in another, within a few
        milliseconds, and only then are they reported as started."""
        ledger = self.undisturbed(self.requests())
        assert self.stack.sent == list(range(len(TOKEN_LIMITS)))
        assert ledger.most_running == self.slots


def requests(budgets: Sequence[int], first: int = 0) -> list[Request]:
    return TestVerlEngine().requests(budgets, first_id=first)


def test_a_resumed_rollout_goes_on_from_its_tokens(stack: Stack) -> None:
    """The log-probabilities of the joined response are those of one model reading it from the start."""
    engine = stack.engine(SLOTS)
    ledger = Ledger(engine)
    first = requests([40, 40, 40])
    ledger.submit(first)
    changes = engine.poll()
    ledger.apply(changes)
    ledger.abort(ledger.open_ids)
    stopped = [request for request in first if request.id not in ledger.finished]
    parts = {request.id: list(ledger.segments[request.id]) for request in stopped}
    ledger.submit([resumed(request, parts[request.id]) for request in stopped])
    ledger.run()
    prompt = _prompt_tokens(stack)
    for request in stopped:
        segments = parts[request.id] + ledger.segments[request.id]
        tokens = [token for segment in segments for token in segment.tokens]
        logprobs = [value for segment in segments for value in segment.logprobs]
        expected = ray.get(stack.server.log_probabilities.remote(prompt + tokens))[len(prompt) - 1 :]
        assert logprobs == pytest.approx(expected, abs=1e-4)


def _prompt_tokens(stack: Stack) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(stack.config.actor_rollout_ref.model.path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Ann says Bob is a knave."}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_a_stop_right_after_a_submit_leaves_nothing_behind(stack: Stack) -> None:
    """The requests are still on their way to the servers: none may be served behind the stop."""
    for _ in range(5):
        engine = stack.engine(SLOTS)
        engine.submit(requests([100] * 8))
        engine.abort(list(range(8)))
        engine.wake()
        served = ray.get(stack.server.counts.remote())["served"]
        assert engine.poll(engine.now() + 0.3) == []
        assert ray.get(stack.server.counts.remote())["served"] == served


def test_late_arrivals_at_a_server_that_parks_them_are_stopped(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's way: what arrives behind an abort is not refused but held until the servers are resumed."""
    monkeypatch.setattr(stack.control, "abort_replicas", lambda reject_request: _abort_and_park(stack))
    engine = stack.engine(SLOTS)
    engine.submit(requests([100] * 4))
    engine.abort(list(range(4)))
    engine.wake()
    assert engine.poll(engine.now() + 0.3) == []


def _abort_and_park(stack: Stack) -> None:
    CheckpointEngineManager.abort_replicas(stack.control, reject_request=False)


def test_an_agent_loop_that_fails_is_a_failed_rollout(stack: Stack) -> None:
    engine = stack.engine(SLOTS)
    engine.submit(requests([5], first=FAILS))
    (failed,) = engine.poll()
    assert isinstance(failed, RequestFailed) and "no_such_agent" in failed.reason
    assert engine.poll() == []


def test_many_waiting_rollouts_do_not_block_a_weight_sync(stack: Stack) -> None:
    """verl sends all requests to the servers at once. If these are more than the calls that Ray lets into a server's
    actor, its control calls wait behind them, and a weight sync never ends (verl #7990). The gate keeps them out."""
    many = 10 * (stack.config.actor_rollout_ref.rollout.max_num_seqs + CONTROL_CALLS)
    engine = stack.engine(SLOTS)
    engine.submit(requests([100] * many))
    engine.poll()
    engine.abort(list(range(many)))
    control = stack.control

    def sync(version: int) -> None:  # the steps of CheckpointEngineManager.update_weights
        control.abort_replicas()
        control.release_kv_cache_replicas()
        ray.get(stack.server.update_weights.remote({}, version), timeout=20)
        control.resume_kv_cache_replicas()
        control.resume_generation_replicas()

    engine.update_weights(sync, 1)
    ledger = Ledger(engine)
    ledger.submit(requests([5] * 2 * SLOTS))
    ledger.run()
    assert {segment.version for segments in ledger.segments.values() for segment in segments} == {1}


def test_an_abort_that_is_not_ours_loses_nothing(stack: Stack) -> None:
    engine = stack.engine(SLOTS)
    engine.submit(requests([60, 60]))
    changes = engine.poll()
    stack.control.abort_replicas()
    stack.control.resume_generation_replicas()
    while sum(isinstance(change, RequestFinished) for change in changes) < 2:
        changes += engine.poll()
    tokens = {id: sum(len(c.segment) for c in changes if isinstance(c, Tokens) and c.id == id) for id in (0, 1)}
    assert all(0 < count <= 60 for count in tokens.values())


@pytest.mark.parametrize("noticed", ["at the next dispatch", "in a silence"])
def test_a_tool_that_blocks_its_worker_ends_the_engine_with_a_word(
    noticed: str, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = stack.engine(SLOTS)
    stack.control.abort_replicas()  # so that requests are held back
    engine.submit(requests([100] * 2))
    monkeypatch.setattr(agent, "WORKER_SECONDS", 1.0)
    monkeypatch.setattr(verl_engine, "WORKER_SECONDS", 1.0)
    monkeypatch.setattr(verl_engine, "_LONGEST_WAIT_SECONDS", 1.0)
    blocked = [worker.__ray_call__.remote(lambda self: time.sleep(10)) for worker in stack.manager.agent_loop_workers]
    with pytest.raises(EngineDied, match="blocks its event loop"):
        if noticed == "at the next dispatch":
            engine.submit(requests([100], first=2))
        while True:
            engine.poll()
    ray.get(blocked)


def test_a_worker_that_dies_ends_the_engine_with_a_word(stack: Stack) -> None:
    """The last test: the workers are gone after it."""
    engine = stack.engine(SLOTS)
    stack.control.abort_replicas()  # so that requests are held back and their worker dies with them
    engine.submit(requests([100] * 4))
    for worker in stack.manager.agent_loop_workers:
        ray.kill(worker)
    with pytest.raises(EngineDied, match="agent loop worker"):
        while True:
            engine.poll()
