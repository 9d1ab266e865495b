"""The learner beside an engine on the same GPU: when it works, and on which part of the GPU. No GPU is needed here."""

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch
from test_streamed_updates import batch_of, learner_with

from as_batch import as_batch
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.streaming import MOST_RUNNING_BESIDE_LEARNER, is_draining
from sortedrl.learner.shared_gpu import SharedGpuLearner, some_sms

TINY_PARTS = {"algorithm": "grpo", "tokens_per_micro_batch": 40}


class NotedScope:
    """Counts the micro-batches inside it. The second one waits until the engine has stopped."""

    def __init__(self) -> None:
        self.entered = 0
        self.in_second = threading.Event()
        self.engine_stopped = threading.Event()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.entered += 1
        if self.entered == 2:
            self.in_second.set()
            assert self.engine_stopped.wait(30)
        yield


def test_it_starts_only_while_the_engine_drains() -> None:
    learner = SharedGpuLearner(learner_with(**TINY_PARTS), contextlib.nullcontext)
    assert not learner.takes_part(128, 128) and not learner.takes_part(16, 16)
    assert learner.takes_part(15, 16) and learner.takes_part(MOST_RUNNING_BESIDE_LEARNER, 128)
    assert not learner.takes_part(MOST_RUNNING_BESIDE_LEARNER + 1, 128) and is_draining(0, 1)


def test_micro_batches_leave_the_scope_when_the_harvest_ends() -> None:
    """Those that start before it ends are inside; those of the same part after it, and of the step, are not."""
    learner, scope, batch = learner_with(**TINY_PARTS), NotedScope(), batch_of(0)
    streamed = SharedGpuLearner(learner, scope)
    streamed.start(batch[:9], 0)
    assert scope.in_second.wait(30) and streamed.is_working and not streamed.takes_part(1, 16)
    threading.Timer(0.05, scope.engine_stopped.set).start()
    streamed.wait()
    streamed.result()
    metrics = learner.step(as_batch(batch, 0))
    assert scope.entered == 2 and metrics["micro_batches"] > 4
    assert metrics["streamed_fraction"] == 9 / 12


def test_a_part_that_ended_during_the_harvest_does_not_limit_the_step() -> None:
    learner, scope, batch = learner_with(**TINY_PARTS), NotedScope(), batch_of(0)
    scope.engine_stopped.set()
    streamed = SharedGpuLearner(learner, scope)
    streamed.start(batch[:6], 0)
    while streamed.is_working:
        pass
    inside = scope.entered
    assert inside > 0
    learner.step(as_batch(batch, 0))
    assert scope.entered == inside


def test_a_failed_part_leaves_the_scope_too() -> None:
    learner, batch = learner_with(**TINY_PARTS), batch_of(0)

    @contextlib.contextmanager
    def out_of_memory() -> Iterator[None]:
        raise RuntimeError("out of memory")
        yield

    streamed = SharedGpuLearner(learner, out_of_memory)
    streamed.start(batch[:6], 0)
    while streamed.is_working:
        pass
    with pytest.raises(RuntimeError, match="out of memory"):
        streamed.result()
    assert learner.step(as_batch(batch, 0))["streamed_fraction"] == 0


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"stream_sms = 96: the learner runs on cpu"):
        some_sms(96, torch.device("cpu"))
