"""Worked Knights & Knaves dialogues: training data for the built-in model of the dialogue task.

A dialogue asks each silent character in turn, then searches through the cases as in worked_reasoning.py, over all that
was heard. Some are flawed on purpose: they answer while a character is still silent. In a few, the characters stay
silent when they are asked, so that the model has seen this too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from worked_reasoning import Flaws, phrases, worked_answer

from sortedrl.tasks.knights_and_knaves import COMPACT_NAMES
from sortedrl.tasks.knights_dialogue import DialoguePuzzle, question, silence


@dataclass(frozen=True, slots=True)
class DialogueFlaws(Flaws):
    answer_early: float = 0.0  # before each question: it answers instead of asking
    muted: float = 0.0  # all questions remain without an answer


class Turn(NamedTuple):
    """A response, and what the environment says next; None after the last one."""

    response: str
    observation: str | None


def worked_dialogue(puzzle: DialoguePuzzle, rng: random.Random, flaws: DialogueFlaws) -> list[Turn]:
    """A complete dialogue; with no flaws, its answer is always right."""
    heard = [(one, claim) for one, claim in enumerate(puzzle.puzzle.claims) if one not in puzzle.silent]
    muted = rng.random() < flaws.muted
    turns: list[Turn] = []
    for character in puzzle.silent:
        if rng.random() < flaws.answer_early:
            break
        turns.append(Turn(question(character), silence(character) if muted else puzzle.statement(character)))
        if not muted:
            heard.append((character, puzzle.puzzle.claims[character]))
    return [*turns, Turn(worked_answer(heard, puzzle.puzzle.characters, rng, flaws), None)]


def dialogue_phrases() -> list[str]:
    """All phrases in dialogues, each a token of the dialogue's built-in model."""
    silences = [silence(character).removesuffix(".") for character in range(len(COMPACT_NAMES))]
    return [*phrases(), "<ask>", "</ask>", *COMPACT_NAMES, *silences]
