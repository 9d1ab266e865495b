"""Knights & Knaves: knights always tell the truth, knaves always lie; who is what?

The file goes from the puzzle to the task: claims, solver, generator, wording, reward, task. Problems come from the
generator below (no download), or from the Parquet files of Logic-RL, which the SortedRL paper trains on; both have the
same kinds of claims.

Invariants of generated puzzles:
- each has exactly one answer (the solver counts them);
- the same seed gives the same puzzles on every machine;
- training, held-out and warm-start puzzles are disjoint: a fingerprint, which does not depend on the names or the order
  of the characters, assigns each puzzle to one set.

The reward is that of Logic-RL: format +1 or -1; answer +2 if every character is right, -1.5 if any is wrong, -2 if the
answer cannot be parsed or the format is wrong. So it ranges from -3 to 3.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from hashlib import blake2b
from itertools import islice, product, starmap
from math import ceil
from pathlib import Path

from sortedrl.tasks.datasets import Source, read_rows
from sortedrl.tasks.knights_answers import reward_function
from sortedrl.tasks.task import Problem, Reward, SplitTask

# --- claims ----------------------------------------------------------------------------------------------


Assignment = tuple[bool, ...]  # whether character i is a knight


class Connective(StrEnum):
    AND = "and"
    OR = "or"
    IMPLIES = "only if"
    IFF = "if and only if"


_MEANING: dict[Connective, Callable[[bool, bool], bool]] = {
    Connective.AND: operator.and_,
    Connective.OR: operator.or_,
    Connective.IMPLIES: operator.le,
    Connective.IFF: operator.eq,
}


@dataclass(frozen=True, slots=True)
class Is:
    """A character, by its index in the puzzle, is a knight (or a knave)."""

    character: int
    knight: bool

    def holds(self, knights: Sequence[bool]) -> bool:
        return knights[self.character] is self.knight


@dataclass(frozen=True, slots=True)
class Not:
    claim: Is

    def holds(self, knights: Sequence[bool]) -> bool:
        return not self.claim.holds(knights)


@dataclass(frozen=True, slots=True)
class Joined:
    connective: Connective
    left: Is
    right: Is

    def holds(self, knights: Sequence[bool]) -> bool:
        return _MEANING[self.connective](self.left.holds(knights), self.right.holds(knights))


# All 25,000 claims of Logic-RL's files have one of these forms; none nests deeper.
Claim = Is | Not | Joined


@dataclass(frozen=True, slots=True)
class Puzzle:
    """`claims[i]` is what character i says."""

    claims: tuple[Claim, ...]

    @property
    def characters(self) -> int:
        return len(self.claims)


# --- solver ----------------------------------------------------------------------------------------------


@cache
def _assignments(characters: int) -> list[Assignment]:
    """All of them, in an order in which the first character changes fastest."""
    return [knights[::-1] for knights in product((False, True), repeat=characters)]


def solutions(puzzle: Puzzle) -> list[Assignment]:
    """Every assignment in which each character's claim holds exactly if it is a knight."""
    return [
        knights
        for knights in _assignments(puzzle.characters)
        if all(claim.holds(knights) is knight for claim, knight in zip(puzzle.claims, knights, strict=True))
    ]


# --- generator -------------------------------------------------------------------------------------------

MOST_CHARACTERS = 12  # the solver tries 2 ** characters assignments
WARM_START_SHARE = 0.3  # of all puzzles; tasks never use these
_DRAWS_WITHOUT_A_NEW_PUZZLE = 10_000


def random_puzzle(characters: int, rng: random.Random) -> Puzzle:
    """A puzzle with exactly one answer. The six kinds of claim are equally likely, as in Logic-RL's files."""
    while True:
        puzzle = Puzzle(tuple(random_claim(characters, rng) for _ in range(characters)))
        if len(solutions(puzzle)) == 1:
            return puzzle


def random_claim(characters: int, rng: random.Random) -> Claim:
    kind = rng.randrange(2 + len(Connective))
    left = _random_is(characters, rng)
    if kind == 0:
        return left
    if kind == 1:
        return Not(left)
    right = left
    while right == left:
        right = _random_is(characters, rng)
    return Joined(tuple(Connective)[kind - 2], left, right)


