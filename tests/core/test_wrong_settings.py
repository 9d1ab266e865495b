"""Settings that a loop of your own passes without a command line: the wrong kind is refused where it is passed."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from sortedrl.core import (
    ConfigurationError,
    Controller,
    Prompt,
    Prompts,
    RejectionWatch,
    Sampling,
    Schedule,
    ScoreAtOnce,
)
from sortedrl.core.checkpoint import saved_cursor
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.step_time import linear
from sortedrl.tasks.scoring import BackgroundScorer
from sortedrl.tasks.task import Reward

NAN, INF = float("nan"), float("inf")
WHOLE = "not a whole number. Set it to an int"
NUMBER = "not a number. Set it to a number "
SWITCH = "not a bool. Set it to True or False"


def prompts(**setting: Any) -> Prompts:
    return Prompts([Prompt("p", [1])], **setting)


def simulated(**setting: Any) -> SimulatedEngine:
    return SimulatedEngine(**{"slots": 1, "step_time": linear(1.0, 0.0), "length_of": len} | setting)


def controller(**setting: Any) -> Controller:
    return Controller(simulated(), prompts(), ScoreAtOnce(len), Schedule(), **setting)


def background(**setting: Any) -> BackgroundScorer:
    return BackgroundScorer(lambda rollout: Reward(1.0, True), **setting)


def watch(**setting: Any) -> RejectionWatch:
    return RejectionWatch(**{"update_size": 8} | setting)


@pytest.mark.parametrize(
    ("made", "name", "values", "said"),
    [
        (prompts, "epochs", (1.5, 2.0, "2", True, None, NAN, INF), WHOLE),
        (prompts, "epochs", (0, -1), "must be at least 1"),
        (prompts, "seed", (1.5, "2", None), WHOLE),
        (prompts, "shuffle", ("False", None, 2), SWITCH),
        (Schedule, "mode", (None, 1, ["partial"]), "not the name of a mode"),
        (Schedule, "rollouts_per_update", (True, None, 128.0, "128"), WHOLE),
        (Schedule, "seed", (1.5, "abc", None), WHOLE),
        (Schedule, "max_prompt_tokens", (1.5,), WHOLE),
        (Schedule, "max_prompt_tokens", (0,), "must be at least 1"),
        (Schedule, "max_turns", (True, INF), WHOLE),
        *((Schedule, name, ("False", None, 1.5), SWITCH) for name in ("whole_groups", "keep_seed", "overlap")),
        (Schedule, "oversubscribe", ("2", True), NUMBER),
        (Schedule, "oversubscribe", (NAN, INF), "Set it to a number of 1 or more"),
        (Schedule, "score_wait_seconds", ("2", None, True), NUMBER),
        (Schedule, "score_wait_seconds", (NAN, -1.0), "Set it to a number of seconds, 0 or more"),
        (Schedule, "max_environment_seconds", (NAN, -1.0, 0), "Set it to a number of seconds above 0"),
        (controller, "max_updates", (1.5, "2", True, NAN), WHOLE),
        (controller, "max_updates", (-1,), "must be at least 0"),
        (Sampling, "temperature", ("1", None, True), NUMBER),
        (Sampling, "temperature", (-0.1, NAN, INF), "Set it to a number of 0 or more"),
        (Sampling, "top_p", (0, 1.1, NAN), "Set it to a number above 0 and up to 1"),
        (Sampling, "stop_strings", ("stop", None), "not a tuple. Pass a tuple"),
        (Sampling, "stop_strings", ((1,), ("",)), "an element is not a string, or empty"),
        (Sampling, "ignore_eos", ("False", None), SWITCH),
        (simulated, "slots", (1.5, 4.0, "4", True, None), WHOLE),
        (simulated, "kv_tokens", (1.5, "9", NAN), WHOLE),
        (simulated, "weight_update_seconds", ("1", None), NUMBER),
        (simulated, "weight_update_seconds", (-1.0, NAN, INF), "Set it to a number of seconds, 0 or more"),
        (simulated, "reuse_kv_cache", ("False",), SWITCH),
        (background, "threads", (2.0, "2", True), WHOLE),
        (background, "threads", (0,), "must be at least 1"),
        (background, "limit_seconds", (0, -1.0, NAN), "Set it to a number above 0"),
        (watch, "update_size", (8.0, None), WHOLE),
        (watch, "max_fraction", (50, -0.1, NAN), "Set it to a number from 0 to 1"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused(
    made: Callable[..., object], name: str, values: tuple[Any, ...], said: str
) -> None:
    """`epochs=1.5` repeated the data forever, and `overlap="False"` was true."""
    for value in values:
        with pytest.raises(ConfigurationError, match=re.escape(f"{name} = {value!r}: ") + ".*" + re.escape(said)):
            made(**{name: value})


def test_prompts_and_sampling_take_numbers_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    state = saved_cursor(prompts(epochs=numpy.int64(2), seed=numpy.int64(3), shuffle=numpy.bool_(True)))
    assert json.loads(json.dumps(state)) == saved_cursor(prompts(epochs=2, seed=3))
    assert Sampling(temperature=numpy.float32(0.5), stop_strings=["x"]) == Sampling(0.5, stop_strings=("x",))  # type: ignore[arg-type]
