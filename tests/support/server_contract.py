"""What every engine over HTTP must do with a real server: ends, weights, temperature, whole runs, and its death.

A module that tests a server has the fixtures `model` (folder and model), `server`, and `doomed`, another server of the
same model that may be killed.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ledgers import completed, partly_generated
from server_process import ServerProcess
from sortedrl.core import Controller, EngineDied, Prompts, Request, Sampling, Schedule, ScoreAtOnce
from sortedrl.core.engine import Engine
from sortedrl.core.rollout import Prompt, Rollout
from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.engines.pool import Pool
from sortedrl.engines.servers.base import HttpEngine
from sortedrl.testing.engine_contract import PATIENCE_SECONDS, EngineContract, Ledger
from tiny_llama import ON_GPU, PROBES, logprobs_of, parted_after_a_load, shake
from turns_on_engines import gaps_of_turns

SLOTS = 8  # of a server
END = 2  # the model's own end token
ENDLESS = 200  # tokens


def endless(id: int, max_new_tokens: int, **sampling: Any) -> Request:
    return Request(
        id, Prompt(str(id), [3 + id % 40] * 6), (), max_new_tokens, id, Sampling(ignore_eos=True, **sampling)
    )


class OnServer:
    """`engine_type` and `tolerance` (of a log-probability) are the server's."""

    engine_type: type[HttpEngine]
    tolerance = 1e-3

    def engine_at(self, server: ServerProcess, slots: int = 4, eos: Sequence[int] = (), **options: Any) -> HttpEngine:
        return self.engine_type(server.url, slots=slots, eos_token_ids=eos, **{"unavailable_seconds": 5.0, **options})


class ServerContract(OnServer, EngineContract):
    long_limit = ENDLESS

    @pytest.fixture(autouse=True)
    def _server(self, server: ServerProcess, model: tuple[Path, Any]) -> Iterator[None]:
        self._at, self._model = server, model[1]
        self._engines: list[HttpEngine] = []
        yield
        for engine in self._engines:
            engine.close()

    def make_engine(self, slots: int) -> Engine:
        self._engines.append(self.engine_at(self._at, slots, eos=[END]))
        return self._engines[-1]

    def weights(self, version: int) -> Any:
        return self._model.state_dict()

    def reproducible(self, request: Request) -> Request:
        """A server's noise is drawn for the whole batch, or replayed from a resume."""
        return request._replace(sampling=Sampling(temperature=0.0))


