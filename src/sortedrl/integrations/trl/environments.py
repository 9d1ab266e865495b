"""The environments of a TRL run for the scheduler (core/turns.py): responses parsed and results rendered by TRL.

Tokens pass from turn to turn as ids. What follows a turn with tool calls is rendered by TRL's `_get_tool_suffix_ids`.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from trl.chat_template_utils import parse_response

from sortedrl.core.rollout import Rollout
from sortedrl.integrations.trl.tools import Episode, ParsedResponse, ToolUse
from sortedrl.tasks.encode import TemplateRefused
from sortedrl.tasks.environment import Environment, Message, Response
from sortedrl.tasks.environment_calls import Inbox, Turn, turns_of
from sortedrl.tasks.environment_host import Call, Host, Instances, LocalHost, Result
from sortedrl.tasks.environments import TaskEnvironments

CLOSE_SECONDS = 5.0


class ToolSuffix:
    """Renders the results of tool calls with TRL's own code. `grpo`: TRL's GRPOTrainer."""

    def __init__(self, grpo: Any) -> None:
        self._grpo = grpo

    def observation(self, messages: Sequence[Message], response: Sequence[int]) -> list[int]:
        try:  # the response ends as the template ends a message
            return list(self._grpo._get_tool_suffix_ids(list(messages)))
        except ValueError as error:
            raise TemplateRefused(str(error)) from None


class TrlEnvironments(TaskEnvironments):
    """Main thread only: tokenizers are not safe to use from several."""

    keeps_scored = True  # reward functions run when the update is complete

    def __init__(self, use: ToolUse) -> None:
        use.start_run()
        limit_seconds = use.schedule.max_environment_seconds
        make: type[LoopHost | LocalHost] = LoopHost if use.threads else LocalHost
        host: Host = make(partial(Episode, use), limit_seconds=limit_seconds)
        chat = ToolSuffix(use.grpo)
        super().__init__(use.grpo._tokenizer, host, eos_token_ids=use.grpo.eos_token_ids, chat=chat)
        self._use = use
        self._limit_seconds = limit_seconds
        self._parsed: dict[int, tuple[int, list[Response]]] = {}  # by rollout id: its attempt, its turns so far

    def close(self) -> None:
        self._host.close()

    def _drop(self, rollout_id: int) -> None:
        super()._drop(rollout_id)
        self._parsed.pop(rollout_id, None)

    def _take_results(self) -> None:
        super()._take_results()
        if self._use.fatal is not None:
            raise self._use.fatal

    def submit_end(self, rollout: Rollout) -> None:
        turns = turns_of(rollout)
        passed = self._passed(rollout, turns)
        responses = self._responses(rollout, turns)
        last = None if passed == len(turns) else _cut(responses[passed])
        self._start(rollout, turns, responses[:passed], last, None, rollout.ended_by)

    def restore(self, rollout: Rollout, state: Any) -> bool:
        """Its calls are made again. A rollout with a score must be ready for its reward when the run goes on: this
        waits for them."""
        if rollout.reward is None:
            return super().restore(rollout, state)
        turns = turns_of(rollout)
        *earlier, last = self._responses(rollout, turns)
        if rollout.truncated and self._passed(rollout, turns) < len(turns):
            last = _cut(last)
        number = next(self._numbers)
        self._host.submit(Call(number, number, self._problem(rollout), tuple(earlier), None, last))
        self._parsed.pop(rollout.id, None)
        self._host.wait(2 * self._limit_seconds)  # its only call, for which it has a limit
        result = next((result for result in self._host.collect() if result.call == number), None)
        is_back = result is not None and result.error is None and self._difference(turns, result) is None
        if is_back:
            self._use.episodes[rollout.id].end()
        self._host.drop(number)
        return is_back

    def _problem(self, rollout: Rollout) -> Any:
        row = rollout.prompt.payload
        return rollout.id, row, self._use.grpo.example(row)

    def _responses(self, rollout: Rollout, turns: Sequence[Turn]) -> list[Response]:
        """Each turn is parsed once."""
        attempt, responses = self._parsed.get(rollout.id, (rollout.attempt, []))
        if attempt != rollout.attempt or len(responses) > len(turns):
            responses = []
        tools, context = self._tools_of(rollout), list(rollout.prompt.tokens)
        for place, turn in enumerate(turns):
            if place == len(responses):
                message = parse_response(self._tokenizer, turn.response, prefix=list(context), tools=tools)
                responses.append(ParsedResponse(message))
            context += [*turn.response, *(turn.observation or ())]
        self._parsed[rollout.id] = rollout.attempt, responses
        return list(responses)

    def _tools_of(self, rollout: Rollout) -> list[Any]:
        if not self._use.has_environments:
            return list(self._use.grpo.tools)
        example = self._use.grpo.example(rollout.prompt.payload)
        return list(self._use.grpo._env_tools[self._use.name_of(example)])


def _cut(response: Response) -> ParsedResponse:
    assert isinstance(response, ParsedResponse)
    return ParsedResponse(response.message, is_cut=True)


class LoopHost:
    """A host (tasks/environment_host.py) in this process, in an event loop on a thread of its own: calls go
    on while the engine runs. Instances must not block the loop."""

    def __init__(self, build: Callable[[], Environment], *, limit_seconds: float) -> None:
        self._instances = Instances(build)
        self._limit_seconds = limit_seconds
        self._done: Inbox[Result] = Inbox()
        self._calls: dict[int, Future[Result]] = {}  # by instance: its last call
        self.collect, self.wait = self._done.collect, self._done.wait
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environments", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> None:
        future = asyncio.run_coroutine_threadsafe(self._instances.answer(call, self._limit_seconds), self._loop)
        self._calls[call.instance] = future
        future.add_done_callback(self._take)

    def _take(self, future: Future[Result]) -> None:
        if not future.cancelled():
            self._done.add([future.result()])

    def drop(self, instance: int) -> None:
        call = self._calls.pop(instance, None)
        if call is not None:
            call.cancel()
        asyncio.run_coroutine_threadsafe(self._instances.close(instance, self._limit_seconds), self._loop)

    def close(self) -> None:
        ended = asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop)
        with suppress(TimeoutError):
            ended.result(CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


async def _end_tasks() -> None:
    """Cancel the other tasks of the loop and wait for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