def _random_is(characters: int, rng: random.Random) -> Is:
    return Is(rng.randrange(characters), rng.random() < 0.5)


def fingerprint(puzzle: Puzzle) -> float:
    """In [0, 1); equal for puzzles that differ only in the order of characters or of the parts of a claim.

    Each character gets a mark from its claim, in which others are represented by their marks of the previous round.
    """
    marks = [""] * puzzle.characters
    for _ in range(3):
        marks = [digest(_marked(claim, speaker, marks)) for speaker, claim in enumerate(puzzle.claims)]
    return int(digest("|".join(sorted(marks))), 16) / 16**16


def _marked(claim: Claim, speaker: int, marks: Sequence[str]) -> str:
    match claim:
        case Is(character, knight):
            return f"{'self' if character == speaker else marks[character]}={int(knight)}"
        case Not(inner):
            return f"not({_marked(inner, speaker, marks)})"
        case Joined(connective, left, right):
            parts = [_marked(left, speaker, marks), _marked(right, speaker, marks)]
            if connective is not Connective.IMPLIES:
                parts.sort()
            return f"{connective}({','.join(parts)})"


def digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def warm_start_puzzle(characters: int, rng: random.Random) -> Puzzle:
    """A puzzle that no task uses."""
    while True:
        puzzle = random_puzzle(characters, rng)
        if fingerprint(puzzle) < WARM_START_SHARE:
            return puzzle


def _distinct_puzzles(characters: int, train: int, held_out: int, rng: random.Random) -> tuple[list[Puzzle], ...]:
    """This many distinct puzzles per set; the sets share no fingerprint."""
    held_out_from = 1 - (1 - WARM_START_SHARE) * held_out / (train + held_out)
    found: tuple[list[Puzzle], list[Puzzle]] = ([], [])
    seen: set[Puzzle] = set()
    fruitless = 0
    while len(found[0]) < train or len(found[1]) < held_out:
        puzzle = random_puzzle(characters, rng)
        place = fingerprint(puzzle)
        side, wanted = (found[1], held_out) if place >= held_out_from else (found[0], train)
        if puzzle in seen or place < WARM_START_SHARE or len(side) == wanted:
            fruitless += 1
            if fruitless == _DRAWS_WITHOUT_A_NEW_PUZZLE:
                raise ValueError(
                    f"{train + held_out} puzzles with {characters} characters were requested, but"
                    f" {fruitless} draws in a row gave no new one, with {len(found[0])} of {train} found"
                    f" for training and {len(found[1])} of {held_out} held out. Lower `count` or use"
                    f" more characters."
                )
            continue
        fruitless = 0
        seen.add(puzzle)
        side.append(puzzle)
    return found


# --- wording ---------------------------------------------------------------------------------------------


class Wording(StrEnum):
    STORY = "story"  # full sentences with varied phrasing, for language models
    COMPACT = "compact"  # one plain sentence per character, fixed names, for the built-in model


COMPACT_NAMES = ("Ann", "Bob", "Cid", "Dan", "Eve")
STORY_NAMES = (
    "Ada", "Amir", "Bella", "Bruno", "Clara", "Cyrus", "Daisy", "Dmitri", "Elena", "Emil", "Farah", "Felix",
    "Gita", "Gustav", "Hana", "Hugo", "Ines", "Ivan", "Jonas", "Kira", "Kofi", "Lena", "Luca", "Maya",
    "Milo", "Nadia", "Nils", "Olga", "Omar", "Paula", "Pedro", "Rosa", "Ravi", "Selma", "Sven", "Tara",
    "Uma", "Viktor", "Wanda", "Zara",
)  # fmt: skip
SYSTEM = (
    "Work out who is a knight and who is a knave. Reason first, between <think> and </think>. Then give the"
    " answer between <answer> and </answer>, one line for each character, and write nothing after it. For"
    " example: <think> your reasoning </think> <answer> (1) Ada is a knight\n(2) Ivan is a knave </answer>"
)
_OPENINGS = (
    "Everyone on this island is a knight or a knave. Knights only say what is true, knaves what is false.",
    "On an island of knights and knaves, each knight tells the truth every time and each knave lies.",
    "You land where only two kinds of people live: knights, who never lie, and knaves, who always do.",
)
_MEETINGS = (
    "You run into {count} of them: {names}.",
    "{count} of the islanders greet you: {names}.",
    "There you talk to {count} people: {names}.",
)
_SPEECHES = (
    '{name} says: "{Claim}."',
    '{name} tells you, "{Claim}."',
    '"{Claim}," says {name}.',
    '"{Claim}," {name} explains.',
    "{name} swears that {claim}.",
    "{name} lets you know that {claim}.",
    "{name} is sure that {claim}.",
    'The words of {name} are: "{Claim}."',
)
_QUESTIONS = ("Who is a knight, and who is a knave?", "What is each of them?", "Tell the knights from the knaves.")


