"""When a run stops for its rejections, what it prints about them, and how soon a score is seen."""

import time

import pytest

from paced import PacedEngine
from sortedrl.core import (
    Controller,
    EventLog,
    Prompt,
    Prompts,
    RejectionWatch,
    Rollout,
    Schedule,
    ScoreAtOnce,
    TooManyRejected,
    events,
)
from sortedrl.core.engine import Change, Tokens
from sortedrl.core.rejections import MIN_FIRST, SECONDS_BETWEEN_LINES
from sortedrl.core.user_values import MAX_REWARD, as_reward
from sortedrl.tasks.scoring import BackgroundScorer
from sortedrl.tasks.task import Reward


def reject(watch: RejectionWatch, count: int, reason: str = "no reward: KeyError: 'answer'") -> None:
    for _ in range(count):
        watch.count_rejected(reason, "rollout 7")


def score(watch: RejectionWatch, count: int) -> None:
    for _ in range(count):
        watch.count_scored()


def test_the_first_updates_worth_of_rejections_stops_the_run() -> None:
    watch = RejectionWatch(128)
    reject(watch, 127)
    with pytest.raises(TooManyRejected, match="first 128 rollouts were all rejected; 128 times: KeyError: 'answer'"):
        reject(watch, 1)


def test_a_few_unlucky_rollouts_of_a_small_update_do_not() -> None:
    watch = RejectionWatch(1)
    reject(watch, MIN_FIRST - 1)
    score(watch, 1)
    reject(watch, 9)
    with pytest.raises(TooManyRejected, match=r"17 of the last 18 .* more than the fraction of 0\.5"):
        reject(watch, 1)


def test_more_than_the_fraction_of_four_updates_stops_the_run() -> None:
    watch = RejectionWatch(100, max_fraction=0.25)
    for _ in range(30):  # a quarter, for ever
        score(watch, 3)
        reject(watch, 1)
    score(watch, 400)
    reject(watch, 100)
    with pytest.raises(TooManyRejected, match="101 of the last 400"):
        reject(watch, 1)


def test_a_fraction_of_1_never_stops_a_run_that_scored_once() -> None:
    watch = RejectionWatch(8, max_fraction=1.0)
    score(watch, 1)
    reject(watch, 1000)
    assert (watch.scored, watch.rejected) == (1, 1000)


def test_the_first_rejection_and_new_reasons_are_printed_but_not_each() -> None:
    lines: list[str] = []
    now = [0.0]
    watch = RejectionWatch(1000, log=lines.append, clock=lambda: now[0])
    reject(watch, 5, "no reward: KeyError: 'answer'")
    assert lines == ["rejected rollout 7: no reward: KeyError: 'answer'"]
    reject(watch, 1, "no reward: ValueError")
    assert len(lines) == 1, "too soon after the last one"
    now[0] = SECONDS_BETWEEN_LINES
    reject(watch, 3, "no reward: no result within 30 s")
    reject(watch, 3, "no reward: no result within 31 s")  # the same but for a number
    assert len(lines) == 2
    assert watch.most_frequent() == "6 times: no result within 30 s (2 other reasons)"


def test_a_prompt_that_is_too_long_does_not_count() -> None:
    lines: list[str] = []
    watch = RejectionWatch(8, log=lines.append)
    prompts = [Prompt(str(n), [1] * (20 if n < 30 else 2)) for n in range(40)]
    schedule = Schedule(mode="partial", rollouts_per_update=8, prompts_per_cohort=40, max_prompt_tokens=10)
    engine = PacedEngine(slots=4, length_of=lambda request: 2)
    controller = Controller(engine, Prompts(prompts), ScoreAtOnce(len), schedule, log=EventLog(watch))
    trained = 0
    for batch in controller:
        trained += len(batch)
        controller.publish()
    assert (trained, watch.rejected) == (10, 0)
    assert len(lines) == 1 and "max_prompt_tokens" in lines[0]


def test_an_engine_that_loses_everything_counts() -> None:
    watch = RejectionWatch(8)
    for rollout in range(8):
        watch(events.Failed(0.0, rollout, 0, 0, "lost"))
        if rollout < 7:
            watch(events.Rejected(0.0, rollout, 0, "failed 3 times, last: lost"))
    with pytest.raises(TooManyRejected, match="8 times: failed 3 times, last: lost"):
        watch(events.Rejected(0.0, 7, 0, "failed 3 times, last: lost"))


