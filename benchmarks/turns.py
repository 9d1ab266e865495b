"""Rollouts of several turns with vLLM in this process and tools that sleep, next to the simulator's prediction.

    python benchmarks/turns.py --shape 8b --scale 0.4 --calibrate --seconds 240 --out OUT         200 s on one H200
    python benchmarks/turns.py --shape tiny --scale 0.2 --updates 2 --calibrate --out OUT         a check on CPU
    python benchmarks/turns.py --repredict OUT [--return-seconds 0.005]                           takes seconds, no vLLM

It needs vLLM, and `src` on PYTHONPATH. Set VLLM_USE_FLASHINFER_SAMPLER=0 and HF_HUB_OFFLINE=1, as h200.sh does.

The workload at `--scale 1`: five turns, each log-normal with a median of 255 tokens; observations of 128 tokens; tool
latencies log-normal with a mean of 5 s, slept in an event loop of their own thread; 128 slots, updates of 128 rollouts,
groups of 8, cohorts of 64 prompts. `--scale` multiplies lengths, observations, prompts and latencies alike. Weights are
random, lengths are forced, and there is no learner: a weight update only clears the KV cache, unless `:reuse` keeps it.

A mode is `mode[:reuse][=UPDATES]`. The first update of a mode is not counted if there are others. Predictions use the
same lengths and latencies. They are made before the modes run: `predicted` with an earlier profile, `predicted_now`
with the speed measured at the start (`--calibrate`). OUT/turns.json is written after every mode. `--seconds` ends the
mode in work when the time is up; its complete updates count. `--repredict` predicts a measurement from its own profile
again, with another cost of a step that also prefills, if one is given.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sleeping_tools import SleepingTools

from sortedrl.core import events
from sortedrl.core.controller import Controller
from sortedrl.core.engine import UNCHANGED
from sortedrl.core.events import Event, EventLog
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Rollout
from sortedrl.core.schedule import Schedule
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.episodes import DrawnEpisodes, end_of_turn
from sortedrl.engines.lengths import ForcedLengths, LognormalLengths
from sortedrl.engines.shared import KVCacheReuse
from sortedrl.engines.vllm import VllmEngine
from sortedrl.log.atomic_write import write_atomically
from sortedrl.observe.metrics import Metrics
from sortedrl.observe.run_metrics import RunMetrics
from sortedrl.studies import profile, profile_file
from sortedrl.studies import workload as simulated
from sortedrl.studies.measurements import machine, random_prompts, warm_up
from sortedrl.studies.workload import Workload, expectation_for, with_mode
from sortedrl.tasks.scoring import DirectScorer
from sortedrl.tasks.task import Reward

GIB = 2**30
HERE = Path(__file__).parent
SUMS = (
    "seconds",
    "trained_tokens",
    "environment_tokens",
    "generated_tokens",
    "prefill_tokens",
    "re_prefill_tokens",
    "environment_seconds",
    "trained",
)


@dataclass(frozen=True)
class Shape:
    """A model's shape with the sizes of its workload at scale 1. `profile` predicts it."""

    folder: str
    kv_gib: float
    slots: int = 128
    rollouts_per_update: int = 128
    rollouts_per_prompt: int = 8
    prompts_per_cohort: int = 64
    prefill_tokens_per_step: int = 2048  # as in the profile
    max_response_tokens: int = 8192
    profile: Path | None = None


MODES = ("partial+elevator:reuse", "partial+elevator", "baseline=1")
SHAPES = {
    "8b": Shape("llama-3.1-8b", kv_gib=80.0, profile=HERE / "measured" / "h200-8b" / "profile_second.json"),
    "tiny": Shape(
        "tiny",
        kv_gib=0.05,
        slots=8,
        rollouts_per_update=8,
        rollouts_per_prompt=2,
        prompts_per_cohort=8,
        max_response_tokens=2000,
    ),
}


