"""The simulated engine: its times on paper, its tokens, its memory; and the lengths and step times that feed it."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist, mean, median
from typing import Any

import pytest

from scenarios import run
from sortedrl.core import Change, Prompt, Rollout, Segment
from sortedrl.core.engine import (
    Engine,
    Request,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    Tokens,
)
from sortedrl.engines.lengths import LognormalLengths, ReplayedLengths, read_lengths
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.simulated_loop import SimulatedScorer
from sortedrl.engines.step_time import PRESETS, Point, StepTime, fit, linear, read_points


def engine(slots: int = 2, step_time: StepTime | None = None, **knobs: Any) -> SimulatedEngine:
    """A request's seed is its length."""
    step_time = step_time or linear(1.0, 0.0)
    return SimulatedEngine(slots=slots, step_time=step_time, length_of=lambda request: request.seed, **knobs)


def request(id: int, length: int, *, prompt: int = 0, kept: int = 0, max_new_tokens: int = 1000) -> Request:
    segments = (Segment(range(kept), range(-1, -kept - 1, -1), 0),) if kept else ()
    return Request(id, Prompt(str(id), range(prompt)), segments, max_new_tokens, seed=length)


def to_end(engine: Engine) -> list[Change]:
    changes: list[Change] = []
    while new := engine.poll():
        changes += new
    return changes


def ends(changes: list[Change]) -> list[tuple[int, float]]:
    return [(change.id, change.at) for change in changes if isinstance(change, RequestFinished)]


def tokens_of(changes: list[Change], id: int) -> list[int]:
    return [t for change in changes if isinstance(change, Tokens) and change.id == id for t in change.segment.tokens]


# Time


def test_a_freed_slot_takes_the_next_request_in_the_order_of_submission() -> None:
    one = engine(slots=2)
    one.submit([request(0, 5), request(1, 2), request(2, 4), request(3, 1)])
    changes = to_end(one)
    assert ends(changes) == [(1, 2.0), (0, 5.0), (2, 6.0), (3, 6.0)]
    assert [(c.id, c.at) for c in changes if isinstance(c, RequestStarted)] == [(0, 0.0), (1, 0.0), (2, 2.0), (3, 5.0)]


def test_a_step_takes_longer_with_more_running_and_with_longer_contexts() -> None:
    one = engine(slots=2, step_time=linear(1.0, 0.5, per_cached_token=0.01))
    one.submit([request(0, 2, prompt=10), request(1, 3, prompt=20)])
    # Two steps of two requests (contexts 30, then 32), one step of one (context 22).
    assert dict(ends(to_end(one))) == pytest.approx({0: 2 * 2.0 + 0.62, 1: 4.62 + 1.5 + 0.22})


def test_prefill_holds_up_all_that_run() -> None:
    one = engine(slots=2, step_time=linear(1.0, 0.0, per_prefill_token=0.1))
    one.submit([request(0, 2, prompt=10), request(1, 5, prompt=10), request(2, 1, prompt=30)])
    assert ends(to_end(one)) == [(0, 4.0), (2, 4.0 + 3.0 + 1.0), (1, 4.0 + 3.0 + 3.0)]


def test_a_resume_pays_for_prompt_and_cached_tokens() -> None:
    one = engine(step_time=linear(1.0, 0.0, per_prefill_token=0.1))
    one.submit([request(0, 12, prompt=10, kept=10)])
    assert dict(ends(to_end(one))) == pytest.approx({0: 2.0 + 2.0})


def test_with_reused_kv_a_resume_pays_for_nothing_and_a_new_request_for_its_prompt() -> None:
    one = engine(slots=1, step_time=linear(1.0, 0.0, per_prefill_token=0.1), reuse_kv_cache=True)
    one.submit([request(0, 12, prompt=10, kept=10), request(1, 2, prompt=10)])
    assert dict(ends(to_end(one))) == pytest.approx({0: 2.0, 1: 2.0 + 1.0 + 2.0})


def test_the_cost_does_not_depend_on_the_number_of_tokens() -> None:
    began = time.process_time()
    one = engine(slots=8, step_time=PRESETS["h200-8b"], kv_tokens=10**13)
    one.submit([request(id, 10**11 + id, max_new_tokens=10**12) for id in range(64)])
    assert len(ends(to_end(one))) == 64
    assert time.process_time() - began < 1.0


# Requests


def test_the_budget_cuts_and_says_so() -> None:
    one = engine()
    one.submit([request(0, 4, max_new_tokens=5), request(1, 5, max_new_tokens=5), request(2, 6, max_new_tokens=5)])
    assert {c.id: c.truncated for c in to_end(one) if isinstance(c, RequestFinished)} == {0: False, 1: True, 2: True}


