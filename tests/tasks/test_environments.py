"""Environments of a run: instances in this process and in worker processes, replay, time limits, limits of a run."""

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import chat_tokenizer
from counting_task import CountingTask
from environment_turns import TOKENIZER, answers_of, collected, end_by, rollout_of, shown, speak, turn
from processes import wait_for_end, wait_until
from sortedrl.core.rollout import Prompt, Segment
from sortedrl.tasks.environment_calls import turns_of
from sortedrl.tasks.environment_host import Host, LocalHost
from sortedrl.tasks.environment_workers import WorkerHosts
from sortedrl.tasks.environments import TaskEnvironments
from sortedrl.tasks.task import Problem
from sortedrl.tasks.tools import ToolEnvironment, calculator
from sortedrl.tasks.worker_process import WorkerError

LIMIT_SECONDS = 30.0
SHORT_LIMIT_SECONDS = 3.0  # beside a call that exceeds it, another one must be answered on a busy machine


@contextlib.contextmanager
def environments_of(
    kind: str, task: CountingTask | None = None, limit_seconds: float = LIMIT_SECONDS, tokenizer: Any = TOKENIZER
) -> Iterator[tuple[TaskEnvironments, Any]]:
    """And their host."""
    task = task or CountingTask()
    host: Host = (
        LocalHost(task.environment, limit_seconds=limit_seconds)
        if kind == "local"
        else WorkerHosts(task, workers=1, limit_seconds=limit_seconds)
    )
    with contextlib.closing(host):
        yield TaskEnvironments(tokenizer, host), host


@pytest.fixture(params=["local", "workers"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def notes(log: Path) -> list[str]:
    return log.read_text().splitlines()


def test_turns_of_an_episode_go_to_one_instance_in_order(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with environments_of(kind, CountingTask(str(log))) as (environments, _):
        rollout = rollout_of()
        first = turn(environments, rollout, "hello", call=7)
        assert shown(first) == "\n<|im_start|>user\nturn 1 of p0<|im_end|>\n<|im_start|>assistant\n"
        assert "turn 2 of p0" in shown(turn(environments, rollout, "again", call=8))
        end = turn(environments, rollout, "end", call=9)
        assert (end.reward, end.detail) == (3.0, {"correct": True, "parts": {"part": 0.5, "turns": 3}})
        wait_until(lambda: "p0 close" in notes(log))
    assert notes(log) == ["p0 reset", "p0 step hello", "p0 step again", "p0 step end", "p0 close"]


@pytest.mark.parametrize("remembers", [False, True])
def test_a_lost_instance_comes_back_by_replay_or_from_its_state(kind: str, tmp_path: Path, remembers: bool) -> None:
    log = tmp_path / "log"
    task = CountingTask(str(log), remembers)
    rollout = rollout_of()
    with environments_of(kind, task) as (environments, _):
        for text in ("one", "two"):
            turn(environments, rollout, text)
        state = environments.state(rollout.id)
    assert state == ({"turns": 2} if remembers else None)
    with environments_of(kind, task) as (environments, _):  # a resumed run
        assert environments.restore(rollout, state)
        assert "turn 3 of p0" in shown(turn(environments, rollout, "three"))
    again = [line for line in notes(log) if line != "p0 close"][3:]
    steps = ["p0 restore"] if remembers else ["p0 step one", "p0 step two"]
    assert again == ["p0 reset", *steps, "p0 step three"]


@pytest.mark.parametrize("earlier", ["random", "end"])
def test_a_replay_that_differs_means_that_the_rollout_is_lost(kind: str, earlier: str) -> None:
    with environments_of(kind) as (environments, _):
        rollout = rollout_of()
        speak(rollout, earlier)
        rollout.observe(TOKENIZER("\nwhat was recorded")["input_ids"])
        answer = turn(environments, rollout, "next")
        assert answer.is_lost and answer.observation is None and "replayed" in str(answer.error)
        assert environments.state(rollout.id) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "ValueError: told to raise"),
        ("exit", "SystemExit"),
        ("nothing", "return a number or a sortedrl.tasks.task.Reward"),
    ],
)
def test_an_error_is_an_answer_and_the_next_call_gets_a_new_instance(kind: str, text: str, reason: str) -> None:
    with environments_of(kind) as (environments, _):
        rollout = rollout_of()
        turn(environments, rollout, "one")
        before = list(rollout.segments)
        answer = turn(environments, rollout, text, call=3)
        assert reason in str(answer.error) and not answer.is_lost
        rollout.segments[:] = before
        assert "turn 2 of p0" in shown(turn(environments, rollout, "two", call=4)), "after a replay"


