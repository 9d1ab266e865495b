"""The learner beside an engine on the same GPU: during the drain, on some of the streaming multiprocessors (SMs).

    engine drains:    decode steps, all SMs     ||  micro-batches in a green context of `sms` SMs
    harvest ended:    idle                          the rest of the update, all SMs

Two plain CUDA streams do not work: each decode kernel waits for the learner's resident GEMMs, and decoding falls to a
twentieth of its speed. A green context leaves SMs free.

Invariants:
- only micro-batches that start while the engine works are limited to `sms` SMs. When the harvest ends, the part in work
  continues on all SMs with its next micro-batch;
- a micro-batch starts after all work queued on the default stream, and the thread waits for its end. So no tensor is
  used, or its memory reused, on two streams at once. The default stream, where the engine decodes, never waits.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.rollout import Rollout
from sortedrl.core.streaming import LearnerThread, is_draining
from sortedrl.learner.learner import Learner

Scope = Callable[[], contextlib.AbstractContextManager[None]]


def some_sms(sms: int, device: torch.device) -> Scope:
    """A scope whose CUDA work runs on `sms` of the device's SMs."""
    if device.type != "cuda":
        raise _refused(sms, f"the learner runs on {device.type}, which has no SMs", "Leave it out, or use a GPU.")
    available = torch.cuda.get_device_properties(device).multi_processor_count
    if sms >= available:
        raise _refused(sms, f"the GPU has {available} SMs, and decoding needs some", "Lower it, for example to 3/4.")
    try:
        from torch.cuda.green_contexts import GreenContext

        context = GreenContext.create(num_sms=sms, device_id=device.index or 0)
        stream: torch.cuda.Stream = context.Stream()  # type: ignore[attr-defined]
    except (ImportError, AttributeError, RuntimeError) as error:
        fix = "It needs PyTorch 2.11 and a driver for CUDA 12.8 or newer; or leave it out."
        raise _refused(sms, f"no green context can be created ({error})", fix) from None

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        assert context is not None  # the stream lives as long as its context
        stream.wait_stream(torch.cuda.default_stream(device))
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()

    return scope


def _refused(sms: int, why: str, fix: str) -> ConfigurationError:
    return ConfigurationError("stream_sms", sms, why, fix)


class SharedGpuLearner(LearnerThread):
    """A streamed learner that enters `scope` for each micro-batch that it starts while the engine works."""

    def __init__(self, learner: Learner, scope: Scope) -> None:
        super().__init__(self._accumulate)
        self._learner = learner
        self._scope = scope
        self._engine_works = False
        learner.micro_batch_scope = lambda: self._scope() if self._engine_works else contextlib.nullcontext()

    def takes_part(self, running: int, slots: int) -> bool:
        return super().takes_part(running, slots) and is_draining(running, slots)

    def start(self, rollouts: Sequence[Rollout], version: int) -> None:
        self._engine_works = True
        super().start(rollouts, version)

    def wait(self) -> None:
        self._engine_works = False
        super().wait()

    def _accumulate(self, rollouts: Sequence[Rollout], version: int) -> None:
        try:
            self._learner.accumulate(rollouts, version)
        finally:
            self._engine_works = False