def test_a_request_without_budget_is_refused() -> None:
    one = engine()
    one.submit([request(0, 5, max_new_tokens=0)])
    assert one.poll() == [RequestFailed(0, 0.0, "max_new_tokens is 0")]


def test_a_step_that_was_under_way_at_a_stop_is_lost() -> None:
    one = engine()
    one.submit([request(0, 9)])
    one.poll(until=4.9)
    one.abort([0])
    one.submit([request(1, 2)])
    assert dict(ends(to_end(one))) == pytest.approx({1: 6.9})


def test_weights_are_loaded_only_while_nothing_is_in_the_engine() -> None:
    one = engine(weight_update_seconds=2.0)
    one.update_weights(None, 1)
    assert one.now() == 2.0
    one.submit([request(0, 3)])
    with pytest.raises(RuntimeError, match="while requests are in the engine"):
        one.update_weights(None, 2)


def test_a_lost_request_hands_over_what_it_made() -> None:
    one = engine(lost_after=lambda request: 3 if request.id == 1 else None)
    one.submit([request(0, 5), request(1, 9)])
    changes = to_end(one)
    assert tokens_of(changes, 1) == [0, 1, 2]
    failed = [change for change in changes if isinstance(change, RequestFailed)]
    assert failed == [RequestFailed(1, 3.0, "lost by the engine")]


# Memory


def test_the_last_to_start_is_preempted_when_memory_is_full_and_comes_back() -> None:
    one = engine(slots=2, kv_tokens=20)
    one.submit([request(0, 12, prompt=2), request(1, 12, prompt=2)])
    changes = to_end(one)
    assert [c for c in changes if isinstance(c, RequestPreempted)] == [RequestPreempted(1, 8.0, 10)]
    assert [(c.id, c.at) for c in changes if isinstance(c, RequestStarted)] == [(0, 0.0), (1, 0.0), (1, 12.0)]
    assert tokens_of(changes, 1) == list(range(12))
    assert ends(changes) == [(0, 12.0), (1, 16.0)]


def test_a_context_that_can_never_fit_fails_with_the_numbers() -> None:
    one = engine(kv_tokens=20)
    one.submit([request(0, 2, prompt=30), request(1, 2, prompt=3)])
    changes = to_end(one)
    reason = "a context of 30 tokens does not fit into the KV cache of 20 tokens"
    assert [c.reason for c in changes if isinstance(c, RequestFailed)] == [reason]
    assert ends(changes) == [(1, 2.0)]


def test_a_response_that_outgrows_the_memory_alone_fails_with_its_tokens() -> None:
    one = engine(kv_tokens=20)
    one.submit([request(0, 99, prompt=10)])
    changes = to_end(one)
    assert tokens_of(changes, 0) == list(range(10))
    assert isinstance(changes[-1], RequestFailed)


def test_a_run_with_little_memory_trains_on_everything_that_fits() -> None:
    result = run("partial", [8, 3, 12, 5, 9, 2], slots=4, rollouts_per_update=2, prompt_tokens=(2,), kv_tokens=20)
    assert sum(result.sizes) == 6
    assert result.run_metrics.preemptions > 0
    assert result.run_metrics.bubble_parts["kv_limited"] > 0
    assert result.run_metrics.re_prefill_tokens > 0


# Scores in virtual time


def test_scores_come_when_they_are_due_and_wake_the_engine() -> None:
    one = engine()
    scorer = SimulatedScorer(one, seconds_of=lambda rollout: 2.5, reward_of=lambda rollout: 7.0)
    one.submit([request(0, 10)])
    scorer.submit(Rollout(5, Prompt("p", ()), 0, 0, 0, 0))
    assert scorer.collect() == []
    one.poll()
    assert one.now() == 2.5
    assert [(scored.rollout_id, scored.reward) for scored in scorer.collect()] == [(5, 7.0)]
    assert scorer.pending == 0


def test_waiting_for_a_score_ends_at_the_limit() -> None:
    one = engine()
    scorer = SimulatedScorer(one, seconds_of=lambda rollout: math.inf)
    scorer.submit(Rollout(5, Prompt("p", ()), 0, 0, 0, 0))
    scorer.wait(4.0)
    assert one.now() == 4.0
    assert scorer.collect() == []
    assert scorer.pending == 1


# Lengths


def simulated_prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), (), i) for i in range(count)]