@dataclass(frozen=True)
class Mode:
    name: str
    mode: str
    reuse_kv_cache: bool
    updates: int

    @classmethod
    def parsed(cls, text: str, updates: int) -> Mode:
        name, _, count = text.partition("=")
        mode, _, option = name.partition(":")
        if option not in ("", "reuse"):
            raise SystemExit(f"--modes {text}: no such option: {option}. Use :reuse.")
        return cls(name, mode, option == "reuse", int(count) if count else updates)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument(
        "--modes",
        nargs="+",
        default=MODES,
        metavar="MODE",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of lengths, observations, prompts and latencies")
    parser.add_argument("--updates", type=int, default=4, help="per mode, including the first, which is not counted")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after this time, including the start")
    parser.add_argument("--calibrate", action="store_true", help="measure the speed of the engine first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("turns"))
    parser.add_argument("--repredict", type=Path, metavar="OUT", help="an earlier measurement with --calibrate")
    parser.add_argument("--return-seconds", type=float, help="what a decode step costs more if it also prefills")
    return parser.parse_args()


# The workload and its prediction


def schedule_of(shape: Shape, mode: Mode, options: argparse.Namespace) -> Schedule:
    base = Schedule(
        rollouts_per_update=shape.rollouts_per_update,
        prompts_per_cohort=shape.prompts_per_cohort,
        rollouts_per_prompt=shape.rollouts_per_prompt,
        max_response_tokens=round(shape.max_response_tokens * options.scale),
        seed=options.seed,
    )
    return with_mode(base, mode.mode)


def workload_of(shape: Shape, mode: Mode, options: argparse.Namespace) -> Workload:
    """Cohorts for all updates and two more: modes without a drain start them early."""
    scale = options.scale
    per_cohort = shape.prompts_per_cohort * shape.rollouts_per_prompt // shape.rollouts_per_update
    lengths = LognormalLengths(
        mu=math.log(255 * scale), shortest=8, limit=round(shape.max_response_tokens * scale), seed=options.seed
    )
    return Workload(
        episodes=DrawnEpisodes(
            lengths=lengths, turns=5, observation_tokens=round(128 * scale), seconds_mean=5.0 * scale
        ),
        slots=shape.slots,
        prompts=shape.prompts_per_cohort * (math.ceil(mode.updates / per_cohort) + 2),
        prompt_tokens=round(128 * scale),
        reuse_kv_cache=mode.reuse_kv_cache,
        expectation="warm",
    )


class Marks:
    """A sink: the metrics of the run at its start and after every update."""

    def __init__(self, on_update: Callable[[RunMetrics], None] = lambda found: None) -> None:
        self.metrics = Metrics()
        self.found: list[RunMetrics] = []
        self._on_update = on_update

    def __call__(self, event: Event) -> None:
        self.metrics(event)
        if isinstance(event, events.Published):
            self.found.append(self.metrics.run_metrics(0.0))
            self._on_update(self.found[-1])


def summary(found: Sequence[RunMetrics]) -> dict[str, Any]:
    """Of all updates after the first, or of the first if it is the only one. `kept` is that of the whole run."""
    last, first = found[-1], found[0] if len(found) > 1 else None

    def counted(value: Callable[[RunMetrics], float]) -> float:
        return value(last) - (value(first) if first is not None else 0.0)

    sums = {key: counted(lambda m, key=key: getattr(m, key)) for key in SUMS}  # type: ignore[misc]
    seconds = sums["seconds"]
    parts = {
        part: counted(lambda m, part=part: m.bubble_parts[part] * m.seconds) / seconds  # type: ignore[misc]
        for part in last.bubble_parts
    }
    return {
        "updates": len(found) - (first is not None),
        "goodput": sums["trained_tokens"] / seconds,
        "bubble": sum(parts.values()),
        "bubble_parts": parts,
        "in_environment_mean": sums["environment_seconds"] / seconds,
        "turns_mean": last.turns_mean,
        "staleness_mean": last.staleness_mean,
        "kept": last.kept,
        **sums,
    }


def predicted(
    shape: Shape,
    mode: Mode,
    known: profile_file.Profile,
    kv_tokens: int | None,
    options: argparse.Namespace,
    workload: Workload | None = None,
) -> list[RunMetrics]:
    """The simulator's marks, by default for the same lengths and latencies."""
    marks = Marks()
    timed = replace(
        workload or workload_of(shape, mode, options), step_time=known.step_time(), kv_tokens=kv_tokens
    )  # fmt: skip
    simulated.run(timed, schedule_of(shape, mode, options), marks, max_updates=mode.updates)
    return marks.found


def limit_of(shape: Shape, known: profile_file.Profile, options: argparse.Namespace) -> float:
    """In tokens per second, over the lengths of 20 cohorts."""
    mode = Mode("partial+elevator", "partial+elevator", reuse_kv_cache=True, updates=1)
    workload = replace(workload_of(shape, mode, options), prompts=20 * shape.prompts_per_cohort)
    return simulated.limit(replace(workload, step_time=known.step_time()), schedule_of(shape, mode, options))


# The run


class Bench:
    """The engine, started once, with the file that gets every result."""

    def __init__(self, options: argparse.Namespace, shape: Shape) -> None:
        self.options, self.shape = options, shape
        self.began = time.perf_counter()
        self.written: dict[str, Any] = {"settings": vars(options) | {"out": str(options.out)}, "modes": {}}
        options.out.mkdir(parents=True, exist_ok=True)

    def left(self) -> float:
        return float(self.options.seconds) - (time.perf_counter() - self.began)

    def log(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", flush=True)

    def write(self) -> None:
        write_atomically(self.options.out / "turns.json", json.dumps(self.written, indent=1) + "\n")

    def start(self) -> None:
        shape, scale = self.shape, self.options.scale
        self.max_length = round(scale * shape.max_response_tokens) + 5 * round(128 * scale)
        on_gpu = torch.cuda.is_available()
        self.engine = VllmEngine(
            str(HERE / "shapes" / shape.folder),
            slots=shape.slots,
            eos_token_ids=(),
            max_length=self.max_length,
            load_format="dummy",
            dtype="bfloat16" if on_gpu else "float32",
            max_num_batched_tokens=shape.prefill_tokens_per_step,
            kv_cache_memory_bytes=int(shape.kv_gib * GIB),
            **({"gpu_memory_utilization": 0.75} if on_gpu else {"enforce_eager": True}),
        )
        vocabulary = self.engine.info().vocabulary
        assert vocabulary is not None
        self.vocabulary = vocabulary
        self.written |= {"machine": machine(), "kv_tokens": self.engine.info().kv_tokens}
        self.log(f"engine started, room for {self.engine.info().kv_tokens:,} tokens of KV")
        warm_up(self.engine, self.vocabulary, self.max_length)
        self.log("engine warmed up")

    def calibrate(self) -> profile_file.Profile:
        engine, steps = self.engine, 32
        longest = min(self.max_length, 2400)
        cells = profile.cells_for(engine.slots, longest, engine.info().kv_tokens or math.inf, steps)
        found = profile.measure(engine, cells, self.vocabulary, steps=steps, repeats=1)
        per_token, observed = profile.prefill_of(found), round(128 * self.options.scale)
        per_return = profile.prefill_step_seconds(
            engine, longest // 4, observed, self.vocabulary, per_token, steps=min(128, longest // 8)
        )
        known = profile_file.Profile(
            engine="vllm",
            model=f"benchmarks/shapes/{self.shape.folder}",
            slots=engine.slots,
            cells=tuple(found),
            prefill_seconds_per_token=per_token,
            prefill_tokens_per_step=engine.info().prefill_tokens_per_step,
            kv_tokens=engine.info().kv_tokens,
            weight_update_seconds=None,
            machine=machine(),
            prefill_step_seconds=per_return,
            prefill_step_tokens=observed,
        )
        known.write(self.options.out / "profile.json")
        self.log(
            f"measured {len(cells)} cells of the profile, worst error of the fit {known.fit_error():.1%}; "
            f"a return costs {1e3 * per_return:.2f} ms"
        )
        return known

    def run(self, mode: Mode) -> tuple[list[RunMetrics], dict[str, Any]]:
        options, engine, vocabulary = self.options, self.engine, self.vocabulary
        schedule, workload = schedule_of(self.shape, mode, options), workload_of(self.shape, mode, options)
        assert workload.episodes is not None
        engine.kv_cache_reuse = KVCacheReuse(keep=mode.reuse_kv_cache)
        engine.update_weights(None, 0)  # a run counts versions from 0; clears the cache of the last mode
        prompts = random_prompts(range(workload.prompts), workload.prompt_tokens, vocabulary)

        def seed_of(rollout: Rollout) -> int:
            return derive_seed(rollout.seed, rollout.attempt)

        marks = Marks(lambda found: self.log(
            f"{mode.name}: update {found.updates} after {found.seconds:.1f} s, {found.trained_tokens:,} tokens, "
            f"bubble {found.bubble:.1%}"))  # fmt: skip
        tools = SleepingTools(workload.episodes, seed_of, vocabulary)
        controller = Controller(
            ForcedLengths(engine, end_of_turn(workload.episodes)),
            Prompts(prompts, epochs=1, seed=schedule.seed),
            DirectScorer(lambda rollout: Reward(0.0, correct=False)),
            schedule,
            environments=tools,
            expectation=expectation_for(workload, schedule),
            log=EventLog(marks),
            max_updates=mode.updates,
        )
        alarm = threading.Timer(max(0.0, min(self.left(), 1e6)), controller.interrupt)
        alarm.start()
        reused, inside, began = engine.reused_kv_tokens, engine.inside_seconds, time.perf_counter()
        for _ in controller:
            controller.publish(UNCHANGED)
        alarm.cancel()
        tools.close()
        seconds = time.perf_counter() - began
        return marks.found, {
            "reused_kv_tokens": engine.reused_kv_tokens - reused,
            "own_fraction": 1 - (engine.inside_seconds - inside) / seconds,
            "tool_calls": len(tools.slept),
            "tool_calls_late_mean": sum(tools.slept) / max(1, len(tools.slept)),
            "wall_seconds": seconds,
        }


Prediction = tuple[list[RunMetrics], float]


def compared(found: list[RunMetrics], predictions: dict[str, Prediction]) -> dict[str, Any]:
    """The mode's metrics with each prediction for as many updates, and its relative error."""
    measured = summary(found)
    out: dict[str, Any] = dict(measured)
    for name, (marks, limit) in predictions.items():
        said = summary(marks[: len(found)])
        out[name] = said | {"limit": limit, "of_limit": said["goodput"] / limit}
        out[name]["goodput_error"] = said["goodput"] / measured["goodput"] - 1
        out[name]["kept_error"] = said["kept"] / measured["kept"] - 1
        out[name]["bubble_error_points"] = 100 * (said["bubble"] - measured["bubble"])
        out["of_limit"] = measured["goodput"] / limit  # of the last prediction: the speed measured on the same day
    return out


def shown(name: str, found: dict[str, Any]) -> str:
    text = (
        f"{name}: {found['updates']} counted updates, goodput {found['goodput']:,.0f} tok/s, "
        f"kept {found['kept']:,.0f}, bubble {found['bubble']:.1%}, {found.get('of_limit', math.nan):.2f} of the limit, "
        f"{found['in_environment_mean']:.0f} rollouts with their tools"
    )
    for key in ("predicted", "predicted_now"):
        if key in found:
            said = found[key]
            text += (
                f"; {key} goodput {said['goodput']:,.0f} ({said['goodput_error']:+.1%}), "
                f"kept {said['kept']:,.0f} ({said['kept_error']:+.1%}), bubble {said['bubble']:.1%}"
            )
    return text


def measurement(
    folder: Path, return_seconds: float | None = None
) -> tuple[profile_file.Profile, dict[str, Any], argparse.Namespace]:
    """Its profile, its results and its settings."""
    known = profile_file.read(folder / "profile.json")
    written = json.loads((folder / "turns.json").read_text(encoding="utf-8"))
    options = argparse.Namespace(**written["settings"])
    if return_seconds is not None:
        observed = round(128 * options.scale)
        known = replace(known, prefill_step_seconds=return_seconds, prefill_step_tokens=observed)
    print(f"a step that also prefills costs {1e3 * known.prefill_step_seconds:.2f} ms more")
    return known, written, options


def repredict(folder: Path, return_seconds: float | None) -> None:
    """The modes of a measurement next to the prediction from its own profile."""
    known, written, options = measurement(folder, return_seconds)
    for text in options.modes:
        mode, shape = Mode.parsed(text, options.updates), SHAPES[options.shape]
        measured = written["modes"].get(mode.name)
        if measured is None:
            print(f"{mode.name}: ended before its first update")
            continue
        marks = predicted(shape, mode, known, known.kv_tokens, options)
        said = summary(marks[: measured["updates"] + (mode.updates > 1)])
        errors = {key: said[key] / measured[key] - 1 for key in ("goodput", "kept")}
        print(f"{mode.name}: measured {measured['goodput']:,.0f} tok/s, predicted {said['goodput']:,.0f} "
              f"({errors['goodput']:+.1%}); kept {measured['kept']:,.0f}, predicted {said['kept']:,.0f} "
              f"({errors['kept']:+.1%})")  # fmt: skip


def main() -> int:
    options = arguments()
    if options.repredict is not None:
        repredict(options.repredict, options.return_seconds)
        return 0
    shape, modes = SHAPES[options.shape], [Mode.parsed(text, options.updates) for text in options.modes]
    bench = Bench(options, shape)
    predictions: dict[str, dict[str, Prediction]] = {mode.name: {} for mode in modes}

    def predict(key: str, known: profile_file.Profile, kv_tokens: int | None) -> None:
        steady = limit_of(shape, known, options)
        for mode in modes:
            marks = predicted(shape, mode, known, kv_tokens, options)
            limit = max(steady, summary(marks)["goodput"])
            predictions[mode.name][key] = marks, limit
            bench.log(f"{key} {mode.name}: {marks[-1].seconds:.1f} s, goodput {summary(marks)['goodput']:,.0f} tok/s, "
                      f"limit {limit:,.0f} tok/s")  # fmt: skip
        bench.written[key] = {
            name: summary(said[key][0]) | {"limit": said[key][1]} for name, said in predictions.items()
        }
        bench.write()

    if shape.profile is not None:
        predict("predicted", profile_file.read(shape.profile), None)
    bench.start()
    if options.calibrate:
        known = bench.calibrate()
        predict("predicted_now", known, known.kv_tokens)
    for mode in modes:
        if bench.left() <= 0:
            bench.log(f"{mode.name}: left out, the time is up")
            continue
        found, extra = bench.run(mode)
        if not found:
            bench.log(f"{mode.name}: no update was made in time")
            continue
        bench.written["modes"][mode.name] = compared(found, predictions[mode.name]) | extra
        bench.write()
        bench.log(shown(mode.name, bench.written["modes"][mode.name]))
    bench.engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
