"""The environments of a TRL run for the scheduler (core/environment.py): responses parsed and results rendered by TRL.

Tokens pass from turn to turn as ids. What follows a turn with tool calls is rendered by TRL's `_get_tool_suffix_ids`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from trl.chat_template_utils import parse_response

from sortedrl.core.rollout import Rollout
from sortedrl.integrations.trl.tools import ParsedResponse, StatelessEpisode, ToolBox
from sortedrl.tasks.chat_turns import TemplateRefused
from sortedrl.tasks.environment import Message, Response
from sortedrl.tasks.environment_host import Call, Host, Result
from sortedrl.tasks.environments import TaskEnvironments
from sortedrl.tasks.turns import Turn, turns_of


class ToolSuffix:
    """Renders the results of tool calls with TRL's own code."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def observation(self, messages: Sequence[Message], response: Sequence[int]) -> list[int]:
        del response  # it ends as the template ends a message
        try:
            return list(self._trainer._get_tool_suffix_ids(list(messages)))
        except ValueError as error:
            raise TemplateRefused(str(error)) from None


class TrlEnvironments(TaskEnvironments):
    """Main thread only: tokenizers are not safe to use from several."""

    keeps_scored = True  # reward functions run when the update is complete

    def __init__(self, trainer: Any, box: ToolBox, host: Host) -> None:
        super().__init__(trainer._tokenizer, host, eos_token_ids=trainer.eos_token_ids, chat=ToolSuffix(trainer))
        self._trainer = trainer
        self._box = box
        self._parsed: dict[int, tuple[int, list[Response]]] = {}  # by rollout id: its attempt, its turns so far

    def close(self) -> None:
        self._host.close()

    def _drop(self, rollout_id: int) -> None:
        super()._drop(rollout_id)
        self._parsed.pop(rollout_id, None)

    def _take_results(self) -> None:
        super()._take_results()
        if self._box.fatal is not None:
            raise self._box.fatal

    def submit_end(self, rollout: Rollout) -> None:
        turns = turns_of(rollout)
        passed = self._passed(rollout, turns)
        responses = self._responses(rollout, turns)
        last = None if passed == len(turns) else _cut(responses[passed])
        self._start(rollout, turns, responses[:passed], last, None, rollout.ended_by)

    def state(self, rollout_id: int) -> Any:
        episode = self._box.episodes.get(rollout_id)
        if rollout_id not in self._instances and isinstance(episode, StatelessEpisode):  # it has ended
            return episode.state()
        return super().state(rollout_id)

    def restore(self, rollout: Rollout, state: Any) -> bool:
        """A rollout with a score must be ready for its reward when the run goes on: this waits for the replay."""
        if rollout.reward is None:
            return super().restore(rollout, state)
        if state is not None:
            episode = self._box.episode()
            episode.reset(self._problem(rollout))
            assert isinstance(episode, StatelessEpisode)
            episode.restore(state)
            episode.end()
            return True
        return self._replay(rollout)

    def _replay(self, rollout: Rollout) -> bool:
        turns = turns_of(rollout)
        *earlier, last = self._responses(rollout, turns)
        if rollout.truncated and self._passed(rollout, turns) < len(turns):
            last = _cut(last)
        number = next(self._numbers)
        self._host.submit(Call(number, number, self._problem(rollout), tuple(earlier), None, last))
        self._parsed.pop(rollout.id, None)
        result = self._wait_for(number)
        if result is None or result.error is not None or self._difference(turns, result) is not None:
            self._host.drop(number)
            return False
        self._box.episodes[rollout.id].end()
        self._host.drop(number)
        return True

    def _wait_for(self, number: int) -> Result | None:
        """The result of the only call. The host has a time limit for it."""
        until = time.monotonic() + 2 * self._trainer.schedule.max_environment_seconds
        while time.monotonic() < until:
            self._host.wait(until - time.monotonic())
            for result in self._host.collect():
                if result.call == number:
                    return result
        return None

    def _problem(self, rollout: Rollout) -> Any:
        row = rollout.prompt.payload
        return rollout.id, row, self._trainer.example(row)

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
        if self._box.factories is None:
            return list(self._trainer.tools)
        return list(self._trainer._env_tools[self._box.name_of(self._trainer.example(rollout.prompt.payload))])


def _cut(response: Response) -> ParsedResponse:
    assert isinstance(response, ParsedResponse)
    return ParsedResponse(response.message, is_cut=True)
