"""Updates per hour with the learner in it: vLLM in this process and the real learner, both on one GPU.

    benchmarks/end_to_end.sh 8b OUT                                         see there for the modes and their order
    python benchmarks/end_to_end.py --shape tiny --modes baseline partial+elevator:reuse --updates 4 --out OUT

A mode is `mode[@cold|warm|oracle][*OVERSUBSCRIBE][:reuse]`; `:reuse` keeps the KV cache across weight updates. Engine
and learner start once, and the modes run in turn. All weights are random and trained; response lengths are forced, and
the learner trains on the rollouts of the run with arbitrary rewards. The first update of each mode is not counted.

Every row is printed and appended to OUT/end_to_end.jsonl as soon as it exists. The simulator's prediction for each mode
is written before the mode runs. It comes from a profile of the engine and a speed of the learner: from earlier
measurements (`--profile`, `--learner-tokens-per-second`), or measured at the start of this command (`--calibrate`).
update_rows.py defines the parts of an update.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from update_rows import PARTS, Row, UpdateRows, summary

from sortedrl.core.atomic_write import write_atomically
from sortedrl.core.controller import Controller
from sortedrl.core.events import EventLog
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Rollout, Segment
from sortedrl.core.schedule import Schedule
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.engines.forced_lengths import ForcedLengths
from sortedrl.engines.kv_cache_reuse import KVCacheReuse
from sortedrl.engines.lengths import LognormalLengths, length_of_request
from sortedrl.engines.vllm import VllmEngine
from sortedrl.learner.learner import Learner
from sortedrl.learner.settings import LearnerSettings
from sortedrl.studies import bench, profile, profile_file
from sortedrl.studies import workload as simulated
from sortedrl.studies.measurements import machine, random_prompts, warm_up
from sortedrl.studies.workload import Workload, expectation_for
from sortedrl.tasks.scoring import DirectScorer
from sortedrl.tasks.task import Reward

GIB = 2**30
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Shape:
    """A model's shape with the sizes of its workload. `profile` and `learner_tokens_per_second` predict it."""

    folder: str
    kv_gib: float
    slots: int = 128
    rollouts_per_update: int = 128
    rollouts_per_prompt: int = 8
    prompts_per_cohort: int = 64
    prompt_tokens: int = 128
    median_length: float = 636.85
    max_response_tokens: int = 4096
    tokens_per_micro_batch: int = 8192
    kept_tokens: int = 0  # micro-batches up to this size keep their activations
    prefill_tokens_per_step: int = 2048  # as in the profile
    profile: Path | None = None
    learner_tokens_per_second: float | None = None


SHAPES = {
    # The learner's speed is that of Qwen2-7B's shape (docs/results.md, section 7), scaled by the weights that a token
    # is multiplied with: 7.07 and 7.50 billion.
    "8b": Shape(
        "llama-3.1-8b",
        kv_gib=20.0,
        profile=HERE / "measured" / "h200-8b" / "profile_second.json",
        learner_tokens_per_second=7552 * 7.07 / 7.50,
    ),
    "1.5b": Shape("qwen2.5-1.5b", kv_gib=10.0, kept_tokens=8192),
    "tiny": Shape(
        "tiny",
        kv_gib=0.05,
        slots=16,
        rollouts_per_update=16,
        rollouts_per_prompt=4,
        prompts_per_cohort=8,
        prompt_tokens=16,
        median_length=60,
        max_response_tokens=400,
        tokens_per_micro_batch=2048,
    ),
}


