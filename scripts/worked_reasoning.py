"""Worked solutions of small Knights & Knaves puzzles, written by a solver: training data for the built-in model.

The procedure is a search through the cases. Each case assumes what every character is, then goes through the claims:
each part of a claim is quoted and marked as true (`yes`) or false (`no`). A claim that contradicts its speaker ends the
case (`instead` starts the next); a case without contradictions is the answer. Every step follows from the puzzle and
the current case, so that a very small model can learn it.

Some of the reasoning is flawed on purpose (`Flaws`): it guesses, overlooks a contradiction, or gives up. A model
trained on the mixture has learned the procedure but follows it only sometimes, which RL can improve.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from sortedrl.tasks.knights_and_knaves import (
    COMPACT_NAMES,
    Claim,
    Connective,
    Is,
    Joined,
    Not,
    Puzzle,
    claim_text,
)


@dataclass(frozen=True, slots=True)
class Flaws:
    """How often the reasoning goes wrong, as probabilities."""

    guess: float = 0.0  # a response names an answer at random, without any search
    overlook: float = 0.0  # a claim that contradicts its speaker is accepted
    give_up: float = 0.0  # a refuted case is the last one; the answer is random
    reject: float = 0.0  # a claim that fits its speaker is taken for a contradiction


Heard = Sequence[tuple[int, Claim]]  # speaker and claim, in the order of the conversation
NO_FLAWS = Flaws()
SEARCH_TOO_FAR = Flaws(overlook=0.03, reject=0.2)  # passes the answer and goes on: long responses fail more often
SUPPOSE, INSTEAD, GUESS, ENOUGH, YES, NO = "suppose", "instead", "guess", "enough", "yes", "no"


def worked_response(puzzle: Puzzle, rng: random.Random, flaws: Flaws) -> str:
    """A complete response in the task's format; with `NO_FLAWS`, the answer is always right."""
    return worked_answer(tuple(enumerate(puzzle.claims)), puzzle.characters, rng, flaws)


def worked_answer(heard: Heard, characters: int, rng: random.Random, flaws: Flaws) -> str:
    """A response that goes through the claims that were heard; without flaws, its answer fits all of them."""
    guesses = rng.random() < flaws.guess
    thought, answer = ([GUESS], _random_case(characters, rng)) if guesses else _search(heard, characters, rng, flaws)
    return " ".join(("<think>", *thought, "</think>", "<answer>", *_stated(answer), "</answer>"))


def phrases() -> list[str]:
    """All phrases in compact puzzles and responses, each a token of the built-in model."""
    characters = range(len(COMPACT_NAMES))
    facts = [Is(character, knight) for character in characters for knight in (True, False)]
    return [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        *(claim_text(fact, COMPACT_NAMES) for fact in facts),
        *(claim_text(Not(fact), COMPACT_NAMES) for fact in facts),
        *(_speaker(character) for character in characters),
        *Connective,
        *(SUPPOSE, INSTEAD, GUESS, ENOUGH, YES, NO, "."),
    ]


def _search(heard: Heard, characters: int, rng: random.Random, flaws: Flaws) -> tuple[list[str], tuple[bool, ...]]:
    thought: list[str] = []
    for case in product((True, False), repeat=characters):
        thought += [INSTEAD if thought else SUPPOSE, *_stated(case)]
        if _seems_to_fit(heard, case, thought, rng, flaws):
            return thought, case
        if rng.random() < flaws.give_up:
            break
    return [*thought, ENOUGH], _random_case(characters, rng)


def _seems_to_fit(heard: Heard, case: Sequence[bool], thought: list[str], rng: random.Random, flaws: Flaws) -> bool:
    """Appends the check of a case to `thought`, up to the first contradiction."""
    for speaker, claim in heard:
        thought += [_speaker(speaker), *_called(claim, case)]
        fits = claim.holds(case) == case[speaker]
        if rng.random() < (flaws.reject if fits else 1.0 - flaws.overlook):
            return False
    return True


def _called(claim: Claim, case: Sequence[bool]) -> list[str]:
    """The claim, with a `yes` or `no` after each of its parts."""
    if isinstance(claim, Joined):
        return [*_called(claim.left, case), claim.connective, *_called(claim.right, case)]
    return [claim_text(claim, COMPACT_NAMES), YES if claim.holds(case) else NO]


def _stated(case: Sequence[bool]) -> list[str]:
    return [claim_text(Is(character, knight), COMPACT_NAMES) for character, knight in enumerate(case)]


def _speaker(character: int) -> str:
    return f"{COMPACT_NAMES[character]} says"


def _random_case(characters: int, rng: random.Random) -> tuple[bool, ...]:
    return tuple(rng.random() < 0.5 for _ in range(characters))
