import json
import os
import pickle
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("math_verify")

from hostile_answers import BOMBS, HOSTILE, LATE_BOMBS
from sortedrl.log.paused_gc import paused_gc
from sortedrl.tasks.math import Math, last_boxed, normalized
from sortedrl.tasks.math_limits import is_affordable
from sortedrl.tasks.task import Problem, Reward

ROWS: Mapping[str, Sequence[Mapping[str, Any]]] = {  # one file for each shape of row that public datasets have
    "worked": [
        {"question": "3 + 4?", "answer": "3 + 4 = <<3+4=7>>7.\n#### 7"},
        {"question": "A thousand cars at 1.2?", "answer": "1000 * 1.2\n#### 1,200"},
    ],
    "plain": [
        {"problem": "The point?", "solution": "long", "answer": r"\left( 2, \frac{\pi}{3} \right)"},
        {"problem": "The direction?", "solution": "long", "answer": r"\text{west}"},
        {"problem": "The matrix?", "solution": "long", "answer": r"\begin{pmatrix} -1 & 0 \\ 2 & 1/3 \end{pmatrix}"},
    ],
    "solved": [
        {"problem": "How heavy?", "solution": r"so it is \boxed{6.02e23} atoms", "type": "physics"},
        {"problem": "Which law?", "solution": r"so \[ \boxed{\frac{k}{r^{2}}+C_{1} e^{-t}} \]", "type": "physics"},
    ],
    "listed": [
        {"question": "All pairs?", "final_answer": ["$(1,8),(3,4)$"], "unit": None},
        {"question": "All roots?", "final_answer": ["$7$,$-5$"], "unit": None},
    ],
    "numeric": [{"problem": "How far?", "answer": 27.0}, {"problem": "How old?", "answer": "033"}],
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Math:
    rows = write(tmp_path_factory.mktemp("math"), ROWS["plain"])
    return Math(held_out_data=rows, limit_seconds=60.0)  # a busy machine is no reason for a wrong conclusion


def write(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def judged(task: Math, reference: str, answer: str) -> Reward:
    return task.score(Problem("p", "?", reference), rf"Thinking \boxed{{0}} ... so \boxed{{{answer}}}, I think.")


EQUAL = [
    ("2,125", "2125"),
    ("025", "25"),
    ("27.0", "27"),
    (r"\frac{14}{3}", "14/3"),
    (r"1\frac{4}{5}", "1.8"),
    ("0.5", r"\frac12"),
    ("6.02e23", r"6.02 \times 10^{23}"),
    ("1e-8", "0.00000001"),
    ("1e-8", "10^{-8}"),
    ("-1./3", r"-\frac{1}{3}"),
    (".0000672", r"\frac{42}{625000}"),
    (r"90^\circ", "90"),
    (r"\$32,\!348", "32348"),
    (r"864 \mbox{ inches}^2", "864"),
    ("864", "864 square inches"),
    ("62.5%", r"62.5\%"),
    ("62.5%", "62.5"),
    ("4210_{5}", "4210"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", "C"),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    ("$69$,$84$", r"84 \text{ and } 69"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("p - q", "-q + p"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    (r"\frac{1}{m} t", r"\frac{t}{m}"),
    (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\frac{E_1 + 2E_2}{3}"),
    (r"3\sqrt{13}", "10.81665"),
    (r"\sqrt{2}\sqrt{2} - 2", "0"),
    ("np.arcsin(10/13)", r"\arcsin\frac{10}{13}"),
]
DIFFERENT = [
    ("1e-8", "0"),
    ("5.3e-9", "1.24e-8"),
    ("2.88e-19", r"2.88 \times 11^{-19}"),
    (".0000672", r"\frac{67}{1000000}"),
    ("18", "18.0001"),
    (r"\frac{448}{15625}", r"\frac{448}{15626}"),
    ("$69$,$84$", "84"),
    ("16,3,1,1", "16,3,1"),
    ("52_8", "52_9"),
    (r"\text{Evelyn}", r"\text{Navin}"),
    (r"\text{(C)}", "D"),
    ("(3,4]", "[3,4]"),
    ("6m", "6"),  # a variable, not metres
    (r"\frac{1}{m} t", r"\frac{1}{m}"),
    (r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}", r"\begin{pmatrix} -1 & 1 \\ 0 & -1 \end{pmatrix}"),
    (r"\frac{d x}{d t}=k x-a", r"-\frac{d x}{d t}=k x-a"),
    (r"3\sqrt{13}", "10.81"),
    (r"\gamma^{2}-1", r"\gamma^{2}-2"),
    (r"\frac{1}{3} E_{1}+\frac{2}{3} E_{2}", r"\frac{1}{4} E_{1}+\frac{2}{3} E_{2}"),
    ("$N=n$", "n+1"),
    ("3", ""),
    ("3", "three"),
]


@pytest.mark.parametrize(("reference", "answer"), EQUAL)
def test_answers_that_mean_the_same_are_right(task: Math, reference: str, answer: str) -> None:
    assert judged(task, reference, answer).correct


@pytest.mark.parametrize(("reference", "answer"), DIFFERENT)
def test_answers_that_mean_something_else_are_wrong(task: Math, reference: str, answer: str) -> None:
    reward = judged(task, reference, answer)
    assert not reward.correct and reward.value == 0.0 and not reward.parts["timed_out"]


@pytest.mark.parametrize(("reference", "answer", "is_right"), HOSTILE)
def test_hostile_answers_get_no_more_than_they_deserve(task: Math, reference: str, answer: str, is_right: bool) -> None:
    reward = judged(task, reference, answer)
    assert reward.correct == is_right and not reward.parts["timed_out"]


@pytest.mark.parametrize("reference", ["5", r"\sqrt{2}x", "(x,2)", r"\frac{100!}{2^{50}}"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_wrong_without_the_parser(task: Math, bomb: str, reference: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(task, "_verify", None)
    with paused_gc():  # it takes 0.1 s once the process has many objects
        before = time.thread_time()
        assert not judged(task, reference, BOMBS[bomb]).correct
        assert time.thread_time() - before < 0.1  # 5 ms


@pytest.mark.parametrize("bomb", LATE_BOMBS)
def test_bombs_that_reach_the_parser_are_wrong_in_time(bomb: str, tmp_path: Path) -> None:
    task = Math(held_out_data=write(tmp_path, ROWS["plain"]), limit_seconds=2.0)
    assert not judged(task, r"\sqrt{2}x", LATE_BOMBS[bomb]).correct


def test_a_complex_reference_allows_answers_as_complex_as_itself() -> None:
    tower = r"9^{9^{x}} + \sum_{k=1}^{9} k!"
    assert not is_affordable("1", tower)
    assert is_affordable(tower, tower.replace("x", "y"))


@pytest.mark.parametrize("shape", ROWS)
def test_every_reference_scores_one_and_wrong_answers_zero(task: Math, shape: str, tmp_path: Path) -> None:
    problems = Math(held_out_data=write(tmp_path, ROWS[shape])).held_out()
    assert len(problems) == len(ROWS[shape])
    for problem in problems:
        assert judged(task, problem.answer, problem.answer) == Reward(1.0, True, {"boxed": 1.0, "timed_out": 0.0})
        for wrong in wrong_answers(problem.answer, problems):
            assert not judged(task, problem.answer, wrong).correct, (problem.answer, wrong)


def wrong_answers(answer: str, problems: Sequence[Problem]) -> Iterator[str]:
    """Another problem's answer; each number of this one plus one; one element of a list left out."""
    references = [problem.answer for problem in problems]
    other = references[(references.index(answer) + 1) % len(references)]
    if normalized(other) != normalized(answer):
        yield other
    text = normalized(answer)
    for number in re.finditer(r"(?<![_\d.])(?<!_\{)\d+", text):
        yield text[: number.start()] + str(int(number.group()) + 1) + text[number.end() :]
    if last := re.search(r",(?=[^()\[\]{}]*$)|,(?=\([^()]*\)$)", text):
        yield text[: last.start()]


def test_a_response_without_a_box_scores_zero(task: Math) -> None:
    problem = Problem("p", "?", "7")
    assert task.score(problem, "It is 7.") == Reward(0.0, False, {"boxed": 0.0})
    assert task.score(problem, r"cut off: \boxed{7").parts["boxed"] == 0.0


def test_the_last_complete_box_counts() -> None:
    assert last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}} and \boxed{3") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{1} } { \boxed{\boxed{2}} {") == "2"
    assert last_boxed("none") is None


def test_degenerate_responses_cost_no_time(task: Math) -> None:
    before = time.monotonic()
    for loop in (r"\boxed{", "1 a", r"\, ", "9", "{", " and"):
        assert not task.score(Problem("p", "?", "7"), loop * 20_000).correct
        assert not judged(task, "7", loop.strip("{") * 20_000).correct
    assert time.monotonic() - before < 60


def test_an_answer_on_which_sympy_hangs_is_wrong_in_time_and_in_any_thread(tmp_path: Path) -> None:
    task = Math(held_out_data=write(tmp_path, ROWS["plain"]), limit_seconds=3.0)
    judged(task, r"\sqrt{2}", r"\frac{2}{\sqrt{2}}")  # its worker has started
    tower = r"9^{9^{9^{9}}}"  # as a reference, so that it gets past the limits
    pairs = [(tower, tower + "-1"), *((r"\sqrt{2}", one) for one in (r"\frac{2}{\sqrt{2}}", r"\sqrt{3}", r"2^{1/2}"))]
    before = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        rewards = list(threads.map(lambda pair: judged(task, *pair), pairs))
    assert time.monotonic() - before < 300
    assert [reward.correct for reward in rewards] == [False, True, False, True]
    assert [reward.parts["timed_out"] for reward in rewards] == [1.0, 0.0, 0.0, 0.0]


def test_dapo_rows_lose_their_instructions_and_their_duplicates(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    wrapped = (
        "Solve the following math problem step by step. The last line should be ...\n\n{}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    )
    rows = [
        {
            "prompt": [{"content": wrapped.format(f"What is\n\n{n} + 1?"), "role": "user"}],
            "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
        }
        for n in [1, 2, 3, 1, 2, 3]
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dapo.parquet")
    task = Math("dapo", data=tmp_path / "dapo.parquet", held_out_fraction=0.34)
    problems = {problem.question: problem.answer for problem in [*task.train(), *task.held_out()]}
    assert problems == {f"What is\n\n{n} + 1?": str(n + 1) for n in (1, 2, 3)}
    assert r"\boxed" in task.train()[0].system


def test_a_folder_is_read_through_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path, ROWS["worked"], "train.jsonl")
    task = Math(data=tmp_path, held_out_fraction=0.5)
    assert {problem.answer for problem in [*task.train(), *task.held_out()]} == {"7", "1,200"}


def test_held_out_problems_are_never_trained_on(tmp_path: Path) -> None:
    rows = [{"problem": f"{n}?", "answer": n} for n in range(100)]
    data, other = write(tmp_path, rows), write(tmp_path, rows[90:], "other.jsonl")
    shared = Math(data=data, seed=1)
    assert len(shared.held_out()) == 10 and len(shared.train()) == 90
    assert not {p.question for p in shared.held_out()} & {p.question for p in shared.train()}
    assert shared.held_out() == Math(data=data, seed=1).held_out() != Math(data=data, seed=2).held_out()
    overlapping = Math(data=data, held_out_data=other)
    assert len(overlapping.train()) == 90 and len(overlapping.held_out()) == 10


def test_bad_input_is_named(tmp_path: Path) -> None:
    data = write(tmp_path, [{"ask": "1?", "reply": "1"}, {"ask": "2?", "reply": "2"}])
    with pytest.raises(ValueError, match=r"no question column 'problem' or 'question'; its columns are 'ask', 'reply'"):
        Math(data=data).train()
    assert len(Math(data=data, question_column="ask", answer_column="reply").train()) == 1
    with pytest.raises(ValueError, match=r"no answer column 'result'"):
        Math(data=data, question_column="ask", answer_column="result").train()
    with pytest.raises(ValueError, match=r"no such file: .*other.jsonl; .* has rows.jsonl"):
        Math(data=tmp_path / "other.jsonl").train()
    (tmp_path / "broken.jsonl").write_text('{"problem": "1?", "answer": "1"}\nnot json\n')
    with pytest.raises(ValueError, match=r"broken.jsonl, line 2 is not JSON"):
        Math(data=tmp_path / "broken.jsonl").train()
    (tmp_path / "broken.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"broken.jsonl, line 1 is not JSON"):
        Math(data=tmp_path / "broken.jsonl").train()
    with pytest.raises(
        ValueError,
        match=r"aime24 is for evaluation only: pass .* as held_out_data \(--task-options held_out_data .*rows.jsonl\)",
    ):
        Math("aime24", data=data)
    with pytest.raises(ValueError, match="no preset 'gsm' for math; use one of dapo, gsm8k"):
        Math("gsm")
    with pytest.raises(ValueError, match="math needs problems"):
        Math()


FILES = {
    "gsm8k.jsonl": 1319,
    "math500.jsonl": 500,
    "minerva_math.jsonl": 272,
    "olympiadbench.jsonl": 675,
    "aime24.jsonl": 30,
    "amc23.jsonl": 40,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_row_of_the_real_files_scores_one_against_itself_and_zero_if_wrong(name: str) -> None:
    folder = os.environ.get("SORTEDRL_DATA")
    if not folder:
        pytest.skip("SORTEDRL_DATA is not set: it names the folder with math/gsm8k.jsonl and the other files")
    task = Math(held_out_data=Path(folder) / "math" / name)
    problems = task.held_out()
    assert len(problems) == FILES[name]

    def mistakes(problem: Problem) -> list[tuple[str, str]]:
        wrong = list(wrong_answers(problem.answer, problems))
        found = [(problem.answer, answer) for answer in wrong if judged(task, problem.answer, answer).correct]
        right = judged(task, problem.answer, problem.answer).correct
        checked.append(1 + len(wrong))
        return found if right else [*found, (problem.answer, "itself")]

    checked: list[int] = []
    with ThreadPoolExecutor(2) as threads:
        found = [mistake for mistakes_of_one in threads.map(mistakes, problems) for mistake in mistakes_of_one]
    print(f"{name}: {len(problems)} references, {sum(checked)} checks, mistakes: {found}")
    assert found == []


def test_a_task_that_travelled_to_a_worker_process_scores_there(task: Math) -> None:
    """Without its problems and its own worker processes, which start again where algebra is needed."""
    assert task.held_out()
    sent = pickle.dumps(task)
    assert len(sent) < 2_000
    travelled: Math = pickle.loads(sent)
    assert travelled.score(Problem("p", "?", "x + 1"), r"\boxed{1 + x}").correct
    assert not travelled.score(Problem("p", "?", "x + 1"), r"\boxed{2 + x}").correct