class ServerTests(OnServer):
    def test_an_end_token_ends_a_response_and_is_part_of_it(self, server: ServerProcess) -> None:
        reference = completed(self.engine_at(server), [endless(0, 30, temperature=0.0)])
        end = reference.tokens(0)[7]
        ends = endless(0, 30)._replace(sampling=Sampling(temperature=0.0))
        ledger = completed(self.engine_at(server, eos=[end]), [ends])
        assert ledger.finished == {0: False}
        assert ledger.tokens(0) == reference.tokens(0)[: reference.tokens(0).index(end) + 1]

    def test_weights_change_every_weight_and_old_kv_is_dropped(
        self, server: ServerProcess, model: tuple[Path, Any]
    ) -> None:
        """The model has tied embeddings, and the probes repeat: an output layer or a cache that stays is noticed."""
        learner = model[1]
        engine = self.engine_at(server)
        checked = CheckedWeights(engine, logprobs_of(learner), PROBES)
        for version in (1, 2):
            shake(learner, seed=version)
            checked.update_weights(dict(learner.named_parameters()), version)
            assert checked.last_difference < self.tolerance
        assert checked.weight_update_seconds < 30
        engine.close()

    @pytest.mark.parametrize("reuse_kv_cache", [False, True])
    def test_kept_keys_serve_the_responses_that_were_made_with_them_only(
        self, server: ServerProcess, model: tuple[Path, Any], *, reuse_kv_cache: bool
    ) -> None:
        engine = self.engine_at(server, reuse_kv_cache=reuse_kv_cache)
        apart = parted_after_a_load(engine, model[1])
        assert apart > 0.1 if reuse_kv_cache else apart < self.tolerance
        engine.close()

    def test_a_new_version_may_come_without_new_weights(self, server: ServerProcess) -> None:
        engine = self.engine_at(server)
        engine.update_weights(None, 7)
        ledger = completed(engine, [endless(0, 5)])
        assert [segment.version for segment in ledger.segments[0]] == [7] * len(ledger.segments[0])

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_temperature_is_in_the_log_probabilities(
        self, server: ServerProcess, model: tuple[Path, Any], temperature: float
    ) -> None:
        learner = model[1]
        engine = self.engine_at(server)
        engine.update_weights(dict(learner.named_parameters()), 1)
        prompt = [5, 6, 7]
        ledger = completed(engine, [Request(0, Prompt("p", prompt), (), 12, 0, Sampling(temperature=temperature))])
        expected = logprobs_of(learner, temperature)(prompt, ledger.tokens(0))
        assert ledger.logprobs(0) == pytest.approx(expected, abs=10 * self.tolerance)

    @pytest.mark.parametrize("overlap", [False, True])
    def test_a_whole_run_of_the_scheduler(
        self, server: ServerProcess, model: tuple[Path, Any], *, overlap: bool
    ) -> None:
        prompts = [Prompt(f"p{i}", [3 + i % 50, 4, 5]) for i in range(24)]
        schedule = Schedule(
            mode="partial+elevator",
            rollouts_per_update=6,
            prompts_per_cohort=12,
            max_response_tokens=48,
            max_staleness=3,
            overlap=overlap,
        )
        trained: list[int] = []
        scored: list[int] = []
        made_meanwhile = 0

        def score(rollout: Rollout) -> float:
            scored.append(rollout.id)
            return len(rollout)

        def until_one_more_is_scored(before: int) -> None:
            """Responses are left, though on a busy machine all that ran may have ended before the batch."""
            until = time.monotonic() + PATIENCE_SECONDS
            while len(scored) == before and time.monotonic() < until:
                time.sleep(0.01)

        engine = self.engine_at(server, slots=8, eos=[END])
        controller = Controller(engine, Prompts(prompts), ScoreAtOnce(score), schedule)
        for batch in controller:
            trained += [rollout.id for rollout in batch]
            assert all(len(r.tokens) == len(r.logprobs) == len(r.versions) <= 48 for r in batch)
            if overlap and not made_meanwhile:
                before = len(scored)
                controller.carry_on_during(partial(until_one_more_is_scored, before))
                made_meanwhile = len(scored) - before
            controller.publish(model[1].state_dict())
        assert sorted(trained) == list(range(24))
        assert (made_meanwhile > 0) == overlap

    def test_log_probabilities_are_the_learners_after_each_turn(
        self, server: ServerProcess, model: tuple[Path, Any]
    ) -> None:
        engine = self.engine_at(server, slots=3, eos=[2, 3, 4, 5])
        gaps = gaps_of_turns(engine, model[1])  # wrong weights or a wrong context: 1.5 nats or more on average
        assert sum(gaps) / len(gaps) < 5 * self.tolerance
        assert ON_GPU or max(gaps) < 10 * self.tolerance  # bfloat16 alone: 12 nats at some tokens
        engine.close()


class ServerEnds(OnServer):
    """The last tests of a module: they leave both servers useless."""

    def test_a_server_killed_in_mid_rollout_hands_out_what_came_then_is_dead(
        self, doomed: ServerProcess, server: ServerProcess
    ) -> None:
        """In a pool the other server goes on with its requests; alone, the engine says that it died."""
        alone = Ledger(self.engine_at(doomed, slots=2))
        pool = Pool([self.engine_at(doomed, slots=2), self.engine_at(server, slots=2)])
        pooled = partly_generated(pool, [endless(id, ENDLESS) for id in range(8)], tokens=5)
        alone.submit([endless(id, ENDLESS) for id in range(1000)])  # more than it can have done
        while not alone.tokens(1):
            alone.apply(alone.engine.poll())
        doomed.kill()
        pooled.run()
        assert sorted(pooled.finished) == list(range(8)) and not pooled.failed
        assert all(len(pooled.tokens(id)) == ENDLESS for id in range(8))
        with pytest.raises(EngineDied, match="no longer responds"):
            while True:
                alone.apply(alone.engine.poll())
        assert not alone.failed, "no retry is used up"
        assert alone.engine.abort(range(1000)) == []
        with pytest.raises(EngineDied, match=doomed.url):
            alone.engine.submit([endless(5, 3)])
        pool.close()

    def test_weights_that_do_not_load_end_the_engine(self, server: ServerProcess, model: tuple[Path, Any]) -> None:
        """The server stays paused, with some of the new weights."""
        engine = self.engine_at(server)
        wrong = {name: weight[:-1] if weight.ndim == 2 else weight for name, weight in model[1].state_dict().items()}
        with pytest.raises(EngineDied, match=r"weight update to version 1 did not complete .*restart the server"):
            engine.update_weights(wrong, 1)
        with pytest.raises(EngineDied, match="did not complete"):
            engine.submit([endless(0, 3)])
        engine.close()