def claim_text(claim: Claim, names: Sequence[str], wording: Wording = Wording.STORY) -> str:
    """In compact wording, every connective is between its parts, which is easier to learn."""
    match claim:
        case Is(character, knight):
            return f"{names[character]} is a {_kind(knight)}"
        case Not(Is(character, knight)):
            return f"{names[character]} is not a {_kind(knight)}"
        case Joined(connective, left, right):
            first, second = claim_text(left, names), claim_text(right, names)
            if connective is Connective.IMPLIES and wording is Wording.STORY:
                return f"if {first} then {second}"
            return f"{first} {connective} {second}"


def statement(speaker: int, claim: Claim) -> str:
    return f"{COMPACT_NAMES[speaker]} says {claim_text(claim, COMPACT_NAMES, Wording.COMPACT)}."


def compact_text(puzzle: Puzzle) -> str:
    return " ".join(starmap(statement, enumerate(puzzle.claims)))


def _content(puzzle: Puzzle) -> str:
    """The puzzle without its wording."""
    places = [str(place) for place in range(puzzle.characters)]
    return "; ".join(claim_text(claim, places) for claim in puzzle.claims)


def story_text(puzzle: Puzzle, names: Sequence[str], rng: random.Random) -> str:
    listed = f"{', '.join(names[:-1])} and {names[-1]}"
    speeches = [
        rng.choice(_SPEECHES).format(name=name, claim=text, Claim=text[0].upper() + text[1:])
        for name, text in zip(names, (claim_text(claim, names) for claim in puzzle.claims), strict=True)
    ]
    meeting = rng.choice(_MEETINGS).format(count=puzzle.characters, names=listed)
    return " ".join((rng.choice(_OPENINGS), meeting, *speeches, rng.choice(_QUESTIONS)))


def _kind(knight: bool) -> str:
    return "knight" if knight else "knave"


# --- task ------------------------------------------------------------------------------------------------

SMALL_CHARACTERS = (2, 3, 3, 4)
MIXED_CHARACTERS = (2, 3, 3, 4, 4, 4)


