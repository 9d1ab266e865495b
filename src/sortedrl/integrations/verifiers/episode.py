"""One episode: an environment of verifiers that plays a rollout.

verifiers posts a request per turn, whose prompt holds all tokens so far and the newest observation. A request whose
turn is recorded is answered with it. The first request after that brings a new observation and is held until the
scheduler has decoded the next turn. So an episode that was lost is brought back by starting it again.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiohttp import web

from sortedrl.core.user_values import reason_of
from sortedrl.tasks.environment_calls import Turn

SESSION = "X-Session-ID"
_MAX_REQUEST_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Ask:
    """Play an episode up to the end of these turns, and report what follows.

    `limit`: what ended the rollout, if a limit did; the environment gets no further turn, and the reward follows.
    """

    number: int
    episode: int  # a number that is never used again
    task: Mapping[str, Any]
    prompt: Sequence[int]
    turns: Sequence[Turn]
    limit: str = ""


class Report(NamedTuple):
    """What followed: an observation, a reward with its parts, or an error."""

    call: int  # the number of what was asked
    observation: list[int] | None = None
    reward: float | None = None
    parts: Mapping[str, float] = {}
    error: str | None = None
    is_lost: bool = False


class Outcome(NamedTuple):
    """How verifiers ended an episode."""

    reward: float
    parts: Mapping[str, float]


class EpisodeFailed(Exception):
    """verifiers ended an episode without a reward."""


class Refused(Exception):
    """The request gets no turn."""


@dataclass(frozen=True, slots=True)
class _Request:
    trace: str
    prompt: Sequence[int]
    answer: asyncio.Future[Turn]


class Episode:
    """Lives in the service's event loop. `run` plays it in an environment server; cancel it to end it there."""

    def __init__(
        self,
        run: Callable[["Episode", Mapping[str, Any]], Awaitable[Outcome]],
        on_report: Callable[[Report], None],
        limit_seconds: float,
    ) -> None:
        self._run = run
        self._on_report = on_report
        self._limit_seconds = limit_seconds
        self._ask: Ask | None = None
        self._is_reported = True
        self._request: _Request | None = None
        self._served: dict[str, int] = {}  # turns, by trace: a retry of verifiers has a trace of its own
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def take(self, ask: Ask) -> None:
        self._ask = ask
        self._is_reported = False
        if self._task is None:
            self._served.clear()
            self._task = asyncio.create_task(self._play(ask.task))
        else:
            self.progress()
            self._advance()

    async def turn_for(self, trace: str, prompt: Sequence[int]) -> Turn:
        """The answer to a request, as soon as the turn is decoded. Raises Refused."""
        if self._request is not None:  # the harness gave it up and asks again
            self._refuse("another request followed")
        self._request = request = _Request(trace, prompt, asyncio.get_running_loop().create_future())
        self._advance()
        return await request.answer

    def progress(self) -> None:
        """From now on the environment has `limit_seconds` until its next request. `run` calls it when it starts."""
        if self._timer is not None:
            self._timer.cancel()
        seconds = self._limit_seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self.fail, f"no answer within {seconds:g} s")

    def end(self) -> asyncio.Task[None] | None:
        """End it without a report. Returns what to wait for."""
        self._is_reported = True
        task, self._task = self._task, None
        if self._timer is not None:
            self._timer.cancel()
        if task is not None:
            task.cancel()
        self._refuse("the rollout was dropped")
        return task

    def fail(self, reason: str, *, is_lost: bool = False) -> None:
        ask = self._ask
        is_due = not self._is_reported
        self.end()
        if is_due and ask is not None:
            self._on_report(Report(ask.number, error=reason, is_lost=is_lost))

    def _advance(self) -> None:
        """Answer the request, or take its observation."""
        request, ask = self._request, self._ask
        if request is None or ask is None:
            return
        served = self._served.get(request.trace, 0)
        context = _context(ask, served)
        if served < len(ask.turns):
            if list(request.prompt) != context:
                self._differ(served)
                return
            self._served[request.trace] = served + 1
            self._request = None
            request.answer.set_result(ask.turns[served])
            self.progress()
        elif ask.limit:
            self._refuse(ask.limit)
        elif not self._is_reported:
            self._observe(ask, list(request.prompt), context)

    def _differ(self, served: int) -> None:
        if served:
            self.fail(f"the observation of turn {served} differed when it was replayed", is_lost=True)
        else:
            self.fail("the episode starts with another prompt than before the run")

    def _observe(self, ask: Ask, prompt: list[int], context: list[int]) -> None:
        if prompt[: len(context)] != context or len(prompt) == len(context):
            self.fail(
                f"the prompt of turn {len(ask.turns) + 1} does not extend the tokens of the rollout: the harness or "
                "the chat template changed earlier turns"
            )
            return
        self._report(Report(ask.number, observation=prompt[len(context) :]))

    async def _play(self, task: Mapping[str, Any]) -> None:
        try:
            outcome = await self._run(self, task)
        except Exception as error:
            reason = str(error) if isinstance(error, EpisodeFailed) else reason_of(error)
            self._task = None
            self.fail(reason)
            return
        self._task = None
        ask = self._ask
        if ask is None or self._is_reported:
            return  # it ended while its request was held: the next ask starts it again
        if max(self._served.values(), default=0) < len(ask.turns):
            self.fail("the episode ended before the turns that were recorded", is_lost=True)
        else:
            self._report(Report(ask.number, reward=outcome.reward, parts=outcome.parts))

    def _report(self, report: Report) -> None:
        self._is_reported = True
        if self._timer is not None:
            self._timer.cancel()
        self._on_report(report)

    def _refuse(self, reason: str) -> None:
        request, self._request = self._request, None
        if request is not None and not request.answer.done():
            request.answer.set_exception(Refused(reason))


