"""Episodes of verifiers, played by a scripted policy: real environment servers, the real model client."""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from chat_tokenizer import chat_tokenizer
from environment_turns import collected
from processes import wait_for_end
from sortedrl.core.rollout import Prompt, Rollout, Segment
from sortedrl.core.scoring import Score
from sortedrl.core.turns import Answer
from sortedrl.integrations.verifiers.task import Served, VerifiersTask

PATIENCE_SECONDS = 400.0  # more than a server may take to start on a busy machine (START_SECONDS)
HARNESS = {"player.harness.id": "in-process-chat", "player.runtime.type": "subprocess"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


class Game:
    """A task, its processes, and rollouts that say what the test wants."""

    def __init__(self, task: VerifiersTask, tokenizer: Any, served: Served) -> None:
        self.task = task
        self.tokenizer = tokenizer
        self.served = served
        self.ends, self.environments = served.source()
        self.calls = 0

    def rollout(self, id: int = 0) -> Rollout:
        problem = self.task.train()[id]
        return Rollout(id, Prompt(problem.id, self.task.prompt(problem, self.tokenizer), problem), 0, 0, 0, 0)

    def speak(self, rollout: Rollout, text: str, *, is_cut: bool = False) -> None:
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = tokens if is_cut else [*tokens, self.tokenizer.eos_token_id]
        middle, before = len(tokens) // 2, rollout.newest_version or 0
        for part, version in ((tokens[:middle], before), (tokens[middle:], before + 1)):  # a weight update in it
            rollout.append(Segment(part, [-0.5] * len(part), version))

    def answer(self, rollout: Rollout) -> Answer:
        self.calls += 1
        self.environments.submit(rollout, self.calls)
        return self.next_answer()

    def next_answer(self) -> Answer:
        (answer,) = collected(self.environments, 1, PATIENCE_SECONDS)
        assert answer.call == self.calls
        return answer

    def observed(self, rollout: Rollout, text: str) -> str:
        """Say it, and return what the environment adds."""
        self.speak(rollout, text)
        answer = self.answer(rollout)
        assert answer.observation is not None, answer
        rollout.observe(answer.observation)
        return str(self.tokenizer.decode(answer.observation))

    def score(self, rollout: Rollout, limit: str) -> Score:
        rollout.truncated, rollout.ended_by = True, limit
        self.ends.submit(rollout)
        (scored,) = collected(self.ends, 1, PATIENCE_SECONDS)
        return scored


@contextmanager
def playing(tokenizer: Any, *, limit_seconds: float = 60.0, workers: int = 1, **options: Any) -> Iterator[Game]:
    task = VerifiersTask("word-game", problems=8, held_out_problems=2, **{**HARNESS, **options})
    task.prompt(task.train()[0], tokenizer)
    eos = {tokenizer.eos_token_id}
    with closing(task.serve(tokenizer, eos_token_ids=eos, workers=workers, limit_seconds=limit_seconds)) as served:
        yield Game(task, tokenizer, served)
        processes = served.process_ids()
    wait_for_end(*processes)


@pytest.fixture(scope="module")
def game(tokenizer: Any) -> Iterator[Game]:
    with playing(tokenizer) as game:
        game.served.wait_until_ready()
        yield game


def test_a_rollout_of_three_turns_gets_the_reward_of_verifiers(game: Game) -> None:
    rollout = game.rollout()
    first = game.observed(rollout, "a word")
    assert first == "\n<|im_start|>user\nturn 1: 6 letters<|im_end|>\n<|im_start|>assistant\n"
    assert "turn 2: 3 letters" in game.observed(rollout, "but")
    game.speak(rollout, "a")
    last = game.answer(rollout)
    assert last.reward == pytest.approx(2 / 3) and last.error is None
    assert last.detail == {"correct": False, "parts": {"has_a": pytest.approx(2 / 3), "replies": 3.0, "turns": 3}}
    assert not game.environments.pending


def test_tokens_that_would_be_encoded_otherwise_pass_unchanged(game: Game) -> None:
    """A special token in the middle of a turn does not survive decoding."""
    rollout = game.rollout(1)
    tokens = [*game.tokenizer("one", add_special_tokens=False)["input_ids"], 0, 1, game.tokenizer.eos_token_id]
    rollout.append(Segment(tokens, [-0.1] * len(tokens), 1))
    answer = game.answer(rollout)
    assert answer.error is None and answer.observation
    rollout.observe(answer.observation)
    assert "turn 2: 3" in game.observed(rollout, "two")
    game.environments.cancel(1)


def test_a_lost_episode_is_replayed_from_the_recorded_turns(game: Game) -> None:
    rollout = game.rollout(2)
    game.observed(rollout, "a")
    game.observed(rollout, "b")
    game.environments.cancel(2)
    game.speak(rollout, "a")
    assert game.answer(rollout).reward == pytest.approx(2 / 3)


@pytest.mark.parametrize("is_live", [True, False])
def test_a_turn_that_a_limit_cut_reaches_the_environment_which_gives_the_reward(game: Game, is_live: bool) -> None:
    rollout = game.rollout(3)
    game.observed(rollout, "b")
    if not is_live:
        game.environments.cancel(3)
    game.speak(rollout, "a cut tur", is_cut=True)
    scored = game.score(rollout, "max_response_tokens")
    assert (scored.reward, scored.error) == (0.5, None)
    assert scored.detail["parts"]["replies"] == 2.0


def test_a_canceled_rollout_ends_its_episode_and_starts_again(game: Game) -> None:
    rollout = game.rollout(5)
    game.observed(rollout, "a")
    game.speak(rollout, "b")
    game.calls += 1
    game.environments.submit(rollout, game.calls)
    game.environments.cancel(5)
    assert not game.environments.pending
    again = game.rollout(5)
    again.attempt = 1
    assert "turn 1: 2" in game.observed(again, "aa")
    game.environments.cancel(5)


def test_many_rollouts_at_a_time(tokenizer: Any) -> None:
    with playing(tokenizer, workers=2) as game:
        rollouts = {id: game.rollout(id) for id in range(8)}
        for rollout in rollouts.values():
            game.speak(rollout, "a" * (rollout.id + 1))
            game.environments.submit(rollout, rollout.id)
        answers = collected(game.environments, 8, PATIENCE_SECONDS)
        for answer in answers:
            assert answer.call == answer.rollout_id
            assert f"turn 1: {answer.rollout_id + 1} l" in tokenizer.decode(answer.observation)
        assert {answer.rollout_id for answer in answers} == set(range(8)) and len(game.served.process_ids()) == 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", "RuntimeError: the game is broken"),
        ("hangs", "no answer within 6 s"),
        ("blocks", "no answer within 6 s|blocks its event loop"),
        ("dies", "died with exit code 3"),
    ],
)
def test_a_failed_episode_is_an_error_with_a_reason_and_its_retry_succeeds(
    tokenizer: Any, tmp_path: Path, fault: str, reason: str
) -> None:
    options = {"taskset.fault": fault, "taskset.only_once": str(tmp_path / "struck")}
    with playing(tokenizer, limit_seconds=6.0, **options) as game:
        game.served.wait_until_ready()
        rollout = game.rollout()
        game.observed(rollout, "a")
        game.speak(rollout, "a")
        failed = game.answer(rollout)
        assert failed.error is not None and any(part in failed.error for part in reason.split("|")), failed
        assert not failed.is_lost
        game.environments.cancel(0)  # as the scheduler does
        while (retried := game.answer(rollout)).error is not None:  # a blocked server is found out a little later
            game.environments.cancel(0)
            time.sleep(1.0)
        assert retried.observation is not None and "turn 2" in tokenizer.decode(retried.observation)


