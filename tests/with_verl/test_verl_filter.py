"""Dynamic sampling by a metric of the reward function, with verl's real workers, TransferQueue and Ray."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from loops import Graded
from verl_stack import DrivenEngine, Row, Stack

from sortedrl.core import events
from sortedrl.core.controller import Controller
from sortedrl.core.engine import Request
from sortedrl.core.events import EventLog
from sortedrl.core.prompts import Prompts
from sortedrl.core.rejections import TooManyRejected
from sortedrl.core.rollout import Prompt
from sortedrl.core.schedule import Schedule
from sortedrl.integrations.verl.settings import keeps_unequal

PROMPTS, GROUP_SIZE = 16, 2
FILTER = "algorithm.filter_groups"


def row(request: Request) -> Row:
    messages = [{"role": "user", "content": "Ann says Bob is a knave."}]
    return {"agent_name": request.prompt.payload, "raw_prompt": messages, "tools_kwargs": {}}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    loops = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={Path(__file__).parent / 'loops.yaml'}"
    stack = Stack(loops, f"{FILTER}.enable=True", f"{FILTER}.metric={Graded.names[0]}", row=row)
    yield stack
    stack.close()


def controller_over(engine: DrivenEngine, agent: str, log: EventLog | None = None) -> Controller:
    schedule = Schedule(
        mode="partial+elevator",
        rollouts_per_update=4,
        rollouts_per_prompt=GROUP_SIZE,
        whole_groups=True,
        prompts_per_cohort=PROMPTS // 2,
        max_response_tokens=128,
    )
    prompts = [Prompt(str(i), [1] * 20, agent) for i in range(PROMPTS)]
    data = Prompts(prompts, shuffle=False)
    filter = keeps_unequal("acc")
    return Controller(engine, data, engine.scores, schedule, environments=engine.turns, filter_groups=filter, log=log)


def test_groups_of_one_accuracy_are_filtered_and_cleared_at_once(stack: Stack) -> None:
    engine = stack.engine(4)
    filtered: list[int] = []

    def drop_filtered(event: events.Event) -> None:
        if isinstance(event, events.Filtered):
            assert event.reason == "equal acc"
            keys = [key for id in event.rollouts for key in engine.loops[id].keys]
            assert len(keys) == GROUP_SIZE and not {*keys} & {*stack.cleared}
            engine.drop(event.rollouts)
            assert {*keys} <= {*stack.cleared} and not {*event.rollouts} & {*engine.loops}
            filtered.extend(event.rollouts)

    controller = controller_over(engine, "graded", EventLog(drop_filtered))
    trained: list[int] = []
    for batch in controller:
        trained += [rollout.id for rollout in batch]
        assert all(rollout.detail == rollout.id % 2 for rollout in batch)
        engine.trained(batch)
        engine.forget_all_but(controller.live)
        engine.sleep()
        controller.publish()
    assert sorted(trained) == [id for id in range(PROMPTS * GROUP_SIZE) if id // GROUP_SIZE % 2]
    assert sorted(filtered) == [id for id in range(PROMPTS * GROUP_SIZE) if not id // GROUP_SIZE % 2]
    assert not engine.loops
    assert 0.25 <= controller.kept_fraction <= 0.75, "of the last 16 rollouts, in order of completion"


def test_a_score_that_is_not_collected_keeps_its_metric_in_a_checkpoint(stack: Stack) -> None:
    engine = stack.engine(4)
    engine.restore({"count": 10, "keys": {"3": ["x"]}, "rewards": {"3": 1.0}, "metrics": {"3": 0.5}}, version=0)
    again = stack.engine(4)
    again.restore(engine.state(), version=0)
    assert again.loops[3].score == (1.0, None) and again.loops[3].metric == 0.5


def test_a_metric_that_the_reward_function_does_not_return_ends_the_run_with_those_that_it_does(stack: Stack) -> None:
    controller = controller_over(stack.engine(4), "graded_otherwise")
    with pytest.raises(TooManyRejected, match=r"filter_groups\.metric = 'acc': .* it returned format, length"):
        next(iter(controller))
