"""A Knights & Knaves dialogue: some characters are silent, so the puzzle is ambiguous until they are asked.

    Ann says Bob is a knave. Bob is silent. Cid says Ann is a knight.       the prompt
    <ask> Bob </ask>                                                        a response that asks
    Bob says Cid is a knave and Ann is a knight.                            the environment's answer
    <think> ... </think> <answer> ... </answer>                             a response that answers

Invariants of a puzzle:
- what is said in the prompt leaves `candidates` >= 2 assignments, and given the prompt each is equally likely to be
  the right one: without an answer of the environment no policy scores more than 1 / `candidates` on average;
- what all characters say together leaves one assignment;
- the prompt alone decides whether a puzzle is for training, held out, or for the warm start.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sortedrl.tasks.knights_and_knaves import (
    COMPACT_NAMES,
    WARM_START_SHARE,
    Claim,
    Connective,
    Is,
    Joined,
    Puzzle,
    Wording,
    counts_by_size,
    digest,
    fingerprint,
    random_claim,
    solutions,
    statement,
)
from sortedrl.tasks.knights_answers import reward_function
from sortedrl.tasks.task import Problem, Reward, SplitTask

DIALOGUE_CHARACTERS = (3, 3, 4)
MOST_SILENT = 2
MOST_CANDIDATES = 4
_QUESTION = re.compile(r"\s*<ask>\s*(?P<name>\w+)\s*</ask>\s*")
_DRAWS_WITHOUT_A_NEW_PUZZLE = 2_000
_COMPLETIONS = 200  # drawn to find one for each candidate


@dataclass(frozen=True, slots=True)
class DialoguePuzzle:
    """`puzzle` is what everyone says when asked; the `silent` say it only then."""

    puzzle: Puzzle
    silent: tuple[int, ...]

    @property
    def prompt(self) -> Puzzle:
        """The puzzle without what the silent ones would say."""
        return _silenced(self.puzzle.claims, self.silent)

    @property
    def candidates(self) -> int:
        return len(solutions(self.prompt))

    @property
    def answer(self) -> tuple[bool, ...]:
        return solutions(self.puzzle)[0]

    @property
    def text(self) -> str:
        characters = range(self.puzzle.characters)
        return " ".join(silence(one) if one in self.silent else self.statement(one) for one in characters)

    def statement(self, speaker: int) -> str:
        return statement(speaker, self.puzzle.claims[speaker])


def silence(character: int) -> str:
    return f"{COMPACT_NAMES[character]} is silent."


def question(character: int) -> str:
    return f"<ask> {COMPACT_NAMES[character]} </ask>"


def asked(response: str, characters: int) -> int | None:
    """The character that a response asks; None if it is not a question to one of them."""
    match = _QUESTION.fullmatch(response)
    names = COMPACT_NAMES[:characters]
    return names.index(match["name"]) if match and match["name"] in names else None


def random_dialogue(characters: int, rng: random.Random, low: float = 0.0, high: float = 1.0) -> DialoguePuzzle:
    """A puzzle whose prompt has its fingerprint in [low, high)."""
    while True:
        silent = tuple(sorted(rng.sample(range(characters), rng.randint(1, MOST_SILENT))))
        claims = [random_claim(characters, rng) for _ in range(characters)]
        prompt = _silenced(claims, silent)
        candidates = solutions(prompt)
        if 2 <= len(candidates) <= MOST_CANDIDATES and low <= fingerprint(prompt) < high:
            completed = _completed(claims, silent, candidates, rng)
            if completed is not None:
                return DialoguePuzzle(completed, silent)


def _completed(
    claims: Sequence[Claim], silent: Sequence[int], candidates: Sequence[tuple[bool, ...]], rng: random.Random
) -> Puzzle | None:
    """The silent ones say something that leaves one candidate, each equally likely.

    None if no such statements are found for some candidate: then the prompt alone would rule it out.
    """
    found: dict[tuple[bool, ...], Puzzle] = {}
    for _ in range(_COMPLETIONS):
        said = list(claims)
        for character in silent:
            said[character] = random_claim(len(claims), rng)
        left = solutions(puzzle := Puzzle(tuple(said)))
        if len(left) == 1:
            found.setdefault(left[0], puzzle)
        if len(found) == len(candidates):
            return found[rng.choice(candidates)]
    return None


def _silenced(claims: Sequence[Claim], silent: Sequence[int]) -> Puzzle:
    """Silence as a claim that fits every assignment, and that the generator does not make: "I am a knight", twice."""
    said = list(claims)
    for character in silent:
        said[character] = Joined(Connective.AND, Is(character, True), Is(character, True))
    return Puzzle(tuple(said))


# --- task ------------------------------------------------------------------------------------------------


class KnightsDialogue(SplitTask):
    """`count` puzzles, distributed evenly over the entries of `characters`; a fraction of each size is held out.

    With `muted`, a silent character stays silent when it is asked: a control experiment, in which no policy can score
    more than the mean of 1 / `candidates`."""

    name = "knights_and_knaves:dialogue"

    def __init__(
        self,
        characters: Sequence[int] = DIALOGUE_CHARACTERS,
        count: int = 2400,
        held_out_fraction: float = 0.25,
        seed: int = 0,
        muted: bool = False,
    ) -> None:
        self._counts = counts_by_size(characters, count, held_out_fraction, Wording.COMPACT)
        if min(characters) <= MOST_SILENT:
            raise ValueError(
                f"characters = {tuple(characters)}: up to {MOST_SILENT} are silent, and one must speak. Use"
                f" {MOST_SILENT + 1} to {len(COMPACT_NAMES)}."
            )
        self._held_out_fraction = held_out_fraction
        self._seed = seed
        self._muted = muted

    def environment(self) -> Islanders:
        return Islanders(self._muted)

    @cached_property
    def _problems(self) -> tuple[list[Problem], list[Problem]]:
        rng = random.Random(self._seed)
        train: list[Problem] = []
        held_out: list[Problem] = []
        held_out_from = 1 - (1 - WARM_START_SHARE) * self._held_out_fraction
        for size, to_train_on, to_hold_out in self._counts:
            train += _distinct(size, to_train_on, rng, WARM_START_SHARE, held_out_from)
            held_out += _distinct(size, to_hold_out, rng, held_out_from, 1.0)
        rng.shuffle(train)
        rng.shuffle(held_out)
        return train, held_out


class Islanders:
    """The environment of one dialogue: characters that speak when they are asked."""

    def __init__(self, muted: bool = False) -> None:
        self._muted = muted
        self._has_asked = False

    def reset(self, problem: Problem) -> None:
        self._puzzle: DialoguePuzzle = problem.answer

    async def step(self, response: str) -> str | Reward:
        character = asked(response, self._puzzle.puzzle.characters)
        if character is None:
            return self._reward(response)
        self._has_asked = True
        stays_silent = self._muted and character in self._puzzle.silent
        return silence(character) if stays_silent else self._puzzle.statement(character)

    async def finish(self, reason: str) -> Reward:
        """A dialogue without an answer: the reward of a wrong format."""
        return self._reward("")

    def state(self) -> bool:
        return self._has_asked

    def restore(self, state: bool) -> None:
        self._has_asked = state

    def _reward(self, response: str) -> Reward:
        answer = dict(zip(COMPACT_NAMES, self._puzzle.answer, strict=False))
        reward = reward_function(response, answer)
        return replace(reward, parts={**reward.parts, "asked": float(self._has_asked)})


def _distinct(characters: int, wanted: int, rng: random.Random, low: float, high: float) -> list[Problem]:
    """Problems with distinct prompts."""
    found: dict[str, Problem] = {}
    fruitless = 0
    while len(found) < wanted:
        puzzle = random_dialogue(characters, rng, low, high)
        fruitless = fruitless + 1 if puzzle.text in found else 0
        if fruitless == _DRAWS_WITHOUT_A_NEW_PUZZLE:
            raise ValueError(
                f"{wanted} dialogues with {characters} characters were requested, but {fruitless} draws in a row"
                f" gave no new one after {len(found)}. Lower `count` or use more characters."
            )
        id = f"{characters}ppl-dialogue-{digest(puzzle.text)}"
        found.setdefault(puzzle.text, Problem(id, puzzle.text, puzzle))
    return list(found.values())