def _context(ask: Ask, turns: int) -> list[int]:
    """The tokens of the rollout before this turn."""
    parts = [ask.prompt]
    for turn in ask.turns[:turns]:
        parts += [turn.response, turn.observation or ()]
    return [token for part in parts for token in part]


class Endpoint:
    """Where verifiers' model client posts the requests of all episodes: vLLM's `/inference/v1/generate`, over HTTP.

    `turn_for(trace, prompt)` gives the turn; it may take as long as it likes. The header `X-Session-ID` names the
    trace. The sampling parameters of a request are ignored: the run's own decide."""

    def __init__(self, turn_for: Callable[[str, Sequence[int]], Awaitable[Turn]]) -> None:
        self._turn_for = turn_for
        app = web.Application(client_max_size=_MAX_REQUEST_BYTES)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/v1/models", _models)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.0)

    async def start(self) -> str:
        """Returns its base URL, on a free port of this machine."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
            trace, prompt = request.headers[SESSION], _token_ids(body["token_ids"])
        except (KeyError, TypeError, ValueError) as error:
            return _refusal(f"expected token_ids and the header {SESSION}: {type(error).__name__}: {error}")
        try:
            return web.json_response(_answer(trace, await self._turn_for(trace, prompt)))
        except Refused as error:
            # Harnesses end an episode in order if the context is full. For them this is the same.
            return _refusal(f"This model's maximum context length is reached: {error}")


def _token_ids(found: Any) -> list[int]:
    """Raises ValueError."""
    if not isinstance(found, list) or not all(type(token) is int and token >= 0 for token in found):
        raise ValueError("token_ids must be a list of integers, none of them negative")
    return found


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": []})


def _refusal(reason: str) -> web.Response:
    return web.json_response({"error": {"message": reason, "type": "BadRequestError", "code": 400}}, status=400)


def _answer(trace: str, turn: Turn) -> dict[str, Any]:
    tokens = list(turn.response)
    content = [
        {"token": f"token_id:{token}", "logprob": min(logprob, 0.0)}
        for token, logprob in zip(tokens, turn.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": tokens,
        "logprobs": {"content": content},
        "finish_reason": "length" if turn.is_cut else "stop",
    }
    return {"request_id": trace, "choices": [choice]}