@dataclass(frozen=True)
class Mode:
    name: str
    case: bench.Case
    reuse_kv_cache: bool

    @classmethod
    def parsed(cls, text: str) -> Mode:
        case, *options = text.split(":")
        unknown = set(options) - {"reuse"}
        if unknown:
            raise SystemExit(f"--modes {text}: no such option: {', '.join(sorted(unknown))}. Use :reuse.")
        return cls(text, bench.Case.parsed(case), "reuse" in options)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--modes", nargs="+", default=["baseline", "partial+elevator"], metavar="MODE")
    parser.add_argument("--updates", type=int, default=5, help="per mode, including the first, which is not counted")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS", help="start no update later")
    parser.add_argument("--calibrate", action="store_true", help="measure profile and learner first, then predict")
    parser.add_argument("--profile", type=Path, help="of this engine and shape, from sortedrl profile")
    parser.add_argument("--learner-tokens-per-second", type=float, help="prompt and response tokens, as update_7b.py")
    parser.add_argument("--tokens-per-micro-batch", type=int)
    parser.add_argument("--kept-tokens", type=int, help="recompute activations of larger micro-batches only")
    parser.add_argument("--compile-layers", action="store_true", help="of the learner, with torch.compile")
    parser.add_argument("--kv-gib", type=float, help="size of the engine's KV cache")
    parser.add_argument("--sleep", action="store_true", help="free the engine's memory while the learner steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("h200"))
    return parser.parse_args()


# The workload and its prediction


def settings_of(options: argparse.Namespace) -> Shape:
    shape = SHAPES[options.shape]
    return replace(
        shape,
        kv_gib=options.kv_gib or shape.kv_gib,
        tokens_per_micro_batch=options.tokens_per_micro_batch or shape.tokens_per_micro_batch,
        kept_tokens=shape.kept_tokens if options.kept_tokens is None else options.kept_tokens,
        profile=options.profile or shape.profile,
        learner_tokens_per_second=options.learner_tokens_per_second or shape.learner_tokens_per_second,
    )


def schedule_of(shape: Shape, mode: Mode, seed: int) -> Schedule:
    base = Schedule(
        rollouts_per_update=shape.rollouts_per_update,
        prompts_per_cohort=shape.prompts_per_cohort,
        rollouts_per_prompt=shape.rollouts_per_prompt,
        whole_groups=True,
        max_response_tokens=shape.max_response_tokens,
        seed=seed,
    )
    return mode.case.schedule(base)


def workload_of(shape: Shape, mode: Mode, updates: int, seed: int) -> Workload:
    """One cohort more than the updates use: modes without a drain start it early."""
    per_cohort = shape.prompts_per_cohort * shape.rollouts_per_prompt // shape.rollouts_per_update
    return Workload(
        lengths=LognormalLengths(mu=math.log(shape.median_length), limit=shape.max_response_tokens, seed=seed),
        slots=shape.slots,
        prompts=shape.prompts_per_cohort * (math.ceil(updates / per_cohort) + 1),
        prompt_tokens=shape.prompt_tokens,
        expectation=mode.case.expectation,
        reuse_kv_cache=mode.reuse_kv_cache,
    )


def predicted(
    workload: Workload, schedule: Schedule, known: profile.Profile, learner_tokens_per_second: float, updates: int
) -> dict[str, float]:
    """The simulator's answer for the same lengths, updates and modes."""
    per_token = 1 / learner_tokens_per_second
    prompts = schedule.rollouts_needed * workload.prompt_tokens
    timed = replace(
        workload,
        step_time=known.step_time(),
        kv_tokens=known.kv_tokens,
        weight_update_seconds=known.weight_update_seconds or 0.0,
        learner_seconds_per_token=per_token,
        learner_seconds_per_update=per_token * prompts,
    )
    prefill = 0.0 if workload.reuse_kv_cache else known.prefill_seconds_per_token
    rows = UpdateRows(prefill)
    simulated.run(timed, schedule, rows, max_updates=updates)
    return summary(rows.rows)


def kv_bytes_per_token(config: PreTrainedConfig) -> int:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head * 2)


def memory_arithmetic(config: PreTrainedConfig, weights: int, shape: Shape) -> dict[str, float]:
    """GiB by part, before anything is allocated. Activations: one hidden state per layer and the layer in work, or all
    of the largest micro-batch that keeps them."""
    layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    tokens = max(shape.tokens_per_micro_batch, shape.max_response_tokens + shape.prompt_tokens)
    parts = {
        "learner_at_rest": 10 * weights / GIB,  # bf16 weight and first moment, fp32 second moment, 16 bits of remainder
        "gradients": 2 * weights / GIB,
        "activations": 2.0  # chunks of logits
        + max(
            tokens * (2 * layers * hidden + 24 * hidden + 16 * inner),
            shape.kept_tokens * layers * (38 * hidden + 8 * inner),
        )
        / GIB,
        "engine_weights": 2 * weights / GIB,
        "kv_cache": shape.kv_gib,
        "graphs_and_context": 5.0,
    }
    return {**parts, "sum": sum(parts.values())}