def test_the_prompt_is_what_the_harness_sends(tokenizer: Any) -> None:
    with playing(tokenizer, **{"player.harness.adds": " Be brief."}) as game:
        rollout = game.rollout(3)
        assert "Word 3? Be brief.<|im_end|>" in tokenizer.decode(rollout.prompt.tokens)
        assert "turn 1: 1 letters" in game.observed(rollout, "a")


def test_a_server_ends_with_its_parent_even_if_an_episode_goes_on(tokenizer: Any) -> None:
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    parent = spawn.Process(target=play_with_an_episode_that_stays, args=(tokenizer, sender))
    parent.start()
    assert receiver.poll(PATIENCE_SECONDS)
    server = receiver.recv()
    parent.kill()
    parent.join()
    wait_for_end(server)


def play_with_an_episode_that_stays(tokenizer: Any, sender: Connection) -> None:
    with playing(tokenizer, limit_seconds=6.0, **{"taskset.fault": "stays"}) as game:
        game.served.wait_until_ready()
        rollout = game.rollout()
        game.observed(rollout, "a")
        game.speak(rollout, "a")
        assert game.answer(rollout).error == "no answer within 6 s"
        (process,) = game.served.process_ids()
        sender.send(process)
        time.sleep(3600)


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"verifiers refuses taskset\.turns: Input should be a valid integer"):
        VerifiersTask("word-game", **{"taskset.turns": "many"})
    with pytest.raises(ValueError, match="has 40 tasks, but problems = 256"):
        VerifiersTask("word-game", **HARNESS).train()
