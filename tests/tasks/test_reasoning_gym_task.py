import pickle
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("reasoning_gym") is None:  # its import takes seconds, which only the worker that runs these tests needs
    pytest.skip("reasoning-gym is not installed: pip install '.[puzzles]'", allow_module_level=True)

from sortedrl.tasks.reasoning_gym import ReasoningGym, extract_answer, roles


@pytest.fixture(scope="module")
def factors() -> ReasoningGym:
    """Shared: a task that scores starts two processes, which import the whole library."""
    return ReasoningGym("prime_factorization", count=20, held_out_count=5)


@pytest.fixture(scope="module")
def countdown() -> ReasoningGym:
    """The library evaluates an answer to this puzzle as Python."""
    return ReasoningGym("countdown", count=2, held_out_count=1, limit_seconds=2.0)


def test_the_reference_scores_one_in_tags_and_on_the_last_line(factors: ReasoningGym) -> None:
    task = factors
    for problem in [*task.train(), *task.held_out()]:
        reference = problem.answer["answer"]
        tagged = task.score(problem, f"<think>7?</think> <answer>0</answer>, no: <answer> {reference}\n</answer>")
        assert tagged.correct and tagged.value == 1.0 and tagged.parts["tagged"] == 1.0
        plain = task.score(problem, f"Let me count.\n{reference}\n")
        assert plain.correct and plain.parts["tagged"] == 0.0
        assert not task.score(problem, f"<answer>{reference} × 2</answer>").correct
        assert task.score(problem, "").value <= 0.01  # what the library gives for any text


def test_problems_are_split_by_seed_and_do_not_overlap() -> None:
    task = ReasoningGym("leg_counting", count=50, held_out_count=20, seed=3)
    train, held_out = {p.question for p in task.train()}, {p.question for p in task.held_out()}
    assert not train & held_out and len(held_out) == 20
    again = ReasoningGym("leg_counting", count=50, held_out_count=20, seed=3)
    assert [p.question for p in again.train()] == [p.question for p in task.train()]
    more = ReasoningGym("leg_counting", count=80, held_out_count=20, seed=3)
    assert {p.question for p in more.held_out()} == held_out
    other = ReasoningGym("leg_counting", count=50, held_out_count=20, seed=4)
    assert {p.question for p in other.held_out()} != held_out


def test_a_generator_that_repeats_itself_leaves_no_held_out_puzzle_in_training() -> None:
    task = ReasoningGym("coin_flip", count=300, held_out_count=100, min_trials=1, max_trials=2)
    train, held_out = [p.question for p in task.train()], {p.question for p in task.held_out()}
    assert not set(train) & held_out
    assert len(train) == len(set(train))


def test_knights_and_knaves_are_compared_exactly() -> None:
    task = ReasoningGym("knights_knaves", count=5, held_out_count=2, n_people=3)
    problem = task.train()[0]
    reference = problem.answer["answer"]
    assert task.score(problem, f"<answer>{reference}</answer>").correct
    assert task.score(problem, f"<answer>So: {reference.upper()}!</answer>").correct
    pairs = sorted(roles(reference))
    terms = problem.answer["metadata"]["knight_knave_terms"]
    swap = {terms["knight"].lower(): terms["knave"], terms["knave"].lower(): terms["knight"]}
    for wrong_at in range(3):
        said = [(name, swap[role] if at == wrong_at else role) for at, (name, role) in enumerate(pairs)]
        wrong = ", ".join(f"{name} is a {role}" for name, role in said)
        assert task.score(problem, f"<answer>{wrong}</answer>").value == 0.0
    both = f"{reference}, and {pairs[0][0]} is a {swap[pairs[0][1]]}"
    assert task.score(problem, f"<answer>{both}</answer>").value == 0.0


def test_an_answer_that_the_scorer_cannot_read_is_wrong(factors: ReasoningGym) -> None:
    reward = factors.score(factors.train()[0], "<answer>no number</answer>")
    assert reward.value == 0.0 and reward.parts["unreadable"] == 1.0


def test_an_answer_that_takes_hours_to_evaluate_is_wrong_within_its_time_limit(countdown: ReasoningGym) -> None:
    """In this process, 9**9**9 would block the run."""
    problem = countdown.train()[0]
    began = time.monotonic()
    reward = countdown.score(problem, "<answer>9**9**9</answer>")
    assert time.monotonic() - began < 120
    assert reward.value == 0.0 and reward.parts["timed_out"] == 1.0
    right = countdown.score(problem, f"<answer>{problem.answer['metadata']['expression']}</answer>")
    assert right.correct and right.parts["timed_out"] == 0.0


def test_an_answer_that_is_code_does_not_run_in_the_process_of_the_run(tmp_path: Path, countdown: ReasoningGym) -> None:
    pid = tmp_path / "pid"
    code = f'__import__("os").system("echo $PPID > {pid}")'
    countdown.score(countdown.train()[0], f"<answer>{code}</answer>")
    assert int(pid.read_text()) in countdown._library_score.process_ids()


def test_a_copy_for_a_worker_process_scores_alike() -> None:
    """`string_manipulation` keeps functions that cannot be pickled."""
    task = ReasoningGym("string_manipulation", count=2, held_out_count=1)
    problem = task.train()[0]
    copy = pickle.loads(pickle.dumps(task))
    assert copy.score(problem, f"<answer>{problem.answer['answer']}</answer>").correct


def test_unknown_datasets_and_options_are_named() -> None:
    with pytest.raises(ValueError, match=r"no dataset 'leg_counter'; similar names: leg_counting"):
        ReasoningGym("leg_counter")
    with pytest.raises(ValueError, match=r"does not accept the options .*legs"):
        ReasoningGym("leg_counting", legs=4)


def test_the_answer_is_in_the_last_tags_or_on_the_last_line() -> None:
    assert extract_answer("<answer>1</answer> <answer>2\n3</answer> bye") == ("2\n3", True)
    assert extract_answer("first\nlast \n\n") == ("last", False)
    assert extract_answer("") == ("", False)
    assert extract_answer("<answer>a <answer>b</answer> <answer>c") == ("a <answer>b", True)


@pytest.mark.parametrize("part", ["<answer>", "</answer>", "a", "1", "a is a ", "is a", "\n", " "])
def test_a_response_that_repeats_itself_is_read_in_one_pass(part: str) -> None:
    """A quadratic scan of a million characters would take hours; this one takes milliseconds."""
    response = part * (1_000_000 // len(part))
    began = time.process_time()
    extract_answer(response)
    roles(response)
    assert time.process_time() - began < 20
