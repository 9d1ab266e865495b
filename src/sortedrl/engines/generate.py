"""Run requests to their end on an engine, outside of the scheduler: evaluations, probes, warm-ups."""

import time
from collections.abc import Sequence

from sortedrl.core.engine import Engine, Request, RequestFailed, RequestFinished, Tokens
from sortedrl.core.engine_checks import checked_changes, plain
from sortedrl.core.rollout import Segment
from sortedrl.core.waiting import EnginePolls
from sortedrl.core.wording import counted

ATTEMPTS = 4  # per request
RETRY_SECONDS = 0.5  # before the second attempt; doubles with each further one


class Response:
    """What the engine generated for a request. `failure` is the reason if all attempts failed."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.segments: list[Segment] = []
        self.truncated = False
        self.failure: str | None = None

    def add(self, segment: Segment) -> None:
        """Tokens that cannot be such, which no tokenizer could decode, make it a failure."""
        try:
            self.segments.append(plain(segment).copy())  # the engine may use its lists again
        except ValueError as error:
            self.failure = f"the engine reported {error}"

    def end(self, *, truncated: bool) -> None:
        """No token, or more than were asked for, make it a failure."""
        made, most = sum(map(len, self.segments)), self.request.max_new_tokens
        if made > most:
            self.failure = f"the engine reported {made} tokens, and max_new_tokens is {most}"
        elif not made and self.failure is None:
            self.failure = "it ended without a token"
        self.truncated = truncated

    @property
    def tokens(self) -> list[int]:
        return [token for segment in self.segments for token in segment.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for segment in self.segments for logprob in segment.logprobs]


class NotInTime(TimeoutError):
    """Some requests did not end within the time limit. They were aborted."""

    def __init__(self, unfinished: int) -> None:
        super().__init__(f"{counted(unfinished, 'request')} did not end in time")
        self.unfinished = unfinished


def generate(engine: Engine, requests: Sequence[Request], *, limit_seconds: float | None = None) -> list[Response]:
    """One response per request, in their order. The engine must hold no other request.

    The policy on failures, for all callers: a request that failed or ended without a token is sent again from its
    start, up to `ATTEMPTS` times in all, after the others have ended. Then its response has a `failure`, and the caller
    decides what that means. `limit_seconds` is on the engine's clock.
    """
    responses = {request.id: Response(request) for request in requests}
    deadline = None if limit_seconds is None else engine.now() + limit_seconds
    failed: list[Response] = list(responses.values())
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
        failed = _attempt(engine, {response.request.id: response for response in failed}, deadline)
        if not failed:
            break
    return list(responses.values())


def _attempt(engine: Engine, awaited: dict[int, Response], deadline: float | None) -> list[Response]:
    """Returns the responses whose requests failed."""
    failed = []
    for response in awaited.values():
        response.segments, response.failure = [], None
    engine.submit([response.request for response in awaited.values()])
    polls = EnginePolls(engine)
    while awaited:
        if deadline is not None and engine.now() >= deadline:
            engine.abort(list(awaited))
            raise NotInTime(len(awaited))
        for change in checked_changes(engine, "poll", polls.poll(deadline, awaited)):
            if change.id not in awaited:
                continue
            if isinstance(change, Tokens):
                awaited[change.id].add(change.segment)
            elif isinstance(change, RequestFinished | RequestFailed):
                ended = awaited.pop(change.id)
                if isinstance(change, RequestFailed):
                    ended.failure = change.reason
                else:
                    ended.end(truncated=change.truncated)
                if ended.failure is not None:
                    failed.append(ended)
    return failed
