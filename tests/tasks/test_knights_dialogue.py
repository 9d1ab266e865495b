"""The Knights & Knaves dialogue: ambiguous until someone asks, decided when all have spoken."""

import asyncio
import random
from collections import Counter

import pytest
from worked_dialogue import DialogueFlaws, Turn, dialogue_phrases, worked_dialogue

from sortedrl.tasks.environment import require_environment
from sortedrl.tasks.knights_and_knaves import COMPACT_NAMES, WARM_START_SHARE, fingerprint, solutions
from sortedrl.tasks.knights_dialogue import KnightsDialogue, asked, question, random_dialogue, silence
from sortedrl.tasks.registry import task_by_name
from sortedrl.tasks.task import Problem, Reward

NO_DIALOGUE_FLAWS = DialogueFlaws()


@pytest.fixture(scope="module")
def task() -> KnightsDialogue:
    return KnightsDialogue(count=300)


def play(problem: Problem, turns: list[Turn], muted: bool = False) -> Reward:
    """The environment answers a scripted dialogue as the script expects."""
    environment = KnightsDialogue(count=300, muted=muted).environment()
    environment.reset(problem)
    for turn in turns[:-1]:
        assert asyncio.run(environment.step(turn.response)) == turn.observation
    reward = asyncio.run(environment.step(turns[-1].response))
    assert isinstance(reward, Reward)
    return reward


def test_a_prompt_is_ambiguous_and_all_statements_together_are_not(task: KnightsDialogue) -> None:
    for problem in [*task.train(), *task.held_out()]:
        puzzle = problem.answer
        candidates = solutions(puzzle.prompt)
        assert 2 <= len(candidates) <= 4
        assert solutions(puzzle.puzzle) == [puzzle.answer] and puzzle.answer in candidates
        assert all(f"{COMPACT_NAMES[one]} is silent." in puzzle.text for one in puzzle.silent)


def test_given_the_prompt_each_candidate_is_equally_likely() -> None:
    """Which of the candidates of a prompt is right, counted by its place among them."""
    rng = random.Random(0)
    places: dict[int, Counter[int]] = {2: Counter(), 3: Counter(), 4: Counter()}
    for _ in range(1500):
        puzzle = random_dialogue(3, rng)
        candidates = solutions(puzzle.prompt)
        places[len(candidates)][candidates.index(puzzle.answer)] += 1
    for count, counter in places.items():
        draws = counter.total()
        for place in range(count):
            expected = draws / count
            assert abs(counter[place] - expected) < 4 * (expected * (1 - 1 / count)) ** 0.5, (count, counter)


def test_the_prompt_decides_between_training_held_out_and_warm_start(task: KnightsDialogue) -> None:
    train = {fingerprint(problem.answer.prompt) for problem in task.train()}
    held_out = {fingerprint(problem.answer.prompt) for problem in task.held_out()}
    assert min(train | held_out) >= WARM_START_SHARE and max(train) < min(held_out)
    assert (len(task.train()), len(task.held_out())) == (225, 75)
    assert len({problem.question for problem in [*task.train(), *task.held_out()]}) == 300


def test_a_dialogue_without_flaws_asks_all_silent_ones_and_is_right(task: KnightsDialogue) -> None:
    rng = random.Random(0)
    for problem in task.train()[:60]:
        turns = worked_dialogue(problem.answer, rng, NO_DIALOGUE_FLAWS)
        assert len(turns) == 1 + len(problem.answer.silent)
        reward = play(problem, turns)
        assert reward.correct and reward.parts == {"format": 1.0, "answer": 2.0, "asked": 1.0}


def test_an_early_answer_is_right_as_often_as_chance(task: KnightsDialogue) -> None:
    rng = random.Random(0)
    flaws = DialogueFlaws(answer_early=1.0)
    rewards = [play(problem, worked_dialogue(problem.answer, rng, flaws)) for problem in task.train()]
    assert all(reward.parts["asked"] == 0.0 for reward in rewards)
    right = sum(reward.correct for reward in rewards)
    expected = sum(1 / problem.answer.candidates for problem in task.train())
    assert abs(right - expected) < 4 * expected**0.5


def test_muted_characters_stay_silent_when_they_are_asked(task: KnightsDialogue) -> None:
    rng = random.Random(0)
    problem = task.train()[0]
    turns = worked_dialogue(problem.answer, rng, DialogueFlaws(muted=1.0))
    assert turns[0].observation == silence(problem.answer.silent[0])
    assert play(problem, turns, muted=True).parts["asked"] == 1.0


def test_questions(task: KnightsDialogue) -> None:
    assert asked(question(2), 3) == 2 and asked(" <ask>Bob</ask>", 3) == 1
    for response in ("<ask> Dan </ask>", "<ask> Zoe </ask>", "Bob", "<ask> Bob", "<ask> Bob </ask> <answer>", ""):
        assert asked(response, 3) is None


def test_a_response_that_is_neither_question_nor_answer_ends_the_dialogue(task: KnightsDialogue) -> None:
    assert play(task.train()[0], [Turn("<ask> Zoe </ask>", None)]).value == -3.0


def test_a_limit_before_the_answer_is_a_wrong_format(task: KnightsDialogue) -> None:
    environment = task.environment()
    environment.reset(task.train()[0])
    asyncio.run(environment.step(question(0)))
    reward = asyncio.run(environment.finish("max_turns"))
    assert (reward.value, reward.correct, reward.parts["asked"]) == (-3.0, False, 1.0)


def test_an_instance_comes_back_from_its_state(task: KnightsDialogue) -> None:
    first, second = task.environment(), task.environment()
    for environment in (first, second):
        environment.reset(task.train()[0])
    asyncio.run(first.step(question(0)))
    second.restore(first.state())
    assert asyncio.run(second.finish("max_turns")).parts["asked"] == 1.0


def test_every_word_of_a_dialogue_is_a_phrase(task: KnightsDialogue) -> None:
    rng = random.Random(0)
    flaws = DialogueFlaws(guess=0.3, overlook=0.1, give_up=0.1, answer_early=0.3, muted=0.3)
    known = sorted(dialogue_phrases(), key=len, reverse=True)
    for problem in task.train()[:40]:
        turns = worked_dialogue(problem.answer, rng, flaws)
        text = " ".join([problem.question, *(part for turn in turns for part in turn if part)])
        for phrase in known:
            text = text.replace(phrase, " ")
        assert not text.strip()


def test_the_registry_knows_it_and_its_options() -> None:
    task = task_by_name("knights_and_knaves:dialogue", count=30, muted=True)
    assert isinstance(task, KnightsDialogue)
    require_environment(task.environment(), task.name)
    with pytest.raises(ValueError, match="one must speak"):
        KnightsDialogue(characters=(2, 3))
    with pytest.raises(ValueError, match="its options are characters, count"):
        task_by_name("knights_and_knaves:dialogue", wording="story")
