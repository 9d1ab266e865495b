"""Knights & Knaves: the solver, what the generator promises, and a reward that cannot be talked round."""

import random
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worked_reasoning import NO_FLAWS, Flaws, phrases, worked_response

from sortedrl.tasks.knights_and_knaves import (
    COMPACT_NAMES,
    WARM_START_SHARE,
    Claim,
    Connective,
    Is,
    Joined,
    KnightsAndKnaves,
    Not,
    Puzzle,
    compact_text,
    fingerprint,
    random_puzzle,
    solutions,
    warm_start_puzzle,
)
from sortedrl.tasks.knights_answers import reward_function

ANSWER = {"Ann": True, "Bob": False, "Cid": True}
RIGHT = "<think> because </think> <answer> (1) Ann is a knight\n(2) Bob is a knave\n(3) Cid is a knight </answer>"


def puzzles(characters: int, seed: int = 0) -> Puzzle:
    return random_puzzle(characters, random.Random(seed))


def said_and_meant(claim: Claim, case: tuple[bool, ...]) -> bool:
    """What a claim means, spelled out once more and independently of the solver's tables."""
    match claim:
        case Is(character, knight):
            return case[character] is knight
        case Not(inner):
            return not said_and_meant(inner, case)
        case Joined(connective, left, right):
            first, second = said_and_meant(left, case), said_and_meant(right, case)
            meaning = {
                Connective.AND: first and second,
                Connective.OR: first or second,
                Connective.IMPLIES: second if first else True,
                Connective.IFF: first is second,
            }
            return meaning[connective]