ADDS_TEXTS = (  # as most templates do
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(("text", "reason"), [("number", "can only concatenate str"), ("surrogate", "valid Unicode")])
@pytest.mark.parametrize("replayed", [False, True])
def test_a_message_that_cannot_be_turned_into_tokens_costs_its_rollout(text: str, reason: str, replayed: bool) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = ADDS_TEXTS
    with environments_of("local", tokenizer=tokenizer) as (environments, _):
        rollout = rollout_of()
        if replayed:  # an environment that answers otherwise than before
            speak(rollout, text)
            rollout.observe([5, 6])
        answer = turn(environments, rollout, "next" if replayed else text)
        assert reason in str(answer.error)
        assert answer.is_lost is replayed and answer.observation is None
        assert "turn 1 of p1" in shown(turn(environments, rollout_of(1), "next", call=1))


def test_ctrl_c_during_a_turn_in_this_process_is_not_an_error_of_the_environment() -> None:
    """It ends the run or the evaluation. A worker process does not get it: there it can only be an error."""
    for kind in ("local", "workers"):
        with environments_of(kind) as (environments, _):
            rollout = rollout_of()
            if kind == "local":
                speak(rollout, "interrupt")
                with pytest.raises(KeyboardInterrupt):
                    environments.submit(rollout, 0)
            else:
                assert "KeyboardInterrupt" in str(turn(environments, rollout, "interrupt").error)


def test_environments_in_this_process_work_in_a_notebook() -> None:
    """An event loop runs in its main thread."""

    async def cell() -> None:
        with environments_of("local") as (environments, _):
            assert "turn 1 of p1" in shown(turn(environments, rollout_of(1), "start"))
            environments.cancel(1)

    asyncio.run(cell())


def test_a_turn_that_waits_too_long_is_canceled_and_others_go_on(kind: str) -> None:
    with environments_of(kind, limit_seconds=SHORT_LIMIT_SECONDS) as (environments, _):
        slow, quick = rollout_of(0), rollout_of(1)
        turn(environments, quick, "start")
        speak(slow, "sleep 600")
        speak(quick)
        answers = answers_of(environments, [slow, quick])
        assert answers[0].error == f"no answer within {SHORT_LIMIT_SECONDS:g} s"
        assert "turn 2 of p1" in shown(answers[1])


def test_many_instances_wait_at_the_same_time_in_one_process() -> None:
    with environments_of("workers") as (environments, host):
        host.wait_until_ready()
        rollouts = [rollout_of(number) for number in range(50)]
        for rollout in rollouts:
            speak(rollout, "sleep 1")
        began = time.monotonic()
        answers_of(environments, rollouts)
        assert time.monotonic() - began < 25, "one after the other they would take 50 s"


def test_an_answer_that_is_too_large_is_an_error() -> None:
    with environments_of("workers") as (environments, _):
        answer = turn(environments, rollout_of(), "large")
        assert "bytes; the maximum is" in str(answer.error)


def test_a_problem_that_cannot_be_pickled_is_an_error_and_others_go_on() -> None:
    with environments_of("workers") as (environments, _):
        good, bad = rollout_of(0), rollout_of(1, answer=lambda: None)
        turn(environments, good, "one")
        assert "cannot be sent to a worker process" in str(turn(environments, bad, "one").error)
        assert "turn 2 of p0" in shown(turn(environments, good, "two"))


@pytest.mark.slow
def test_a_canceled_call_has_no_answer_and_its_instance_is_closed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with environments_of("workers", CountingTask(str(log)), limit_seconds=2.0) as (environments, host):
        rollout = rollout_of()
        turn(environments, rollout, "one")
        (process_id,) = host.process_ids()
        speak(rollout, "sleep 600")
        environments.submit(rollout, 1)
        environments.cancel(rollout.id)
        assert environments.pending == 0
        rollout.drop_tokens()
        rollout.attempt += 1
        time.sleep(5)
        assert "turn 1 of p0" in shown(turn(environments, rollout, "new", call=2)), "a new instance"
        assert host.process_ids() == [process_id], "the canceled call had no deadline left to miss"
    assert notes(log)[:4] == ["p0 reset", "p0 step one", "p0 step sleep 600", "p0 close"]


@pytest.mark.parametrize("instance", ["is there", "was dropped", "of a resumed run", "of a resumed run, from state"])
@pytest.mark.parametrize("cuts_a_turn", [True, False])
def test_a_rollout_that_a_limit_ended_gets_its_reward_from_finish(
    kind: str, tmp_path: Path, cuts_a_turn: bool, instance: str
) -> None:
    """A turn that the limit cut is not passed to the instance; a whole one is, before there is no room for another."""
    log = tmp_path / "log"
    with environments_of(kind, CountingTask(str(log), remembers="state" in instance)) as (environments, _):
        rollout = rollout_of()
        turn(environments, rollout, "one")
        speak(rollout, "two", ends=not cuts_a_turn)
        if not cuts_a_turn:
            answers_of(environments, [rollout])
        end_by("max_response_tokens", rollout)
        state = environments.state(rollout.id)
        if instance != "is there":
            environments.cancel(rollout.id)
        if "resumed" in instance:
            assert environments.restore(rollout, state)
        environments.ends.submit(rollout)
        (scored,) = collected(environments.ends, 1)
        assert (scored.rollout_id, scored.reward, scored.error) == (0, -1.0 if cuts_a_turn else -2.0, None)
        assert environments.ends.pending == environments.pending == 0
    assert "p0 finish max_response_tokens" in notes(log)
    assert notes(log).count("p0 reset") == 1 + (instance != "is there")


@pytest.mark.parametrize(("last", "is_cut"), [(2, False), (6, False), (5, True)])
def test_a_last_turn_that_ends_with_no_eos_token_counts_as_cut(last: int, is_cut: bool) -> None:
    rollout = rollout_of()
    rollout.append(Segment([3, 4, last], [-0.5] * 3, 0))
    assert [turn.is_cut for turn in turns_of(rollout, {2, 6})] == [is_cut]
    assert [turn.is_cut for turn in turns_of(rollout)] == [False], "it is not the end of the rollout"


def test_calls_are_parsed_with_the_parser_of_the_chat_template() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "CALL ",
                "close_pattern": r" END\s*",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }
    environments = TaskEnvironments(tokenizer, LocalHost(ToolTask().environment, limit_seconds=LIMIT_SECONDS))
    rollout = rollout_of()
    rollout.prompt = Prompt("p0", tokenizer("<|im_start|>assistant\n")["input_ids"], rollout.prompt.payload)
    call = 'CALL {"name": "calculator", "arguments": {"expression": "6*7"}} END'
    assert "tool\n42<|im_end|>" in shown(turn(environments, rollout, call))
    assert "tool\nerror: " in shown(turn(environments, rollout, 'CALL {"name": "calculator", END', call=1))
    assert turn(environments, rollout, "<tool_call>not this template's</tool_call>", call=2).reward == 1.0


class ToolTask(CountingTask):
    """Any response without a call is correct."""

    def environment(self) -> Any:
        return ToolEnvironment(self, [calculator])

    def score(self, problem: Problem, response: str) -> float:
        return 1.0


def test_a_process_that_cannot_be_started_is_an_error_before_the_run() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    host = WorkerHosts(CountingTask(), workers=1, limit_seconds=1.0)
    with contextlib.closing(host):
        lowest_free = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(WorkerError, match="Too many open files"):
                host.wait_until_ready()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_process_or_socket_is_left_after_close() -> None:
    before = set(os.listdir("/proc/self/fd"))
    host = WorkerHosts(CountingTask(), workers=2, limit_seconds=LIMIT_SECONDS)
    environments = TaskEnvironments(TOKENIZER, host)
    for number in range(4):
        rollout = rollout_of(number)
        speak(rollout, "sleep 600")
        environments.submit(rollout, number)
    host.wait_until_ready()
    wait_until(lambda: len(host.process_ids()) == 2)
    processes = host.process_ids()
    host.close()
    wait_for_end(*processes)
    assert set(os.listdir("/proc/self/fd")) <= before