class KnightsAndKnaves(SplitTask):
    """`count` puzzles, distributed evenly over the entries of `characters`; a fraction of each size is held out.

    A size that is listed twice gets twice as many. With `data`, a folder of Logic-RL's
    `{3..7}ppl-{train,test}.parquet`, the problems are the first ones of these files, and the test files are held out.
    """

    name = "knights_and_knaves"

    def __init__(
        self,
        characters: Sequence[int] = (3, 4, 5, 6, 7),
        count: int = 5000,
        held_out_fraction: float = 0.1,
        seed: int = 0,
        data: Path | str | None = None,
        wording: Wording = Wording.STORY,
    ) -> None:
        self._wording = Wording(wording)
        self._counts = counts_by_size(characters, count, held_out_fraction, self._wording)
        self._seed = seed
        self._data = None if data is None else Path(data)

    @classmethod
    def small(cls, count: int = 2400, held_out_fraction: float = 0.25, seed: int = 0) -> KnightsAndKnaves:
        """Small puzzles in compact wording, for the built-in model; 600 of 2400 are held out."""
        return cls(SMALL_CHARACTERS, count, held_out_fraction, seed, wording=Wording.COMPACT)

    @classmethod
    def mixed(cls, count: int = 4200, held_out_fraction: float = 0.5, seed: int = 0) -> KnightsAndKnaves:
        """A mixture of sizes in compact wording, half of them with 4 characters; 2100 of 4200 are held out."""
        return cls(MIXED_CHARACTERS, count, held_out_fraction, seed, wording=Wording.COMPACT)

    def score(self, problem: Problem, response: str) -> Reward:
        return reward_function(response, problem.answer)

    @cached_property
    def _problems(self) -> tuple[list[Problem], list[Problem]]:
        rng = random.Random(self._seed)
        train: list[Problem] = []
        held_out: list[Problem] = []
        for size, to_train_on, to_hold_out in self._counts:
            if self._data is None:
                for puzzles, part in zip(
                    _distinct_puzzles(size, to_train_on, to_hold_out, rng), (train, held_out), strict=True
                ):
                    part += [self._problem(puzzle, rng) for puzzle in puzzles]
            else:
                train += _read_problems(self._data / f"{size}ppl-train.parquet", to_train_on)
                held_out += _read_problems(self._data / f"{size}ppl-test.parquet", to_hold_out)
        # Shuffled, so that the first part of either list has every size in it.
        rng.shuffle(train)
        rng.shuffle(held_out)
        return train, held_out

    def _problem(self, puzzle: Puzzle, rng: random.Random) -> Problem:
        if self._wording is Wording.COMPACT:
            names: Sequence[str] = COMPACT_NAMES[: puzzle.characters]
            question, system = compact_text(puzzle), ""
        else:
            names = rng.sample(STORY_NAMES, puzzle.characters)
            question, system = story_text(puzzle, names, rng), SYSTEM
        answer = dict(zip(names, solutions(puzzle)[0], strict=True))
        return Problem(f"{puzzle.characters}ppl-{digest(_content(puzzle))}", question, answer, system)


def counts_by_size(
    characters: Sequence[int], count: int, held_out_fraction: float, wording: Wording
) -> list[tuple[int, int, int]]:
    """Each size, with how many puzzles of it are for training and how many are held out. Raises ValueError."""
    most = len(COMPACT_NAMES) if wording is Wording.COMPACT else MOST_CHARACTERS
    if not characters or min(characters) < 2 or max(characters) > most:
        raise ValueError(
            f"characters = {tuple(characters)}: puzzles in {wording} wording have 2 to {most} characters."
            f" Use one or more such numbers, for example (3, 4, 5)."
        )
    if not 0 < held_out_fraction < 1:
        raise ValueError(f"held_out_fraction = {held_out_fraction}: it must be between 0 and 1, for example 0.1.")
    each = count // len(characters)
    if not 1 <= round(each * held_out_fraction) < each:
        raise ValueError(
            f"count = {count}: over {len(characters)} sizes that is {each} puzzles each, too few to train on"
            f" some and to hold out a fraction of {held_out_fraction}. Use a count of at least"
            f" {len(characters) * ceil(1 / min(held_out_fraction, 1 - held_out_fraction))}."
        )
    wanted = {size: count * list(characters).count(size) // len(characters) for size in sorted(set(characters))}
    held_out = {size: round(puzzles * held_out_fraction) for size, puzzles in wanted.items()}
    return [(size, wanted[size] - held_out[size], held_out[size]) for size in wanted]


def _read_problems(path: Path, count: int) -> list[Problem]:
    """The first `count` problems of one of Logic-RL's files."""
    rows = list(islice(read_rows(Source(str(path))), count))
    if len(rows) < count:
        raise ValueError(
            f"{path}: {count} puzzles were requested, but it has {len(rows)}. Lower `count`, or set"
            f" `held_out_fraction` to that of the files (0.1)."
        )
    missing = {"quiz", "names", "solution"}.difference(rows[0])
    if missing:
        raise ValueError(
            f"{path}: no column {' and no column '.join(sorted(missing))} among {', '.join(rows[0])}."
            f" Logic-RL's own files have them."
        )
    return [
        Problem(
            id=f"{path.stem}-{place}",
            question=row["quiz"],
            answer=dict(zip(row["names"], row["solution"], strict=True)),
            system=SYSTEM,
        )
        for place, row in enumerate(rows)
    ]