# The run


class Bench:
    """Engine and learner, started once, with the file that gets every result."""

    def __init__(self, options: argparse.Namespace, shape: Shape) -> None:
        self.options, self.shape = options, shape
        self.began = time.perf_counter()
        self.on_gpu = torch.cuda.is_available()
        self.folder = str(HERE / "shapes" / shape.folder)
        self.config = AutoConfig.from_pretrained(self.folder)
        options.out.mkdir(parents=True, exist_ok=True)
        self._file = (options.out / "end_to_end.jsonl").open("a", encoding="utf-8")
        self.max_length = shape.prompt_tokens + shape.max_response_tokens

    def write(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, "shape": self.options.shape, "at": round(time.perf_counter() - self.began, 1), **fields}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def log(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", flush=True)

    def start(self) -> None:
        shape = self.shape
        with torch.device("meta"):
            meta = AutoModelForCausalLM.from_config(self.config)  # type: ignore[no-untyped-call]
        weights = sum(weight.numel() for weight in meta.parameters())
        memory = memory_arithmetic(self.config, weights, shape)
        self.log(f"{weights / 1e9:.2f} billion weights; GiB: " + ", ".join(f"{k} {v:.1f}" for k, v in memory.items()))
        self.write("start", machine=machine(), settings=_as_json(vars(self.options)), memory=memory)
        self.engine = VllmEngine(
            self.folder,
            slots=shape.slots,
            eos_token_ids=(),
            max_length=self.max_length,
            enable_sleep_mode=self.options.sleep,
            load_format="dummy",
            dtype="bfloat16" if self.on_gpu else "float32",
            max_num_batched_tokens=shape.prefill_tokens_per_step,
            kv_cache_memory_bytes=int(shape.kv_gib * GIB),
            **({"gpu_memory_utilization": 0.5} if self.on_gpu else {"enforce_eager": True}),
        )
        self.log(f"engine started, room for {self.engine.info().kv_tokens:,} tokens of KV; {self.memory()}")
        torch.manual_seed(self.options.seed)
        with torch.device("cuda" if self.on_gpu else "cpu"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                self.config, dtype=torch.bfloat16 if self.on_gpu else torch.float32
            )
        settings = LearnerSettings(
            algorithm="grpo",
            normalizer_tokens=shape.rollouts_per_update * shape.max_response_tokens,
            tokens_per_micro_batch=shape.tokens_per_micro_batch,
            gradient_checkpointing=True,
            recompute_above_tokens=shape.kept_tokens,
            compile_layers=self.options.compile_layers,
            bf16=self.on_gpu,
        )
        self.learner = Learner(model, settings)
        probes = [prompt.tokens for prompt in random_prompts((-1, -2), 24, self.engine.info().vocabulary)]
        # With random weights bf16 alone puts the two 0.11 nats apart (measured at 8B). Wrong weights: more than 1.
        self.checked = CheckedWeights(self.engine, self.learner.logprobs_of, probes, tolerance=0.5)
        self.checked.update_weights(self.learner.weights(), 1)
        self.log(f"learner started, its weights are in the engine ({self.checked.last_difference:.3g} nats apart)")
        warm_up(self.engine, self.engine.info().vocabulary, self.max_length)
        self.log(f"engine warmed up; {self.memory()}")

    def memory(self) -> str:
        now, peak = self._memory_gib()
        return f"{now:.1f} GiB in use, peak {peak:.1f} GiB"

    def _memory_gib(self) -> tuple[float, float]:
        """In use on the device, and the peak of tensors: engine and learner share torch's allocator. On CPU: RSS."""
        if not self.on_gpu:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
            return peak, peak
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB, torch.cuda.max_memory_allocated() / GIB

    def calibrate(self) -> tuple[profile.Profile, float]:
        """Profile of the engine and tokens per second of the learner, both written to OUT."""
        engine, shape = self.engine, self.shape
        vocabulary, steps = engine.info().vocabulary, 48
        cells = profile.cells_for(engine.slots, self.max_length, engine.info().kv_tokens, steps)
        found = profile.measure(engine, cells, vocabulary, steps=steps, repeats=1)
        for version in (1, 2):  # the first one allocates
            self.checked.update_weights(self.learner.weights(), version)
        known = profile.Profile(
            engine="vllm",
            model=f"benchmarks/shapes/{shape.folder}",
            slots=engine.slots,
            cells=tuple(found),
            prefill_seconds_per_token=profile.prefill_of(found),
            prefill_tokens_per_step=engine.info().prefill_tokens_per_step,
            kv_tokens=engine.info().kv_tokens,
            weight_update_seconds=engine.weight_update_seconds,
            machine=machine(),
        )
        known.write(self.options.out / f"profile_{self.options.shape}.json")
        self.log(f"profile: worst error of the fit {known.fit_error():.1%}")
        self.learner.step(self._random_rollouts(max(1, shape.rollouts_per_update // 8)), 0)
        batch = self._random_rollouts(shape.rollouts_per_update)
        began = time.perf_counter()
        self.learner.step(batch, 0)
        seconds = time.perf_counter() - began
        speed = sum(len(rollout) + len(rollout.prompt.tokens) for rollout in batch) / seconds
        self.log(f"learner: {seconds:.1f} s per update of {len(batch)} rollouts, {speed:,.0f} tokens/s")
        self.write("calibration", learner_tokens_per_second=speed, weight_update_seconds=known.weight_update_seconds)
        return known, speed

    def _random_rollouts(self, count: int) -> list[Rollout]:
        """Random tokens at the lengths of the workload, in groups."""
        shape, vocabulary = self.shape, self.engine.info().vocabulary
        lengths = LognormalLengths(mu=math.log(shape.median_length), limit=shape.max_response_tokens, seed=99)
        source = random.Random(count)
        prompts = random_prompts(range(count), shape.prompt_tokens, vocabulary)
        out = []
        for i in range(count):
            prompt = prompts[i // shape.rollouts_per_prompt]
            tokens = source.choices(range(vocabulary), k=lengths(prompt, i))
            segment = Segment(tokens, [-math.log(vocabulary)] * len(tokens), 0)
            place = i % shape.rollouts_per_prompt
            out.append(Rollout(i, prompt, place, 0, i, 0, segments=[segment], reward=float(source.random() < 0.5)))
        return sorted(out, key=len)

    def run(self, mode: Mode, prediction: dict[str, float], prefill_seconds_per_token: float) -> None:
        shape, options, engine = self.shape, self.options, self.engine
        schedule = schedule_of(shape, mode, options.seed)
        workload = workload_of(shape, mode, options.updates, options.seed)
        engine.kv_cache_reuse = KVCacheReuse(keep=mode.reuse_kv_cache)
        self.checked.update_weights(self.learner.weights(), 0)  # a run counts versions from 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

        def on_row(row: Row) -> None:
            place = len(rows.rows)
            parts = ", ".join(f"{part} {getattr(row, part):.2f}" for part in PARTS)
            stale = row.staleness_sum / row.trained_tokens
            self.log(f"{mode.name}: update {place} in {row.seconds:.2f} s ({parts}), {row.trained_tokens:,} tokens, "
                     f"staleness {stale:.2f}, {self.memory()}")  # fmt: skip
            self.write("update", mode=mode.name, update=place, **asdict(row))

        rows = UpdateRows(prefill_seconds_per_token, lambda: engine.reused_kv_tokens, on_row)
        controller = Controller(
            ForcedLengths(self.checked, length_of_request(workload.lengths)),
            Prompts(
                random_prompts(range(workload.prompts), workload.prompt_tokens, engine.info().vocabulary),
                epochs=1,
                seed=schedule.seed,
            ),
            DirectScorer(lambda rollout: Reward(float(derive_seed(rollout.id, 3) & 1), correct=False)),
            schedule,
            expectation=expectation_for(workload, schedule),
            log=EventLog(rows),
            max_updates=options.updates,
        )
        trained: dict[str, float] = {}
        for batch in controller:
            self.checked.sleep()
            trained = self.learner.step(batch.rollouts, batch.version)
            controller.publish(self.learner.weights())
            if time.perf_counter() - self.began > options.stop_after:
                controller.interrupt()
        if not rows.rows:
            self.log(f"{mode.name}: no update was made")
            return
        found = summary(rows.rows)
        now, peak = self._memory_gib()
        error = prediction["updates_per_hour"] / found["updates_per_hour"] - 1
        self.write(
            "mode",
            mode=mode.name,
            **found,
            predicted=prediction,
            prediction_error=error,
            peak_tensors_gib=peak,
            device_gib=now,
            weight_difference=self.checked.last_difference,
            mismatch_kl=trained.get("mismatch_kl"),
            padding_fraction=trained.get("padding_fraction"),
        )
        self.log(f"{mode.name}: {table_row(mode.name, found, prediction, peak)}")


HEADER = (
    f"{'mode':34}{'upd/h':>7}{'predicted':>17}{'s/upd':>7}"
    + "".join(f"{p:>11}" for p in PARTS)
    + (f"{'bubble':>8}{'idle':>7}{'stale':>7}{'GiB':>7}")
)


def table_row(name: str, found: dict[str, float], said: dict[str, float], peak: float) -> str:
    error = said["updates_per_hour"] / found["updates_per_hour"] - 1
    return (
        f"{name:34}{found['updates_per_hour']:7.1f}{said['updates_per_hour']:9.1f} {error:+7.1%}"
        f"{found['seconds_per_update']:7.1f}" + "".join(f"{found[part]:11.2f}" for part in PARTS)
        + f"{found['bubble']:8.1%}{found['idle']:7.1%}{found['staleness_mean']:7.2f}{peak:7.1f}"
    )  # fmt: skip


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}


def print_table(path: Path) -> None:
    """All modes in the file, and a copy of the table beside it."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [HEADER]
    lines += [
        table_row(row["mode"], row, row["predicted"], row["peak_tensors_gib"]) for row in rows if row["kind"] == "mode"
    ]
    print("\n".join(lines), flush=True)
    write_atomically(path.with_suffix(".txt"), "\n".join(lines) + "\n")


def main() -> int:
    options = arguments()
    shape, modes = settings_of(options), [Mode.parsed(text) for text in options.modes]
    run = Bench(options, shape)
    known = profile_file.read(shape.profile) if shape.profile is not None else None
    speed = shape.learner_tokens_per_second
    if not options.calibrate and (known is None or speed is None):
        raise SystemExit(f"--shape {options.shape} has no earlier measurement to predict from. Add --calibrate.")
    if known is not None:
        kv_tokens = int(shape.kv_gib * GIB / kv_bytes_per_token(run.config))
        known = replace(known, kv_tokens=kv_tokens, prefill_tokens_per_step=shape.prefill_tokens_per_step)

    def predictions() -> dict[str, dict[str, float]]:
        assert known is not None and speed is not None
        found = {}
        for mode in modes:
            schedule = schedule_of(shape, mode, options.seed)
            workload = workload_of(shape, mode, options.updates, options.seed)
            found[mode.name] = predicted(workload, schedule, known, speed, options.updates)
            run.write("prediction", mode=mode.name, learner_tokens_per_second=speed, **found[mode.name])
            run.log(f"predicted {mode.name}: {found[mode.name]['updates_per_hour']:.1f} updates/h, " + ", ".join(
                f"{part} {found[mode.name][part]:.2f}" for part in PARTS))  # fmt: skip
        return found

    said = {} if options.calibrate else predictions()
    run.start()
    if options.calibrate:
        known, speed = run.calibrate()
        said = predictions()
    assert known is not None
    for mode in modes:
        if time.perf_counter() - run.began > options.stop_after:
            run.log(f"{mode.name}: left out, {options.stop_after:.0f} s have passed")
            continue
        run.run(mode, said[mode.name], known.prefill_seconds_per_token)
        print_table(options.out / "end_to_end.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
