"""Updates per hour with the learner in it: vLLM in this process, or an SGLang server, and the real learner on one GPU.

    benchmarks/end_to_end.sh 8b OUT                                         see there for the modes and their order
    python benchmarks/end_to_end.py --shape tiny --modes baseline partial+elevator:reuse --updates 4 --out OUT
    ... --filtered 0.5 --modes partial+elevator:reuse baseline filter-rounds       dynamic sampling: half of the groups

A mode is `mode[@cold|warm|oracle][*OVERSUBSCRIBE][:reuse][:stream][:sleep][:offload][:UPDATES]`:

- `:reuse` keeps the KV cache across weight updates;
- `:stream` lets the learner work during the drain. On a GPU, `--stream-sms` of its SMs are the learner's meanwhile;
- `:sleep` frees the engine's memory while the learner steps. Then the engine starts in sleep mode for all modes;
- `:offload` is the same, except that the engine's weights wait in host memory;
- `:UPDATES` ends this mode earlier than `--updates`, on the same prompts as the others.

Engine and learner start once, and the modes run in turn, `--rounds` times. All weights are random and trained; response
lengths are forced, and the learner trains on the rollouts of the run with arbitrary rewards. The first update of each
mode is not counted. A mode that fails is recorded with its error, and the next one starts.

Every row is printed and appended to OUT/end_to_end.jsonl as soon as it exists. The simulator's prediction for each mode
is written before the mode runs. It comes from a profile of the engine and a speed of the learner: from earlier
measurements (`--profile`, `--learner-tokens-per-second`), or measured at the start of this command (`--calibrate`).
update_rows.py defines the parts of an update. With `--drafts` every step has drafts of an EAGLE-3 head, predicted from
`--draft-profile`; drafts.py --end-to-end runs this on its engines. With `--sglang-url` the engine is a server that
starts meanwhile; it gets its weights by CUDA IPC, and at the end `--file-updates` times through files, with the seconds
of each part.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import sys
import time
import traceback
import urllib.request
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from end_to_end_table import read, table
from end_to_end_workload import (
    GIB,
    HERE,
    SHAPES,
    Mode,
    Shape,
    kv_bytes_per_token,
    memory_arithmetic,
    predicted,
    schedule_of,
    workload_of,
)
from synthetic_drafts import accepting, eagle3_head
from transformers import AutoConfig, AutoModelForCausalLM
from update_rows import PARTS, Row, UpdateRows, summary

from sortedrl.core.controller import Batch, Controller
from sortedrl.core.events import EventLog
from sortedrl.core.prompts import Prompts
from sortedrl.core.rollout import Rollout, Segment
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.checked_weights import CheckedWeights
from sortedrl.engines.lengths import ForcedLengths, LognormalLengths, length_of_request, simulated_reward
from sortedrl.engines.servers.sglang import SglangEngine
from sortedrl.engines.shared import KVCacheReuse
from sortedrl.engines.step_time import with_drafts
from sortedrl.engines.vllm import VllmEngine
from sortedrl.learner.learner import Learner
from sortedrl.learner.settings import LearnerSettings
from sortedrl.learner.shared_gpu import SharedGpuLearner, some_sms
from sortedrl.log.atomic_write import write_atomically
from sortedrl.studies import profile, profile_file
from sortedrl.studies.measurements import machine, random_prompts, warm_up
from sortedrl.studies.workload import expectation_for
from sortedrl.tasks.scoring import DirectScorer
from sortedrl.tasks.task import Reward

DRAFT_PROFILE = HERE / "measured" / "h200-drafts" / "eagle3" / "profile-eagle3.json"  # of the shape 8b


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--modes", nargs="+", default=["baseline", "partial+elevator"], metavar="MODE")
    parser.add_argument("--updates", type=int, default=5, help="per mode, including the first, which is not counted")
    parser.add_argument("--rounds", type=int, default=1, help="run all modes so often: speeds vary")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS", help="start no update later")
    parser.add_argument("--calibrate", action="store_true", help="measure profile and learner first, then predict")
    parser.add_argument("--profile", type=Path, help="of this engine and shape, from sortedrl profile")
    parser.add_argument("--learner-tokens-per-second", type=float, help="prompt and response tokens, as update_7b.py")
    parser.add_argument("--tokens-per-micro-batch", type=int)
    parser.add_argument("--kept-tokens", type=int, help="recompute activations of larger micro-batches only")
    parser.add_argument("--compile-layers", action="store_true", help="of the learner, with torch.compile")
    parser.add_argument("--kv-gib", type=float, help="size of the engine's KV cache")
    parser.add_argument("--stream-sms", type=int, default=96, help="of the GPU, for the learner in modes with :stream")
    parser.add_argument("--median-length", type=float, help="of the forced lengths")
    parser.add_argument("--max-response-tokens", type=int)
    parser.add_argument("--drafts", type=float, help="of an EAGLE-3 head: mean tokens per request and step, on a GPU")
    parser.add_argument("--draft-profile", type=Path, help="profile-eagle3.json of drafts.py, of this shape")
    parser.add_argument("--filtered", type=float, default=0.0, help="fraction of the groups whose rewards are equal")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sglang-url", metavar="URL", help="of a server that is starting, instead of vLLM")
    parser.add_argument("--file-updates", type=int, default=0, help="after all modes, with --sglang-url")
    parser.add_argument("--out", type=Path, default=Path("h200"))
    return parser.parse_args(words)


def settings_of(options: argparse.Namespace) -> Shape:
    shape = SHAPES[options.shape]
    return replace(
        shape,
        kv_gib=options.kv_gib or shape.kv_gib,
        tokens_per_micro_batch=options.tokens_per_micro_batch or shape.tokens_per_micro_batch,
        kept_tokens=shape.kept_tokens if options.kept_tokens is None else options.kept_tokens,
        median_length=options.median_length or shape.median_length,
        max_response_tokens=options.max_response_tokens or shape.max_response_tokens,
        filtered=options.filtered,
        profile=options.profile or shape.profile,
        learner_tokens_per_second=options.learner_tokens_per_second or shape.learner_tokens_per_second,
    )


# The run


class Bench:
    """Engine and learner, started once, with the file that gets every result."""

    def __init__(self, options: argparse.Namespace, shape: Shape, *, enable_sleep_mode: bool) -> None:
        self.options, self.shape, self.enable_sleep_mode = options, shape, enable_sleep_mode
        self.began = time.perf_counter()
        self.on_gpu = torch.cuda.is_available()
        self.folder = str(HERE / "shapes" / shape.folder)
        self.config = AutoConfig.from_pretrained(self.folder)
        options.out.mkdir(parents=True, exist_ok=True)
        self._file = (options.out / "end_to_end.jsonl").open("a", encoding="utf-8")
        self.max_length = shape.prompt_tokens + shape.max_response_tokens
        self._shared: SharedGpuLearner | None = None
        self._controller: Controller | None = None  # of the last mode
        self._slept = 0.0  # seconds that going to sleep took, in all
        self.vocabulary = int(self.config.vocab_size)

    def write(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, "shape": self.options.shape, "at": round(time.perf_counter() - self.began, 1), **fields}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def log(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.began:6.1f} s] {text}", flush=True)

    def start(self, engine: VllmEngine | None = None) -> None:
        shape = self.shape
        with torch.device("meta"):
            meta = AutoModelForCausalLM.from_config(self.config)  # type: ignore[no-untyped-call]
        weights = sum(weight.numel() for weight in meta.parameters())
        memory = memory_arithmetic(self.config, weights, shape)
        self.log(f"{weights / 1e9:.2f} billion weights; GiB: " + ", ".join(f"{k} {v:.1f}" for k, v in memory.items()))
        self.write("start", machine=machine(), settings=_as_json(vars(self.options)), memory=memory)
        self.engine = engine or (self._server() if self.options.sglang_url else self._vllm())
        self.log(f"engine started, room for {self.engine.info().kv_tokens} tokens of KV; {self.memory()}")
        torch.manual_seed(self.options.seed)
        with torch.device("cuda" if self.on_gpu else "cpu"):
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                self.config, dtype=torch.bfloat16 if self.on_gpu else torch.float32
            )
        if self.on_gpu and (self.enable_sleep_mode or self.options.sglang_url):
            # Only now: vLLM's sleep mode and CUDA IPC cannot do with it, and without it the learner's memory has gaps.
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
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
        probes = [prompt.tokens for prompt in random_prompts((-1, -2), 24, self.vocabulary)]
        # With random weights bf16 alone puts the two 0.11 nats apart (measured at 8B). Wrong weights: more than 1.
        self.checked = CheckedWeights(self.engine, self.learner.logprobs_of, probes, tolerance=0.5)
        self.checked.update_weights(self.learner.weights(), 1)
        self.log(f"learner started, its weights are in the engine ({self.checked.last_difference:.3g} nats apart)")
        warm_up(self.engine, self.vocabulary, self.max_length)
        self.log(f"engine warmed up; {self.memory()}")

    def _drafts(self, acceptance: float) -> dict[str, Any]:
        return eagle3_head(Path(self.folder)) | (accepting(acceptance) if self.on_gpu else {})

    def _vllm(self) -> VllmEngine:
        return VllmEngine(
            self.folder,
            slots=self.shape.slots,
            eos_token_ids=(),
            max_length=self.max_length,
            enable_sleep_mode=self.enable_sleep_mode,
            load_format="dummy",
            dtype="bfloat16" if self.on_gpu else "float32",
            max_num_batched_tokens=self.shape.prefill_tokens_per_step,
            kv_cache_memory_bytes=int(self.shape.kv_gib * GIB),
            **({"gpu_memory_utilization": 0.5} if self.on_gpu else {"enforce_eager": True}),
            **({} if self.options.drafts is None else {"speculative_config": self._drafts(self.options.drafts)}),
        )

    def _server(self) -> SglangEngine:
        """Before the learner is made: the server measures its memory while it starts."""
        url = self.options.sglang_url
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2):
                    break
            except OSError:
                if time.perf_counter() - self.began > self.options.stop_after:
                    raise SystemExit(f"no server answers at {url}") from None
                time.sleep(0.5)
        return SglangEngine(
            url, slots=self.shape.slots, eos_token_ids=(), vocabulary=self.vocabulary, cuda_ipc=self.on_gpu
        )

    def update_through_files(self, version: int) -> None:
        assert isinstance(self.engine, SglangEngine)
        times = [time.perf_counter()]
        with self.engine.weight_files.written(self.learner.weights(), version) as folder:
            times.append(time.perf_counter())
            self.engine.update_weights(folder, version)
            times.append(time.perf_counter())
        times.append(time.perf_counter())
        self.checked.check("after an update through files")
        write, load, remove = (after - before for before, after in pairwise(times))
        self.write("files", write=write, load=load, remove=remove, weight_difference=self.checked.last_difference)
        self.log(f"weights through files: write {write:.2f} s, load {load:.2f} s, remove {remove:.2f} s")

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
        vocabulary, steps = self.vocabulary, 48
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
            weight_update_seconds=self.checked.weight_update_seconds,
            machine=machine(),
        )
        known.write(self.options.out / f"profile_{self.options.shape}.json")
        self.log(f"profile: worst error of the fit {known.fit_error():.1%}")
        self.learner.step(self._random_batch(max(1, shape.rollouts_per_update // 8)))
        batch = self._random_batch(shape.rollouts_per_update)
        began = time.perf_counter()
        self.learner.step(batch)
        seconds = time.perf_counter() - began
        speed = sum(len(rollout) + len(rollout.prompt.tokens) for rollout in batch) / seconds
        self.log(f"learner: {seconds:.1f} s per update of {len(batch)} rollouts, {speed:,.0f} tokens/s")
        self.write("calibration", learner_tokens_per_second=speed, weight_update_seconds=known.weight_update_seconds)
        return known, speed

    def _random_batch(self, count: int) -> Batch:
        """Random tokens at the lengths of the workload, in groups."""
        shape, vocabulary = self.shape, self.vocabulary
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
        return Batch(0, 0, 0, tuple(sorted(out, key=len)))

    def _streamed_learner(self) -> SharedGpuLearner:
        """On a CPU the engine and the learner share the cores as they come."""
        if self._shared is None:
            scope = some_sms(self.options.stream_sms, self.learner.model.device) if self.on_gpu else nullcontext
            self._shared = SharedGpuLearner(self.learner, scope)
        return self._shared

    def _sleep(self, mode: Mode) -> None:
        began = time.perf_counter()
        if mode.sleep:
            self.checked.sleep_until_update()
        elif mode.offload:
            self.checked.sleep()
        self._slept += time.perf_counter() - began

    def updates_of(self, mode: Mode) -> int:
        return min(self.options.updates, mode.updates or self.options.updates)

    def attempt(self, mode: Mode, turn: int, prediction: dict[str, float], prefill_seconds_per_token: float) -> None:
        """Run a mode in round `turn`. If it fails, write its error and clear the engine for the next one."""
        try:
            self.run(mode, turn, prediction, prefill_seconds_per_token)
        except Exception as error:
            self.write("error", mode=mode.name, round=turn, error=repr(error), traceback=traceback.format_exc())
            self.log(f"{mode.name}: failed, {error!r}")
            self.engine.abort(list(self._controller.running) if self._controller is not None else [])

    def run(self, mode: Mode, turn: int, prediction: dict[str, float], prefill_seconds_per_token: float) -> None:
        shape, options, engine = self.shape, self.options, self.engine
        schedule = schedule_of(shape, mode, options.seed)
        workload = workload_of(shape, mode, options.updates, options.seed)
        reward_of = simulated_reward(workload.equal_groups) if workload.equal_groups else arbitrary_reward
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
            self.write("update", mode=mode.name, round=turn, update=place, **asdict(row))

        def reused() -> int:  # a server does not report it
            return engine.reused_kv_tokens if isinstance(engine, VllmEngine) else 0

        rows = UpdateRows(prefill_seconds_per_token, reused, on_row, slept=lambda: self._slept)
        controller = self._controller = Controller(
            ForcedLengths(self.checked, length_of_request(workload.lengths)),
            Prompts(
                random_prompts(range(workload.prompts), workload.prompt_tokens, self.vocabulary),
                epochs=1,
                seed=schedule.seed,
            ),
            DirectScorer(lambda rollout: Reward(reward_of(rollout), correct=False)),
            schedule,
            expectation=expectation_for(workload, schedule),
            log=EventLog(rows),
            max_updates=self.updates_of(mode),
            stream_to=self._streamed_learner() if mode.stream else None,
        )
        trained: dict[str, float] = {}
        for batch in controller:
            self._sleep(mode)
            trained = self.learner.step(batch)
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
            round=turn,
            **found,
            predicted=prediction,
            prediction_error=error,
            peak_tensors_gib=peak,
            device_gib=now,
            weight_difference=self.checked.last_difference,
            mismatch_kl=trained.get("mismatch_kl"),
            padding_fraction=trained.get("padding_fraction"),
            streamed_fraction=trained.get("streamed_fraction"),
        )


def arbitrary_reward(rollout: Rollout) -> float:
    return float(derive_seed(rollout.id, 3) & 1)


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}


def print_table(path: Path) -> None:
    """All modes in the file, and a copy of the table beside it."""
    text = table(read(path))
    print(text, flush=True)
    write_atomically(path.with_suffix(".txt"), text + "\n")


def main(words: Sequence[str] | None = None, engine: VllmEngine | None = None) -> int:
    """`engine`: one that has started, instead of a new one."""
    options = arguments(words)
    shape, modes = settings_of(options), [Mode.parsed(text) for text in options.modes]
    if options.drafts is not None:
        modes = [replace(mode, name=f"{mode.name}, drafts {options.drafts:g}") for mode in modes]
    run = Bench(options, shape, enable_sleep_mode=any(mode.sleep or mode.offload for mode in modes))
    known = profile_file.read(shape.profile) if shape.profile is not None else None
    speed = shape.learner_tokens_per_second
    if not options.calibrate and (known is None or speed is None):
        raise SystemExit(f"--shape {options.shape} has no earlier measurement to predict from. Add --calibrate.")
    if known is not None:
        kv_tokens = int(shape.kv_gib * GIB / kv_bytes_per_token(run.config))
        known = replace(known, kv_tokens=kv_tokens, prefill_tokens_per_step=shape.prefill_tokens_per_step)

    def predictions() -> dict[str, dict[str, float]]:
        assert known is not None and speed is not None
        step_time = known.step_time()
        if options.drafts is not None and not options.calibrate:
            drafted = profile_file.read(options.draft_profile or DRAFT_PROFILE).drafted_step_time()
            step_time = with_drafts(step_time, drafted, options.drafts, "always", shape.slots)
        found = {}
        for mode in modes:
            schedule = schedule_of(shape, mode, options.seed)
            workload = workload_of(shape, mode, options.updates, options.seed)
            found[mode.name] = predicted(workload, schedule, known, speed, run.updates_of(mode), step_time)
            run.write("prediction", mode=mode.name, learner_tokens_per_second=speed, **found[mode.name])
            run.log(f"predicted {mode.name}: {found[mode.name]['updates_per_hour']:.1f} updates/h, " + ", ".join(
                f"{part} {found[mode.name][part]:.2f}" for part in PARTS))  # fmt: skip
        return found

    said = {} if options.calibrate else predictions()
    run.start(engine)
    if options.calibrate:
        known, speed = run.calibrate()
        said = predictions()
    assert known is not None
    for turn, mode in product(range(1, options.rounds + 1), modes):
        if time.perf_counter() - run.began > options.stop_after:
            run.log(f"{mode.name}: left out, {options.stop_after:.0f} s have passed")
            continue
        run.attempt(mode, turn, said[mode.name], known.prefill_seconds_per_token)
        print_table(options.out / "end_to_end.jsonl")
    for version in range(1, options.file_updates + 1):
        run.update_through_files(version)
    if engine is None:
        run.engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