@pytest.mark.parametrize("log", [EventLog(RejectionWatch(16)), None], ids=["a log with a watch", "no log"])
def test_a_controller_stops_if_every_reward_fails(log: EventLog | None, caplog: pytest.LogCaptureFixture) -> None:
    def returns_text(rollout: Rollout) -> float:
        return "1.0"  # type: ignore[return-value]

    prompts = [Prompt(str(n), [1]) for n in range(64)]
    schedule = Schedule(mode="partial", rollouts_per_update=16, prompts_per_cohort=64)
    engine = PacedEngine(slots=4, length_of=lambda request: 2)
    controller = Controller(engine, Prompts(prompts), ScoreAtOnce(returns_text), schedule, log=log)
    with pytest.raises(TooManyRejected, match=r"16 times: TypeError: the reward is '1\.0' of type str, not a number"):
        list(controller)
    assert ("rejected rollout 0: no reward: TypeError" in caplog.text) == (log is None)


def test_numbers_of_every_kind_are_rewards() -> None:
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    for value in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor(0.5, requires_grad=True), numpy.float32(0.5)):
        assert as_reward(value) == 0.5
    for value in (True, 1, numpy.True_, numpy.int64(1), torch.tensor(True), numpy.array([1.0])):
        assert type(as_reward(value)) is float and as_reward(value) == 1.0
    assert as_reward(MAX_REWARD) == MAX_REWARD and as_reward(-MAX_REWARD) == -MAX_REWARD
    for value, kind in ((torch.ones(2), "Tensor"), (numpy.ones(2), "ndarray"), (numpy.array(["1"]), "ndarray")):
        with pytest.raises(TypeError, match=f"type {kind}"):
            as_reward(value)
    with pytest.raises(ValueError, match=r"1e\+07 of type Tensor"):
        as_reward(torch.tensor(1e7))


class QuietEngine(PacedEngine):
    """Delivers tokens when a request ends, as the engines in this process do: until then `poll` has nothing to say."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self._made: dict[int, list[Tokens]] = {}
        self.steps = 0

    def _step(self) -> None:
        super()._step()
        self.steps += 1
        spoken: list[Change] = []
        for change in self._unreported:
            if isinstance(change, Tokens):
                self._made.setdefault(change.id, []).append(change)
            else:
                for tokens in self._made.pop(change.id, []):
                    spoken.append(tokens._replace(at=change.at))
                spoken.append(change)
        self._unreported = spoken


@pytest.mark.parametrize("mode", ["partial", "on-policy"])
def test_a_score_that_completes_the_update_is_seen_while_the_engine_generates(mode: str) -> None:
    """The second response takes ten seconds more. The update needs the first alone, and its score takes 0.3 s."""
    scored_at: list[int] = []  # steps of the engine: on a busy machine it waits as well

    def slow(rollout: Rollout) -> Reward:
        time.sleep(0.3)
        scored_at.append(engine.steps)
        return Reward(1.0, True)

    engine = QuietEngine(slots=2, length_of=lambda request: 1 if request.id == 0 else 500, step_seconds=0.02)
    prompts = Prompts([Prompt("short", [1]), Prompt("long", [1])])
    schedule = Schedule(mode=mode, rollouts_per_update=1, prompts_per_cohort=2, oversubscribe=2.0)
    controller = Controller(engine, prompts, BackgroundScorer(slow), schedule)
    batch = next(iter(controller))
    assert [rollout.id for rollout in batch] == [0]
    assert engine.steps - scored_at[0] < 150  # of 500; 3 on a machine that is free


def test_data_that_ends_without_an_update_is_pointed_out(caplog: pytest.LogCaptureFixture) -> None:
    prompts = Prompts([Prompt(str(n), [1] * 9) for n in range(4)])
    schedule = Schedule(rollouts_per_update=2, prompts_per_cohort=4, max_prompt_tokens=5)
    assert not list(Controller(PacedEngine(slots=2), prompts, ScoreAtOnce(len), schedule))
    assert caplog.messages[-1] == "the data ended without an update: all 4 rollouts were rejected"


def test_data_of_which_the_rest_was_filtered_was_not_all_rejected(caplog: pytest.LogCaptureFixture) -> None:
    prompts, scorer = Prompts([Prompt(str(n), [1] * n) for n in range(3, 7)]), ScoreAtOnce(len)
    schedule = Schedule(rollouts_per_update=2, prompts_per_cohort=4, max_prompt_tokens=5, max_filtered_fraction=1.0)
    assert not list(Controller(PacedEngine(slots=2), prompts, scorer, schedule, filter_groups=lambda group: False))
    assert not any("the data ended" in message for message in caplog.messages)
