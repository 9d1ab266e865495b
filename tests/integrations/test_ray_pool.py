"""Engines as Ray actors, on a real Ray cluster of two nodes on this machine."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

import ray
from ray.cluster_utils import Cluster

from own_ray import own_cluster
from paced import PacedEngine
from sortedrl.core import (
    Controller,
    EngineDied,
    Event,
    EventLog,
    Prompt,
    Prompts,
    Request,
    Schedule,
    ScoreAtOnce,
    events,
)
from sortedrl.core.engine import Engine, EngineBase, EngineInfo
from sortedrl.integrations.ray import RayEngine, RayPool
from sortedrl.observe.metrics import Metrics
from sortedrl.testing.engine_contract import EngineContract

pytestmark = pytest.mark.slow
ENGINES, SLOTS = 4, 4
_engines: list[RayEngine] = []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    own_cluster()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    folders = ("src", "tests/support", "tests/integrations")
    paths = os.pathsep.join(str(Path(__file__).parents[2] / folder) for folder in folders)
    environment = {"env_vars": {"PYTHONPATH": paths}}  # engines are made from functions of this module
    ray.init(address=made.address, logging_level="error", log_to_driver=False, runtime_env=environment)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[list[Any]]:
    """Two nodes with room for two engines each."""
    made = [cluster.add_node(num_cpus=2, resources={"rollouts": 2}) for _ in range(2)]
    cluster.wait_for_nodes()
    yield made
    for node in made:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


@pytest.fixture(scope="module")
def one_node(cluster: Cluster) -> Iterator[None]:
    node = cluster.add_node(num_cpus=8)
    cluster.wait_for_nodes()
    yield
    cluster.remove_node(node)


def length_of(request: Request) -> int:
    return 20 + request.seed % 13


def make_slow_engine() -> Engine:
    """Responses of 2 to 3 s: a node takes a while to be killed."""
    return PacedEngine(slots=SLOTS, length_of=lambda request: 200 + request.seed % 100, step_seconds=0.01)


def make_engine() -> Engine:
    return PacedEngine(slots=SLOTS, length_of=length_of, step_seconds=0.002)


class TestRayEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _node(self, one_node: None) -> Iterator[None]:
        yield
        while _engines:
            _engines.pop().close()

    def make_engine(self, slots: int) -> Engine:
        assert slots == SLOTS
        _engines.append(RayEngine(make_engine, num_cpus=1))
        return _engines[-1]


def test_what_the_engine_raises_is_raised_here(one_node: None) -> None:
    engine = RayEngine(lambda: PacedEngine(slots=2, cannot_load=7), num_cpus=1)
    with pytest.raises(ValueError, match="version 7 is beyond me"):
        engine.update_weights(None, 7)
    dying = RayEngine(lambda: PacedEngine(slots=2, dies_at_call=1), num_cpus=1)
    dying.submit([Request(0, Prompt("p", [1]), (), 5, 0)])
    with pytest.raises(EngineDied, match="killed by the test"):
        dying.poll()
    engine.close()
    dying.close()


class BusyWhile(PacedEngine, EngineBase):
    """Refuses work while the file exists, as a server that is overloaded does; it sleeps by writing another."""

    def __init__(self, file: Path) -> None:
        PacedEngine.__init__(self, slots=2, length_of=length_of, step_seconds=0.002)
        self._file = file

    @property
    def is_available(self) -> bool:
        return not self._file.exists()

    def info(self) -> EngineInfo:
        return EngineInfo(kv_tokens=1234, vocabulary=99)

    def sleep(self) -> None:
        self._file.with_suffix(".asleep").touch()

    def sleep_until_update(self) -> None:
        self._file.with_suffix(".deep").touch()


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60.0
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def test_what_an_engine_offers_beyond_the_protocol_is_passed_on(one_node: None, tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    engine = RayEngine(lambda: BusyWhile(busy), num_cpus=1)
    assert engine.info() == EngineInfo(kv_tokens=1234, vocabulary=99)
    assert engine.is_available
    busy.touch()
    engine.submit([Request(0, Prompt("p", [1]), (), 5, 0)])
    engine.poll()
    assert not engine.is_available, "the last reply said so"
    engine.abort([0])
    busy.unlink()
    assert eventually(lambda: engine.is_available), "without a request inside, nothing else would ask"
    engine.sleep()
    assert (tmp_path / "busy.asleep").exists()
    engine.sleep_until_update()
    assert (tmp_path / "busy.deep").exists()
    engine.close()


def _no_engine() -> Engine:
    raise ValueError("no such model: qwen")


def test_an_engine_that_cannot_be_created_is_an_error_with_the_cause(one_node: None) -> None:
    with pytest.raises(EngineDied, match="could not be created in its actor: ValueError: no such model: qwen") as error:
        RayEngine(_no_engine)
    assert "\n" not in str(error.value)


def wait_until_they_end(pids: list[int]) -> None:
    """Processes of actors on this machine."""
    deadline = time.monotonic() + 60.0
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"{len(left)} of {len(pids)} actors are left"
        time.sleep(0.1)


def started_in(folder: Path) -> list[int]:
    """The actors that created an engine; each leaves a file."""
    return [int(file.name) for file in folder.iterdir()]


def test_a_pool_that_cannot_start_leaves_no_actor_behind(one_node: None, tmp_path: Path) -> None:
    def one_fails() -> Engine:
        (tmp_path / str(os.getpid())).touch()
        while len(started_in(tmp_path)) < 3:  # they start at the same time
            time.sleep(0.05)
        if os.getpid() == max(started_in(tmp_path)):
            raise ValueError("no GPU left")
        return make_engine()

    with pytest.raises(EngineDied, match="no GPU left") as error:
        RayPool(one_fails, engines=3, num_cpus=1)
    wait_until_they_end(started_in(tmp_path))
    assert error.tb, "held until here, as in a notebook: nothing that it refers to is collected"


def test_an_engine_that_does_not_fit_the_pool_leaves_no_actor_behind(one_node: None, tmp_path: Path) -> None:
    def smaller_later() -> Engine:
        is_first = not started_in(tmp_path)
        (tmp_path / str(os.getpid())).touch()
        return PacedEngine(slots=SLOTS if is_first else 1, dies_at_call=1)

    pool = RayPool(smaller_later, engines=1, num_cpus=1)
    (first,) = started_in(tmp_path)
    pool.submit([Request(0, Prompt("p", [1]), (), 5, 0)])
    with pytest.raises(EngineDied):
        pool.poll()
    with pytest.raises(ValueError, match="has 1 slot,") as error:
        pool.revive()
    wait_until_they_end([pid for pid in started_in(tmp_path) if pid != first])
    assert error.tb, "held until here"
    pool.close()


def test_a_node_is_lost_in_mid_run_and_no_rollout_is(cluster: Cluster, nodes: list[Any]) -> None:
    """Two nodes, four engines; one node is killed, later another comes and its engines are revived."""
    pool = RayPool(make_slow_engine, engines=ENGINES, resources={"rollouts": 1})
    assert pool.slots == ENGINES * SLOTS
    prompts = [Prompt(f"p{i}", [1, 2]) for i in range(96)]
    schedule = Schedule(mode="partial+elevator", rollouts_per_update=12, prompts_per_cohort=48, max_response_tokens=400)
    metrics = Metrics()
    trained: list[int] = []
    starts = 0

    def kill_a_node(event: Event) -> None:
        nonlocal starts
        starts += isinstance(event, events.Started)
        if starts == 40 and nodes[0] in cluster.worker_nodes:
            cluster.remove_node(nodes[0], allow_graceful=False)

    log = EventLog(metrics, kill_a_node)
    controller = Controller(pool, Prompts(prompts), ScoreAtOnce(len), schedule, log=log)
    for batch in controller:
        trained += [rollout.id for rollout in batch]
        for rollout in batch:
            assert rollout.tokens == list(range(len(rollout))), "neither lost nor twice"
            assert rollout.logprobs == [-position - 1 for position in range(len(rollout))]
        if batch.update == 5:
            assert len(pool.lost) == 2
            cluster.add_node(num_cpus=2, resources={"rollouts": 2})
            cluster.wait_for_nodes()
            assert pool.revive() == 2 and pool.lost == {}
        controller.publish({"w": float(batch.update)})
    run_metrics = metrics.run_metrics()
    assert sorted(trained) == list(range(96))
    assert run_metrics.failures == run_metrics.rejected == 0 and run_metrics.preemptions > 0
    pool.close()