def test_lognormal_lengths_have_the_mean_and_the_mass_at_the_limit_of_their_formula() -> None:
    draw = LognormalLengths()
    lengths = [draw(prompt, seed) for seed, prompt in enumerate(simulated_prompts(20_000))]
    log_limit = math.log(8192) - draw.mu
    beyond = 1 - NormalDist().cdf(log_limit)
    assert mean(lengths) == pytest.approx(2100 * NormalDist().cdf(log_limit - 1) + 8192 * beyond, rel=0.02)
    assert sum(length == 8192 for length in lengths) / len(lengths) == pytest.approx(beyond, abs=0.004)
    assert median(lengths) == pytest.approx(2100 * math.exp(-0.5), rel=0.04)
    assert min(lengths) >= 16


def test_a_length_depends_on_the_prompt_and_the_seed_alone() -> None:
    prompt, other = simulated_prompts(2)
    draw = LognormalLengths(seed=3)
    assert draw(prompt, 1) == LognormalLengths(seed=3)(prompt, 1)
    assert draw(prompt, 1) != draw(prompt, 2)
    assert draw(prompt, 1) != draw(other, 1)


def test_a_prompts_own_effect_persists() -> None:
    draw = LognormalLengths(between=2.0, within=0.1, limit=10**9)
    means = [[math.log(draw(prompt, 100 * prompt.payload + i)) for i in range(8)] for prompt in simulated_prompts(50)]
    within = mean(max(logs) - min(logs) for logs in means)
    between = max(map(mean, means)) - min(map(mean, means))
    assert between > 10 * within


def test_replayed_lengths_are_those_of_the_prompt() -> None:
    replayed = ReplayedLengths(((5,), (7, 9)))
    first, second, third = simulated_prompts(3)
    assert {replayed(first, seed) for seed in range(20)} == {5}
    assert {replayed(second, seed) for seed in range(20)} == {7, 9}
    assert replayed(third, 0) == 5


LENGTH_FILES = [
    ("jsonl", '{"lengths": [12]}\n\n{"prompt": "a", "lengths": [3, 4]}\n{"prompt": "a", "length": 5.0}\n', "12 3,4,5"),
    ("jsonl", '12\n{"length": 7}\n9\n', "12,7,9"),  # without a prompt they are everybody's
    ("jsonl", '\ufeff{"prompt_id": 3, "completion_tokens": 12}\n{"prompt_id": 4, "response_length": 5}\n', "12 5"),
    ("json", "[12, 7]", "12,7"),
    ("json", '[\n  {"length": 12},\n  {"length": 7}\n]\n', "12,7"),
    ("json", '[{"lengths": [12, 7]}]', "12,7"),
    ("csv", '\ufeffprompt,step,length\n"a, b",1,12\n\n"a, b",2,3.0\nc,1,7\n', "12,3 7"),
    ("csv", "step, response_length\n1,12\n1,9\n", "12,9"),
    ("csv", "12\n9\n", "12,9"),
    ("csv", "Prompt;Response_Length\na, b;12\nc;7\na, b;3\n", "12,3 7"),
    ("csv", f"length,response\n40000,{'word ' * 40_000}\n9,word\n", "40000,9"),
    ("tsv", "prompt\tlength\na;b\t12\nc\t7\n", "12 7"),
    ("txt", "Length\n12\n7\n", "12,7"),
    ("txt", "id\tcompletion_tokens\n1\t12\n2\t7\n", "12,7"),
]


@pytest.mark.parametrize(("ending", "text", "expected"), LENGTH_FILES, ids=range(len(LENGTH_FILES)))
def test_lengths_are_read_from_many_kinds_of_files(ending: str, text: str, expected: str, tmp_path: Path) -> None:
    """`expected`: prompts between spaces, the lengths of each between commas."""
    path = tmp_path / f"lengths.{ending}"
    path.write_text(text)
    by_prompt = tuple(tuple(map(int, lengths.split(","))) for lengths in expected.split())
    assert read_lengths(path) == ReplayedLengths(by_prompt)


