"""The engine contract on the simulated engine, with ample memory and with a KV budget that preempts."""

from __future__ import annotations

from multi_token import MultiTokenEngine
from sortedrl.core.engine import Engine
from sortedrl.engines.simulated import SimulatedEngine
from sortedrl.engines.step_time import StepTime
from sortedrl.testing.engine_contract import EngineContract

STEP_TIME = StepTime(((1, 0.001), (8, 0.002)), per_cached_token=1e-6, per_prefill_token=1e-5)


class TestSimulated(EngineContract):
    kv_tokens: int | None = None
    kind: type[SimulatedEngine] = SimulatedEngine

    def make_engine(self, slots: int) -> Engine:
        return self.kind(
            slots=slots,
            step_time=STEP_TIME,
            length_of=lambda request: 20 + request.seed % 13,
            kv_tokens=self.kv_tokens,
        )


class TestSimulatedWithLittleMemory(TestSimulated):
    kv_tokens = 90


class TestSeveralTokensPerStep(TestSimulated):
    kind = MultiTokenEngine


class TestSeveralTokensPerStepWithLittleMemory(TestSimulatedWithLittleMemory):
    kind = MultiTokenEngine
