"""An episode between the scheduler and verifiers' requests, with a scripted environment. Needs no verifiers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from hypothesis import given, settings
from hypothesis import strategies as st

from processes import wait_for_end
from sortedrl.integrations.verifiers.env_server import EnvServerProcess, server_environment
from sortedrl.integrations.verifiers.episode import (
    SESSION,
    Ask,
    Endpoint,
    Episode,
    EpisodeFailed,
    Outcome,
    Refused,
    Report,
)
from sortedrl.tasks.environment_calls import Turn

PROMPT = [1, 2, 3]
Tokens = st.lists(st.integers(0, 99), min_size=1, max_size=5)
Play = Callable[[Episode, Callable[[], int]], Awaitable[Outcome]]


class Scheduler:
    """Asks, and takes reports; `runs` counts how often the episode was started."""

    def __init__(self, play: Play, limit_seconds: float = 30.0) -> None:
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.runs = 0
        self.canceled = 0
        self.turns: list[Turn] = []
        self._play = play
        self.episode = Episode(self._run, self.reports.put_nowait, limit_seconds)

    async def _run(self, episode: Episode, task: Mapping[str, Any]) -> Outcome:
        self.runs += 1
        run = self.runs
        episode.progress()
        try:
            return await self._play(episode, lambda: run)
        except asyncio.CancelledError:
            self.canceled += 1
            raise

    async def say(self, tokens: list[int], limit: str = "") -> Report:
        self.turns.append(Turn(tokens, [-0.5] * len(tokens)))
        return await self.ask(limit)

    async def ask(self, limit: str = "") -> Report:
        self.episode.take(Ask(len(self.turns), 0, {}, PROMPT, list(self.turns), limit))
        return await self.reports.get()

    def observe(self, report: Report) -> None:
        last = self.turns[-1]
        self.turns[-1] = Turn(last.response, last.logprobs, report.observation)


def game(observations: list[list[int]], seen: list[list[int]]) -> Play:
    """Answers with these observations, then ends; `seen` gets the turns."""

    async def play(episode: Episode, run: Callable[[], int]) -> Outcome:
        context = list(PROMPT)
        del seen[:]
        for observation in [*observations, None]:
            turn = await episode.turn_for(f"trace-{run()}", context)
            seen.append(list(turn.response))
            context = [*context, *turn.response, *(observation or [])]
        return Outcome(float(len(seen)), {"turns": len(seen)})

    return play


@settings(max_examples=60, deadline=None)
@given(st.lists(Tokens, max_size=4), st.data())
def test_each_turn_passes_once_and_unchanged_however_often_the_episode_is_lost(
    observations: list[list[int]], data: st.DataObject
) -> None:
    async def scenario() -> None:
        seen: list[list[int]] = []
        scheduler = Scheduler(game(observations, seen))
        for observation in observations:
            report = await scheduler.say(data.draw(Tokens))
            assert report.observation == observation and report.error is None
            scheduler.observe(report)
            if data.draw(st.booleans()):
                ending = scheduler.episode.end()
                assert ending is not None
                await asyncio.wait([ending])
        report = await scheduler.say(data.draw(Tokens))
        assert report.reward == len(observations) + 1
        assert seen == [turn.response for turn in scheduler.turns]
        assert scheduler.reports.empty() and scheduler.runs == scheduler.canceled + 1

    asyncio.run(scenario())


def test_a_replay_that_differs_is_lost_and_a_prompt_that_does_not_extend_is_an_error() -> None:
    async def play(episode: Episode, run: Callable[[], int]) -> Outcome:
        turn = await episode.turn_for("trace", PROMPT)
        answer = [*PROMPT, *turn.response, 10 + run()]
        turn = await episode.turn_for("trace", answer)
        await episode.turn_for("trace", [*answer, *turn.response])  # nothing new
        raise AssertionError

    async def scenario() -> None:
        scheduler = Scheduler(play)
        scheduler.observe(await scheduler.say([7]))
        refused = await scheduler.say([8])
        assert refused.error is not None and "turn 3 does not extend" in refused.error and not refused.is_lost
        differs = await scheduler.ask()
        assert differs.is_lost and differs.error == "the observation of turn 1 differed when it was replayed"
        assert scheduler.runs == 2

    asyncio.run(scenario())


def test_a_limit_gives_the_environment_the_cut_turn_and_no_other() -> None:
    refusals: list[str] = []

    async def play(episode: Episode, run: Callable[[], int]) -> Outcome:
        context = list(PROMPT)
        try:
            while True:
                turn = await episode.turn_for("trace", context)
                context = [*context, *turn.response, 5]
        except Refused as error:
            refusals.append(str(error))
        return Outcome(0.25, {})

    async def scenario() -> None:
        scheduler = Scheduler(play)
        scheduler.observe(await scheduler.say([7]))
        report = await scheduler.say([8], "max_response_tokens")
        assert (report.reward, refusals) == (0.25, ["max_response_tokens"])
        late = Scheduler(play)
        assert (await late.say([7])).observation == [5]  # no room for it
        assert (await late.ask("max_turns")).reward == 0.25 and refusals[1:] == ["max_turns"]

    asyncio.run(scenario())


def test_hangs_errors_and_early_ends_are_reports() -> None:
    async def play(episode: Episode, run: Callable[[], int]) -> Outcome:
        if run() == 1:
            await asyncio.sleep(60)
        if run() == 2:
            raise EpisodeFailed("no sandbox")
        return Outcome(1.0, {})

    async def scenario() -> None:
        scheduler = Scheduler(play, limit_seconds=0.05)
        assert (await scheduler.say([7])).error == "no answer within 0.05 s"
        assert (await scheduler.ask()).error == "no sandbox"
        assert (await scheduler.ask()).is_lost
        await asyncio.sleep(0.1)
        assert scheduler.canceled == 1 and scheduler.reports.empty()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"token_ids": [1, 2, 3]}', None),
        (b'{"token_ids": []}', None),
        (b'{"token_ids": "12"}', "must be a list of integers"),
        (b'{"token_ids": [1, 2.0]}', "must be a list of integers"),
        (b'{"token_ids": [true]}', "must be a list of integers"),
        (b'{"token_ids": [-1]}', "none of them negative"),
        (b'{"prompt": [1]}', "KeyError"),
        (b"[]", "TypeError"),
        (b"{", "JSONDecodeError"),
    ],
)
def test_the_endpoint_refuses_prompts_that_are_not_token_ids(body: bytes, reason: str | None) -> None:
    prompts = []

    async def turn_for(trace: str, prompt: Sequence[int]) -> Turn:
        prompts.append(prompt)
        return Turn([7, 8], [-0.5, 0.0])

    async def posted() -> tuple[int, Any]:
        endpoint = Endpoint(turn_for)
        url = (await endpoint.start()).removesuffix("/v1") + "/inference/v1/generate"
        try:
            async with ClientSession() as session, session.post(url, data=body, headers={SESSION: "a"}) as answer:
                return answer.status, await answer.json()
        finally:
            await endpoint.close()

    status, found = asyncio.run(posted())
    if reason is None:
        assert status == 200 and found["choices"][0]["token_ids"] == [7, 8] and len(prompts) == 1
    else:
        assert status == 400 and reason in found["error"]["message"] and not prompts


def test_an_environment_server_does_not_get_the_key_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORTEDRL_API_KEY", "secret")
    assert "secret" not in server_environment().values()


def test_a_server_whose_start_is_canceled_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a rollout that is no longer needed. Its imports take a while."""
    package, process_id = tmp_path / "verifiers", tmp_path / "process_id"
    package.mkdir()
    lines = ("import os, time", f"open({str(process_id)!r}, 'w').write(str(os.getpid()))", "time.sleep(600)")
    (package / "__init__.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)

    async def canceled() -> None:
        start = asyncio.create_task(EnvServerProcess.start({}))
        while not (process_id.exists() and process_id.read_text()):
            await asyncio.wait([start], timeout=0.05)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    asyncio.run(canceled())
    wait_for_end(int(process_id.read_text()), seconds=30)