@pytest.mark.parametrize(
    ("ending", "data", "words"),
    [
        ("dat", b"\x93NUMPY\x01\x00", "a NumPy file: write it with numpy.savetxt"),
        ("dat", b"PAR1\x15\x04\xa4", "a Parquet file: examples/lengths_from_logs.py"),
        ("dat", "12\n7\n".encode("utf-16"), "not text in UTF-8"),
        ("json", b"[12, 7, 0]", "entry 3: length 0 is not a number of tokens"),
        ("csv", b"", "no lengths in this file"),
        ("csv", b"prompt,size\na,3\n", r"line 1: no column `length` in \['prompt', 'size'\]"),
        ("csv", b"prompt,length\na,3\nb\n", "line 3: length '' is not a number of tokens"),
        ("csv", b"prompt,length\na,3\nb,long\n", "line 3: length 'long'"),
        ("csv", b"length\nnan\n", "line 2: length nan"),
        ("csv", b"step,completion_length\n1,812.0\n2,803.4\n", r"line 3: length 803\.4 is not a whole number.* means"),
        ("jsonl", b"", "no lengths in this file"),
        ("jsonl", b"12\n{\n", "line 2: not JSON"),
        ("jsonl", b'{"a', r"line 1: not JSON \(Unterminated string starting at column 2\)"),
        ("jsonl", b"12\n-3\n", "line 2: length -3 is not a number of tokens"),
        ("jsonl", b"0\n", "line 1: length 0"),
        ("jsonl", b'"long"\n', "line 1: length 'long'"),
        ("jsonl", b"true\n", "line 1: length True"),
        ("jsonl", b"NaN\n", "line 1: length nan"),
        ("jsonl", b"12.0\n12.5\n", "line 2: length 12.5 is not a whole number of tokens"),
        ("jsonl", b'{"size": 3}\n', r"line 1: no `length` or `lengths` in \['size'\]"),
        ("jsonl", b'{"lengths": []}\n', "line 1: no `length`"),
        ("jsonl", b'7\n{"prompt": "a", "length": 3}\n', "some lengths have a `prompt` and some do not"),
    ],
)
def test_a_file_without_lengths_is_refused_with_its_line(ending: str, data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / f"lengths.{ending}"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=words) as error:
        read_lengths(path)
    assert str(path) in str(error.value)


# Step times


@pytest.mark.parametrize(
    ("preset", "running", "seconds"),
    [
        ("memory-bound", 128, 2.0),
        ("compute-bound", 64, 0.664),
        ("h200-8b", 96, (0.0056 + 0.0068) / 2),
        ("a100-8b", 48, (0.0109 + 0.0112) / 2),
        ("h100-7b", 1024, 0.0120 + 2 * (0.0120 - 0.0092)),
    ],
)
def test_presets_interpolate_between_their_points_and_go_on_beyond(preset: str, running: int, seconds: float) -> None:
    assert PRESETS[preset].at(running) == pytest.approx(seconds)
    assert PRESETS[preset].source


def test_a_fit_finds_the_model_that_made_the_points() -> None:
    true = linear(0.005, 3e-5, 2.5e-8)
    points = [Point(r, c, true.at(r) + 2.5e-8 * c) for r in (1, 16, 64, 128) for c in (0, 10_000, 200_000)]
    fitted = fit(points)
    assert fitted.at(100) == pytest.approx(true.at(100))
    assert fitted.per_cached_token == pytest.approx(2.5e-8)


def test_a_fit_has_no_negative_coefficient() -> None:
    points = [Point(r, c, 0.01 + 1e-5 * r - 1e-9 * c) for r in (1, 32, 64) for c in (0, 1000, 50_000)]
    fitted = fit(points)
    assert fitted.per_cached_token == 0.0
    assert fitted.at(0) >= 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: fit([Point(1, 1, 1)] * 2), "2 measured points, but a fit needs at least 3"),
        (lambda: fit([Point(8, 100, 0.1)] * 5), "do not vary enough"),
        (lambda: StepTime(((1, 0.1),)), "two or more ascending"),
        (lambda: StepTime(((2, 0.1), (1, 0.2))), "two or more ascending"),
        (lambda: linear(-0.1, 0.0), "must not be negative"),
    ],
)
def test_step_times_that_cannot_be_are_refused(make: Callable[[], StepTime], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_measured_points_are_read_from_csv(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("running,cached_tokens,seconds\n1,0,0.005\n64,1000,0.0075\n")
    assert read_points(path) == [Point(1, 0, 0.005), Point(64, 1000, 0.0075)]
    path.write_text("\ufeffSeconds; Running;Cached_Tokens\n0.005;1;0\n")
    assert read_points(path) == [Point(1, 0, 0.005)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("running,seconds\n1,2\n", "no column cached_tokens"),
        ("running,cached_tokens,seconds\n1,0,0.1\nx,0,0.1\n", "line 3"),
        ("running,cached_tokens,seconds\n1,0\n", "line 2"),
        ("running,cached_tokens,seconds\n0,0,0.1\n", "line 2: .* is not a valid measurement"),
        ("", "no column"),
    ],
)
def test_a_broken_file_of_points_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        read_points(path)
    assert str(path) in str(error.value)