@given(characters=st.integers(2, 7), seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_the_solver_finds_the_one_answer_that_trying_every_case_finds(characters: int, seed: int) -> None:
    puzzle = puzzles(characters, seed)
    fitting = [
        case
        for case in product((True, False), repeat=characters)
        if all(said_and_meant(claim, case) is case[speaker] for speaker, claim in enumerate(puzzle.claims))
    ]
    assert len(fitting) == 1
    assert solutions(puzzle) == fitting
    assert all(claim.holds(fitting[0]) is fitting[0][who] for who, claim in enumerate(puzzle.claims))


def test_a_puzzle_without_and_one_with_two_answers() -> None:
    liar = Puzzle((Is(0, False), Is(0, True)))  # "I am a knave" fits nobody
    open_ended = Puzzle((Is(1, True), Is(0, True)))
    assert solutions(liar) == []
    assert sorted(solutions(open_ended)) == [(False, False), (True, True)]


# --- the generated task ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task() -> KnightsAndKnaves:
    return KnightsAndKnaves(characters=(2, 3, 5, 7), count=800, seed=5)


def test_sizes_and_shares_are_as_asked_for(task: KnightsAndKnaves) -> None:
    for problems, each in ((task.train(), 180), (task.held_out(), 20)):
        sizes = [len(problem.answer) for problem in problems]
        assert {size: sizes.count(size) for size in set(sizes)} == {2: each, 3: each, 5: each, 7: each}
    weighted = KnightsAndKnaves(characters=(3, 3, 4), count=300).train()
    assert sum(len(problem.answer) == 3 for problem in weighted) == 180


def test_all_problems_are_distinct_and_the_sides_share_none(task: KnightsAndKnaves) -> None:
    ids = [problem.id for problem in (*task.train(), *task.held_out())]
    assert len(set(ids)) == len(ids) == 800


def test_the_seed_decides() -> None:
    first, again, other = (KnightsAndKnaves(count=50, seed=seed) for seed in (1, 1, 2))
    assert list(first.train()) == list(again.train())
    assert list(first.held_out()) == list(again.held_out())
    assert not {problem.id for problem in first.train()} & {problem.id for problem in other.train()}


def renamed(puzzle: Puzzle, order: list[int]) -> Puzzle:
    """The same puzzle with character i at place order[i], and with the parts of symmetric claims swapped."""

    def moved(claim: Is) -> Is:
        return Is(order[claim.character], claim.knight)

    def rewritten(claim: Claim) -> Claim:
        match claim:
            case Is():
                return moved(claim)
            case Not(inner):
                return Not(moved(inner))
            case Joined(Connective.IMPLIES, left, right):
                return Joined(Connective.IMPLIES, moved(left), moved(right))
            case Joined(connective, left, right):
                return Joined(connective, moved(right), moved(left))

    claims = {order[speaker]: rewritten(claim) for speaker, claim in enumerate(puzzle.claims)}
    return Puzzle(tuple(claims[place] for place in range(puzzle.characters)))


@given(characters=st.integers(2, 7), seed=st.integers(0, 10_000), shuffle=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_a_fingerprint_survives_new_names_and_another_order(characters: int, seed: int, shuffle: random.Random) -> None:
    puzzle = puzzles(characters, seed)
    order = list(range(characters))
    shuffle.shuffle(order)
    assert fingerprint(renamed(puzzle, order)) == fingerprint(puzzle)
    assert fingerprint(puzzles(characters, seed + 1)) != fingerprint(puzzle) or characters == 2


def test_warm_start_train_and_held_out_puzzles_share_no_fingerprint() -> None:
    rng = random.Random(0)
    warm = {compact_text(warm_start_puzzle(size, rng)) for size in (2, 2, 3, 4) for _ in range(300)}
    assert all(fingerprint(warm_start_puzzle(size, rng)) < WARM_START_SHARE for size in (2, 3, 4, 5))
    small, other = KnightsAndKnaves.small(seed=0), KnightsAndKnaves.small(seed=1)
    train, held_out = ({problem.question for problem in side} for side in (small.train(), small.held_out()))
    assert len(train) == 1800 and len(held_out) == 600
    mixed = KnightsAndKnaves.mixed()
    questions = [{problem.question for problem in side} for side in (mixed.train(), mixed.held_out())]
    assert [len(side) for side in questions] == [2100, 2100] and not questions[0] & questions[1]
    assert not warm & (questions[0] | questions[1])
    assert not warm & (train | held_out)
    assert not train & (held_out | {problem.question for problem in other.held_out()})


def test_a_story_names_everyone_and_says_everything(task: KnightsAndKnaves) -> None:
    for problem in task.held_out():
        assert all(problem.question.count(name) >= 2 for name in problem.answer)
        assert "<think>" in problem.system
    assert len({problem.question.split(".")[0] for problem in task.train()}) > 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"characters": (1, 3)}, ["characters = (1, 3)", "2 to"]),
        ({"characters": ()}, ["characters = ()"]),
        ({"characters": (2, 6), "wording": "compact"}, ["characters = (2, 6)", "compact wording", "2 to 5"]),
        ({"held_out_fraction": 1.5}, ["held_out_fraction = 1.5"]),
        ({"count": 10}, ["count = 10", "at least 50"]),
    ],
)
def test_wrong_options_are_named_with_their_value(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        KnightsAndKnaves(**options)  # type: ignore[arg-type]
    assert all(word in str(error.value) for word in words)
    if "at least" in words[-1]:
        KnightsAndKnaves(count=50).train()


def test_more_puzzles_than_exist_is_an_error_with_numbers() -> None:
    with pytest.raises(ValueError, match=r"2000 puzzles with 2 characters .* of 1800 found"):
        KnightsAndKnaves(characters=(2,), count=2000).train()


# --- the reward ------------------------------------------------------------------------------------------


def test_the_four_rewards_of_logic_rl() -> None:
    assert reward_function(RIGHT, ANSWER).value == 3.0
    assert reward_function(RIGHT, ANSWER).correct
    wrong = reward_function(RIGHT.replace("Cid is a knight", "Cid is a knave"), ANSWER)
    assert (wrong.value, wrong.correct, dict(wrong.parts)) == (-0.5, False, {"format": 1.0, "answer": -1.5})
    assert reward_function("<think> </think> <answer> no idea </answer>", ANSWER).value == -1.0
    assert reward_function("Ann is a knight, Bob is a knave, Cid is a knight", ANSWER).value == -3.0


@pytest.mark.parametrize(
    "answer",
    [
        "Ann is a knight Bob is a knave Cid is a knight",
        "Cid is a knight, Ann is a knight, and Bob is a knave.",
        "- **Ann**: knight\n- **Bob**: knave\n- **Cid**: knight",
        "1. ANN is a Knight\n2. bob is a Knave\n3. cid is a KNIGHT",
    ],
)
def test_harmless_spellings_of_the_right_answer_count(answer: str) -> None:
    assert reward_function(f"<think>t</think>\n<answer>{answer}</answer>\n", ANSWER).value == 3.0


@pytest.mark.parametrize(
    "answer",
    [
        "Ann is a knight, Bob is a knave",  # one is missing
        "Ann is a knight, Bob is a knave, Cid is a knight, Cid is a knave",  # contradicts itself
        "Ann is a knave, Ann is a knight, Bob is a knave, Cid is a knight",
        "Ann is a knight, Bob is a knave, Cid is a knight, Dan is a knight",  # a stranger
        "Ann is a knight or a knave, Bob is a knave, Cid is a knight",
        "Ann is a knight, Bob is not a knight, Cid is a knight",
        "Ann is a knight, Bob is a knave, Cid is a knight, unless Bob is a knight",
        "Ann is a knight, Bob is a knave, Cid is a knight. Or the other way round",
        "Ann is not a knave: Ann is a knight, Bob is a knave, Cid is a knight",
        "Annabel is a knight, Bob is a knave, Cid is a knight",
        "Ann, Bob and Cid: knight, knave, knight",
        "",
    ],
)
def test_an_answer_that_hedges_is_unreadable(answer: str) -> None:
    reward = reward_function(f"<think> t </think> <answer> {answer} </answer>", ANSWER)
    assert dict(reward.parts) == {"format": 1.0, "answer": -2.0}


INSIDE = "Ann is a knight, Bob is a knave, Cid is a knight"


@pytest.mark.parametrize(
    "response",
    [
        f"<think> t </think> <answer> {INSIDE} </answer> <answer> {INSIDE} </answer>",
        f"<think> t </think> <answer> Ann is a knave </answer> <answer> {INSIDE} </answer>",
        f"<think> <answer> {INSIDE} </answer> </think> <answer> {INSIDE} </answer>",
        f"<think> t <answer> {INSIDE} </answer> </think>",
        f"<answer> {INSIDE} </answer> <think> t </think>",
        f"<think> t </think> <answer> {INSIDE} </answer> or not",
        f"Well: <think> t </think> <answer> {INSIDE} </answer>",
        f"<think> t </think> so <answer> {INSIDE} </answer>",
        f"<think> t </think> <answer> {INSIDE}",
        f"t </think> <answer> {INSIDE} </answer>",
        f"<think> <think> t </think> <answer> {INSIDE} </answer>",
        "",
    ],
)
def test_the_format_is_all_or_nothing(response: str) -> None:
    assert reward_function(response, ANSWER).value == -3.0


@given(st.lists(st.sampled_from([*phrases(), "not", "Zed is a knight", "\n", ","]), max_size=24), st.booleans())
@settings(max_examples=300, deadline=None)
def test_only_a_full_and_single_statement_for_everyone_is_right(words: list[str], framed: bool) -> None:
    text = " ".join(words)
    reward = reward_function(f"<think> t </think> <answer> {text} </answer>" if framed else text, ANSWER)
    if reward.correct:
        stated = [word for word in words if word not in ("\n", ",", ".", "and")]
        assert sorted(stated) == ["Ann is a knight", "Bob is a knave", "Cid is a knight"] or not framed


# --- reasoning -------------------------------------------------------------------------------------------


@given(characters=st.integers(2, 5), seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_reasoning_without_flaws_ends_in_the_right_answer(characters: int, seed: int) -> None:
    puzzle = puzzles(characters, seed)
    answer = dict(zip(COMPACT_NAMES, solutions(puzzle)[0], strict=False))
    assert reward_function(worked_response(puzzle, random.Random(seed), NO_FLAWS), answer).value == 3.0


@pytest.mark.parametrize("flaws", [Flaws(guess=1.0), Flaws(overlook=0.5), Flaws(give_up=0.5), Flaws(reject=0.3)])
def test_each_flaw_costs_answers_and_never_the_format(flaws: Flaws) -> None:
    rng = random.Random(0)
    rewards = []
    for _ in range(200):
        puzzle = random_puzzle(3, rng)
        answer = dict(zip(COMPACT_NAMES, solutions(puzzle)[0], strict=False))
        rewards.append(reward_function(worked_response(puzzle, rng, flaws), answer).value)
    assert set(rewards) == {3.0, -0.5}
    assert rewards.count(3.0) < 160


# --- Logic-RL's files ------------------------------------------------------------------------------------


def write_logic_rl_files(folder: Path, without: str = "") -> dict[str, str]:
    """Small files of the same layout, for sizes 3 and 4. Returns the reference of each puzzle."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rng = random.Random(0)
    references = {}
    for size, (split, count) in product((3, 4), (("train", 9), ("test", 1))):
        rows = []
        for puzzle in [random_puzzle(size, rng) for _ in range(count)]:
            names, solution = list(COMPACT_NAMES[:size]), list(solutions(puzzle)[0])
            rows.append({"quiz": compact_text(puzzle), "names": names, "solution": solution})
            said = zip(names, solution, strict=True)
            references[compact_text(puzzle)] = "\n".join(
                f"({place}) {name} is a {'knight' if knight else 'knave'}"
                for place, (name, knight) in enumerate(said, start=1)
            )
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table.drop_columns([without]) if without else table, folder / f"{size}ppl-{split}.parquet")
    return references


def flipped(reference: str) -> str:
    """The last character turned into the other kind."""
    head, _, kind = reference.rpartition(" ")
    return f"{head} {'knave' if kind == 'knight' else 'knight'}"


def test_problems_of_logic_rls_files(tmp_path: Path) -> None:
    references = write_logic_rl_files(tmp_path)
    task = KnightsAndKnaves(characters=(3, 4), count=20, data=tmp_path)
    assert (len(task.train()), len(task.held_out())) == (18, 2)
    problems = [*task.train(), *task.held_out()]
    assert len({problem.id for problem in problems}) == 20
    for problem in problems:
        reference = references[problem.question]
        assert task.score(problem, f"<think> t </think> <answer> {reference} </answer>").value == 3.0
        assert task.score(problem, f"<think> t </think> <answer> {flipped(reference)} </answer>").value == -0.5


def test_files_that_are_missing_too_short_or_lack_a_column(tmp_path: Path) -> None:
    write_logic_rl_files(tmp_path)
    with pytest.raises(ValueError, match=r"5ppl-train\.parquet"):
        KnightsAndKnaves(characters=(5,), count=10, data=tmp_path).train()
    with pytest.raises(ValueError, match="90 puzzles were requested, but it has 9"):
        KnightsAndKnaves(characters=(3,), count=100, data=tmp_path).train()
    write_logic_rl_files(tmp_path, without="solution")
    with pytest.raises(ValueError, match="no column solution among quiz, names"):
        KnightsAndKnaves(characters=(3,), count=10, data=tmp_path).train()
