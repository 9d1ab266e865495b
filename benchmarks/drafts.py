"""Generation with drafts (speculative decoding) on one GPU: vLLM in this process, no learner.

    python benchmarks/drafts.py run --out OUT [--shape 8b] [--stop-after 480] [--rows plain:baseline ...]
    ... --end-to-end 3             then updates of end_to_end.py on the same engine, with drafts at 2.0 if it has any
    python benchmarks/drafts.py table --out OUT            what was measured beside what the simulator predicts

A row is `[drafter/]when[ACCEPTANCE[/LIMIT]]:mode`, for example `eagle3/always2.0:baseline` or
`never:partial+elevator:reuse`:

- `plain`: an engine without speculative_config;
- `never`, `tail`, `always`: an engine with a drafter that drafts in no step, in those with so few running requests that
  it pays by the profile (`tail2.0/64`: at most 64), or in all. One engine serves all of them: its drafter and its
  acceptance are switched;
- `eagle3/...`: vLLM's drafter with a head of random weights in the shape of published ones (shapes/*-eagle3). It keeps
  asynchronous scheduling, the newer model runner and full CUDA graphs of steps with drafts. The head runs in every
  step: `never` and `tail` only drop its drafts, and such steps have no full CUDA graphs. `eagle3/free2.0`: the head
  does not run and the drafts are those of an earlier step, for what a drafter without any cost would give;
- `ngram_gpu/always2.0`: vLLM's drafter without weights. It keeps asynchronous scheduling only. Random tokens never
  repeat, so where it finds nothing it is made to draft token 0, after its search;
- without a drafter: a class of our own (`custom_class`), which keeps none of them.

All weights are random, so acceptance is vLLM's synthetic one, geometric over the drafted tokens with the given mean of
tokens per step. Response lengths are forced; the same prompts and lengths in every row of a mode. On a CPU, where vLLM
has no synthetic acceptance, hardly a draft is accepted, and requests fail with drafts at wrong temperatures: a trial of
the script alone (--shape tiny).

Profiles of both engines are measured first. Every row is appended to OUT/drafts.jsonl as soon as it exists. A row that
does not fit in the time that is left, by its prediction, is left out. A row may be named twice, for the spread.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import end_to_end
import torch
from end_to_end_workload import GIB, HERE, SHAPES, Mode, Shape, schedule_of, workload_of
from synthetic_drafts import DRAFT_TOKENS, accepting, eagle3_head, geometric

from sortedrl.core.schedule import Schedule
from sortedrl.engines.shared import KVCacheReuse
from sortedrl.engines.speculative import DraftCounts, RepeatLast
from sortedrl.engines.step_time import StepTime, When, checking_drafts, pays_up_to, with_drafts
from sortedrl.engines.vllm import VllmEngine
from sortedrl.studies import bench, profile_file
from sortedrl.studies import workload as simulated
from sortedrl.studies.measurements import machine, warm_up
from sortedrl.studies.profile import FIRST_PLACE_OF_DRAFTS, Cell, Profile, measure, prefill_of
from sortedrl.studies.workload import Workload

BASELINE, PLANNED, ELEVATOR = "baseline", "on-policy+planned@oracle", "partial+elevator@oracle:reuse"
ROWS = (  # of each engine, the most valuable first
    *(f"plain:{mode}" for mode in (BASELINE, PLANNED, ELEVATOR)),
    *(f"eagle3/always2.0:{mode}" for mode in (BASELINE, PLANNED, ELEVATOR)),
    *(f"eagle3/{when}:{mode}" for when in ("always1.5", "always2.5") for mode in (PLANNED, ELEVATOR)),
    *(f"eagle3/tail2.0/64:{mode}" for mode in (BASELINE, PLANNED)),
    *(f"eagle3/never:{mode}" for mode in (BASELINE, ELEVATOR)),
    f"eagle3/tail1.5/74:{BASELINE}",
    f"eagle3/always2.0:{BASELINE}",
    *(f"eagle3/{row}" for row in (f"never:{PLANNED}", f"always1.5:{BASELINE}", f"always2.5:{BASELINE}")),
    f"eagle3/free2.0:{BASELINE}",
    f"ngram_gpu/always2.0:{BASELINE}",
)
SLACK = 1.1  # times the predicted seconds of a row
END_TO_END_UPDATES = 5  # simulated
END_TO_END_ACCEPTANCE = 2.0
# Of each engine with its profile, in this order, measured on an H200; a guess for the last one.
START_SECONDS = {"plain": 66, "drafts": 40, "eagle3": 80, "ngram_gpu": 110}

SWITCHED = ("drafts", "eagle3")  # engines whose drafts can be left out of a step


@dataclass(frozen=True)
class Row:
    name: str
    engine: str  # plain, drafts (our own class), eagle3 or ngram_gpu
    when: str  # plain, never, tail, always or free
    acceptance: float  # tokens per request and step with drafts; 1 without
    mode: Mode
    limit: int | None  # of tail, on running requests; None: by the profile

    @classmethod
    def parsed(cls, text: str) -> Row:
        pattern = r"(?:(eagle3|ngram_gpu)/)?(plain|never|(tail|always|free)([\d.]+)(?:/(\d+))?):(.+)"
        match = re.fullmatch(pattern, text)
        if match is None:
            raise SystemExit(f"--rows {text}: use plain:MODE, never:MODE, tail2.0:MODE or eagle3/always2.0:MODE")
        drafter, first, when, acceptance, limit, mode = match.groups()
        engine = "plain" if first == "plain" else drafter or "drafts"
        return cls(
            text, engine, when or first, float(acceptance or 1.0), Mode.parsed(mode), int(limit) if limit else None
        )


class Measured:
    """The results in a folder: a profile per engine, and a line per row."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows_file = folder, folder / "drafts.jsonl"

    def profile_path(self, engine: str) -> Path:
        return self.folder / f"profile-{engine}.json"

    def profile(self, engine: str) -> Profile:
        """Of an engine. Without drafts, the earlier one of the 8B shape can stand in."""
        path = self.profile_path(engine)
        earlier = SHAPES["8b"].profile
        if engine == "plain" and not path.exists() and earlier is not None:
            path = earlier
        return profile_file.read(path)

    def append(self, **line: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.rows_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.rows_file.read_text(encoding="utf-8").splitlines()]


def shaped(name: str, scale: float) -> Shape:
    shape = SHAPES[name]
    return replace(
        shape, median_length=scale * shape.median_length, max_response_tokens=round(scale * shape.max_response_tokens)
    )


def shape_of(shape: Shape, row: Row, updates: int) -> Shape:
    """A cohort is what is trained on, so that a gated mode is measured whole; the elevator keeps its larger window."""
    if row.mode.case.schedule.mode.startswith("partial"):
        return shape
    prompts = updates * shape.rollouts_per_update // shape.rollouts_per_prompt
    return replace(shape, prompts_per_cohort=prompts)


def work_of(shape: Shape, row: Row, updates: int, seed: int) -> tuple[Workload, Schedule]:
    sized = shape_of(shape, row, updates)
    return workload_of(sized, row.mode, updates, seed), schedule_of(sized, row.mode, seed)


def step_time_of(row: Row, measured: Measured, shape: Shape) -> StepTime:
    if row.when in ("plain", "never"):
        return without_drafts(row.engine, measured)
    times = times_of(row, measured)
    when: When = "tail" if row.when == "tail" and row.limit is None else "always"
    return with_drafts(*times, row.acceptance, when, row.limit or shape.slots, context_of(shape))


def times_of(row: Row, measured: Measured) -> tuple[StepTime, StepTime]:
    """Of steps without and with drafts."""
    if row.when == "free":  # not measured apart: the simulator's model of a drafter without a profile
        plain = without_drafts("plain", measured)
        return plain, checking_drafts(plain, DRAFT_TOKENS)
    return without_drafts(row.engine, measured), measured.profile(row.engine).drafted_step_time()


def without_drafts(engine: str, measured: Measured) -> StepTime:
    """A draft model runs in steps without drafts, too. Where those were not timed, they are taken to last as long as
    without a drafter, and the time by which the model prolongs the step of one request."""
    profile = measured.profile(engine)
    if not profile.draft_cells or profile.cells != profile.draft_cells:
        return profile.step_time()
    plain = measured.profile("plain").step_time()
    prolonged = profile.drafted_step_time().at(1) - plain.at(DRAFT_TOKENS + 1)
    return replace(plain, steps=tuple((running, seconds + prolonged) for running, seconds in plain.steps))


def context_of(shape: Shape) -> float:
    """Of a request while few run: the long responses."""
    return shape.prompt_tokens + shape.max_response_tokens / 2


def predicted(row: Row, measured: Measured, shape: Shape, updates: int, seed: int) -> dict[str, float]:
    workload, schedule = work_of(shape, row, updates, seed)
    kv_tokens = measured.profile(row.engine).kv_tokens
    timed = replace(workload, step_time=step_time_of(row, measured, shape), kv_tokens=kv_tokens)
    found = simulated.run(timed, schedule, max_updates=updates)
    return {"kept": found.kept, "goodput": found.goodput, "bubble": found.bubble, "seconds": found.seconds}


# The engines


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.shape = options, shaped(options.shape, options.scale)
        self.measured = Measured(options.out)
        self.began = time.perf_counter()
        self.profiled: set[str] = set()
        self.on_gpu = torch.cuda.is_available()
        longest = max(self.shape.max_response_tokens, SHAPES[options.shape].max_response_tokens)
        self.max_length = self.shape.prompt_tokens + longest
        self.last_row_at = options.stop_after - options.end_to_end_seconds

    def log(self, text: str) -> None:
        print(f"[{self.seconds():6.1f} s] {text}", flush=True)

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def start(self, name: str) -> VllmEngine:
        began = self.seconds()
        engine = VllmEngine(
            str(HERE / "shapes" / self.shape.folder),
            slots=self.shape.slots,
            eos_token_ids=(),
            max_length=self.max_length,
            load_format="dummy",
            dtype="bfloat16" if self.on_gpu else "float32",
            max_num_batched_tokens=self.shape.prefill_tokens_per_step,
            kv_cache_memory_bytes=int(self.kv_gib() * GIB),
            **({"gpu_memory_utilization": 0.3} if self.on_gpu else {"enforce_eager": True}),
            **({} if name == "plain" else {"speculative_config": self.speculative_config(name)}),
        )
        if name == "ngram_gpu":
            engine._core.collective_rpc(draft_without_match)
        for most_running in (0, engine.slots) if name in SWITCHED else (engine.slots,):
            self.draft_up_to(engine, name, most_running)
            warm_up(engine, engine.info().vocabulary, self.max_length)
        warm_up(engine, engine.info().vocabulary, self.max_length)
        self.log(f"engine {name} started and warmed up in {self.seconds() - began:.0f} s")
        config = engine._llm.vllm_config
        self.measured.append(
            kind="start",
            engine=name,
            machine=machine(),
            seconds=self.seconds() - began,
            async_scheduling=bool(config.scheduler_config.async_scheduling),
            model_runner=engine._core.collective_rpc(lambda worker: type(worker.model_runner).__module__)[0],
            cudagraph_mode=str(config.compilation_config.cudagraph_mode),
        )
        return engine

    def speculative_config(self, name: str) -> dict[str, Any]:
        if name == "eagle3":
            config = eagle3_head(HERE / "shapes" / self.shape.folder)
        elif name == "drafts":
            config = {"method": "custom_class", "model": f"{RepeatLast.__module__}.{RepeatLast.__name__}"}
        else:
            config = {"method": name}
        config["num_speculative_tokens"] = DRAFT_TOKENS
        return config | (accepting(2.0) if self.on_gpu else {})  # switched before every row

    def accept(self, engine: VllmEngine, mean: float) -> None:
        """From the next step on, vLLM accepts drafts with this mean of tokens per step."""
        if not self.on_gpu:
            return
        chance = geometric(mean)

        def accept(worker: Any) -> None:
            with torch.inference_mode():
                worker.model_runner.rejection_sampler.synthetic_conditional_rates.fill_(chance)

        engine._core.collective_rpc(accept)

    def draft_up_to(self, engine: VllmEngine, name: str, most_running: int) -> None:
        """From the next step on. A draft model still runs in steps whose drafts are not used."""
        if name == "drafts":
            engine.drafter.most_running = most_running
        elif name == "eagle3":
            tokens = (DRAFT_TOKENS if running <= most_running else 0 for running in range(1, engine.slots + 1))
            engine._scheduler.dynamic_sd_lookup = None if most_running >= engine.slots else [0, *tokens]

    def profile(self, engine: VllmEngine, name: str) -> None:
        slots, vocabulary = engine.slots, engine.info().vocabulary
        levels = sorted({1, *(max(1, slots // part) for part in (16, 8, 4, 2)), slots - 1})
        contexts = (32, max(64, self.shape.max_response_tokens // 4))
        cells = [(running, context) for context in contexts for running in levels]
        steps = 48 if self.on_gpu else 16
        draft_cells: list[Cell] = []
        untimed = [cell for cell in cells if cell[1] == contexts[0]]  # kernels are compiled for each batch size
        if name != "plain":
            self.accept(engine, 1.0)
            measure(engine, untimed, vocabulary, steps=8, repeats=1, first_place=2 * FIRST_PLACE_OF_DRAFTS)
            draft_cells = measure(
                engine, cells, vocabulary, steps=steps, repeats=1, first_place=FIRST_PLACE_OF_DRAFTS,
                counts=engine.draft_counts,
            )  # fmt: skip
        if name in SWITCHED:
            self.draft_up_to(engine, name, 0)
            measure(engine, untimed, vocabulary, steps=8, repeats=1, first_place=3 * FIRST_PLACE_OF_DRAFTS)
        timed = name == "plain" or name in SWITCHED
        plain = measure(engine, cells, vocabulary, steps=steps, repeats=1) if timed else draft_cells
        found = Profile(
            engine="vllm",
            model=self.shape.folder,
            slots=slots,
            cells=tuple(plain),
            prefill_seconds_per_token=prefill_of(plain),
            prefill_tokens_per_step=engine.info().prefill_tokens_per_step,
            kv_tokens=engine.info().kv_tokens,
            weight_update_seconds=None,
            machine=machine(),
            draft_tokens=0 if name == "plain" else DRAFT_TOKENS,
            draft_cells=tuple(draft_cells),
        )
        found.write(self.measured.profile_path(name))
        for cell, drafted in zip(plain, draft_cells or plain, strict=True):
            with_ = f", with drafts {1e3 * drafted.step_seconds:7.3f} ms" if draft_cells else ""
            step = 1e3 * cell.step_seconds
            self.log(f"{name}: {cell.running:4d} running, contexts of {cell.context:4d}: {step:7.3f} ms{with_}")

    def run(self, engine: VllmEngine, row: Row) -> None:
        workload, schedule = work_of(self.shape, row, self.options.updates, self.options.seed)
        said = predicted(row, self.measured, self.shape, self.options.updates, self.options.seed)
        if self.seconds() + SLACK * said["seconds"] > self.last_row_at:
            self.log(f"{row.name}: left out, it would take about {said['seconds']:.0f} s")
            return
        most_running, counts = None, DraftCounts()
        if row.engine != "plain":
            most_running = self.most_running(row)
            if row.when == "tail" and most_running in (0, self.shape.slots):
                self.log(f"{row.name}: left out, drafts pay up to {most_running} running requests")
                return
        self.log(
            f"{row.name}: predicted {said['kept']:,.0f} tok/s in {said['seconds']:.0f} s, bubble {said['bubble']:.1%}"
        )
        self.measured.append(kind="prediction", row=row.name, **said)
        if most_running is not None:
            self.accept(engine, row.acceptance)
            self.draft_up_to(engine, row.engine, most_running)
            count_steps(engine, counts)
        if row.engine == "eagle3":
            engine._core.collective_rpc(head_switch(runs=row.when != "free"))
        engine.kv_cache_reuse = KVCacheReuse(keep=row.mode.reuse_kv_cache)
        began = self.seconds()
        found = bench.run(engine, workload, schedule, engine.info().vocabulary, max_updates=self.options.updates)
        passed = self.seconds() - began
        self.measured.append(
            kind="row",
            row=row.name,
            shape=self.options.shape,
            scale=self.options.scale,
            updates=self.options.updates,
            seed=self.options.seed,
            most_running=most_running,
            wall_seconds=passed,
            metrics=found,
            drafts=None if most_running is None else asdict(counts),
        )
        self.log(
            f"{row.name}: {found['kept']:,.0f} tok/s in {passed:.1f} s (predicted {said['kept']:,.0f}), "
            f"bubble {found['bubble']:.1%}, {found['failures']} failures, {per_step(asdict(counts))} tokens per step"
        )

    def most_running(self, row: Row) -> int:
        if row.when != "tail":
            return 0 if row.when == "never" else self.shape.slots
        if row.limit is not None:
            return row.limit
        times = times_of(row, self.measured)
        return pays_up_to(*times, row.acceptance, self.shape.slots, context_of(self.shape))

    def run_all(self, rows: Sequence[Row]) -> None:
        for name in START_SECONDS:
            left = [row for row in rows if row.engine == name]
            while left and self.seconds() + START_SECONDS[name] < self.options.stop_after:
                left = self.run_some(name, left)
            for row in left:
                self.log(f"{row.name}: left out, there is no time to start its engine")

    def run_some(self, name: str, rows: list[Row]) -> list[Row]:
        """Start an engine and run the rows. After a failure the engine is in an unknown state: what is left to run."""
        try:
            engine = self.start(name)
            if name not in self.profiled and (self.options.profiles or not self.measured.profile_path(name).exists()):
                self.profile(engine, name)
                self.profiled.add(name)
        except Exception as error:
            self.failed(f"engine {name}", error)
            return []
        left = list(rows)
        try:
            while left:
                row = left.pop(0)
                self.run(engine, row)
            if self.options.end_to_end:
                self.end_to_end(engine, name)
        except Exception as error:
            self.failed(row.name, error)
        engine.close()
        return left

    def end_to_end(self, engine: VllmEngine, name: str) -> None:
        """At the shape's own lengths, into OUT/end_to_end-NAME."""
        words = ["--modes", "baseline", "--updates", str(self.options.end_to_end), "--shape", self.options.shape]
        words += ["--out", str(self.options.out / f"end_to_end-{name}"), "--kv-gib", str(self.kv_gib())]
        words += ["--stop-after", str(self.options.stop_after - self.seconds())]
        words += [] if self.shape.profile is not None else ["--calibrate"]
        if name != "plain":
            self.accept(engine, END_TO_END_ACCEPTANCE)
            self.draft_up_to(engine, name, engine.slots)
            if name == "eagle3":
                engine._core.collective_rpc(head_switch(runs=True))
            words += ["--drafts", str(END_TO_END_ACCEPTANCE)]
            words += ["--draft-profile", str(self.measured.profile_path(name))]
        end_to_end.main(words, engine)

    def kv_gib(self) -> float:
        return float(self.options.kv_gib or self.shape.kv_gib)

    def failed(self, what: str, error: Exception) -> None:
        traceback.print_exc()
        self.log(f"{what} failed: {type(error).__name__}: {error}")
        self.measured.append(kind="failed", row=what, error=f"{type(error).__name__}: {error}")


def count_steps(engine: VllmEngine, counts: DraftCounts) -> None:
    """Count the tokens of each step from now on. Only a drafter of our own could tell."""

    def take(outputs: Sequence[Any]) -> list[Any]:
        counts.add([output.new_token_ids for output in outputs])
        return VllmEngine._take(engine, outputs)

    engine._take = take  # type: ignore[method-assign]


def head_switch(*, runs: bool) -> Callable[[Any], None]:
    """For vLLM's newer model runner: whether the head of eagle3 runs. If not, the last drafts are proposed again."""

    def switch(worker: Any) -> None:
        speculator = getattr(worker.model_runner, "speculator", None)
        if runs:
            vars(speculator or worker).pop("propose", None)
        else:
            speculator.propose = lambda batch, *_, **__: speculator.draft_tokens[: batch.num_reqs]

    return switch


def draft_without_match(worker: Any) -> None:
    """vLLM's ngram_gpu searches as always, and drafts token 0 where it has found nothing."""
    drafter = worker.model_runner.drafter
    search = drafter.propose

    def propose(*arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        drafts, found = search(*arguments, **named)
        return drafts.clamp(min=0), torch.full_like(found, DRAFT_TOKENS)

    drafter.propose = propose


# The table


def table(measured: Measured) -> str:
    lines = [
        f"{'row':48} {'tok/s':>7} {'x plain':>8} {'said':>7} {'error':>7} {'bubble':>7} {'per step':>8}  drafts up to"
    ]
    found = [line for line in measured.rows() if line["kind"] == "row"]
    plain: dict[str, list[float]] = {}  # of a mode, every time it was run
    for line in found:
        when, _, mode = line["row"].partition(":")
        if when == "plain":
            plain.setdefault(mode, []).append(line["metrics"]["kept"])
    for line in found:
        row, kept = Row.parsed(line["row"]), line["metrics"]["kept"]
        if row.when == "tail":
            row = replace(row, limit=line["most_running"])  # as it was run
        said = predicted(row, measured, shaped(line["shape"], line["scale"]), line["updates"], line["seed"])
        of_plain = plain.get(row.name.partition(":")[2])
        gain = f"{kept / fmean(of_plain):8.2f}" if of_plain else f"{'-':>8}"
        most = line["most_running"]
        lines.append(
            f"{row.name:48} {kept:7,.0f} {gain} {said['kept']:7,.0f} {said['kept'] / kept - 1:+7.1%} "
            f"{line['metrics']['bubble']:7.1%} {per_step(line['drafts'])}  {'-' if most is None else most}"
        )
    return "\n".join(lines)


def end_to_end_table(measured: Measured) -> str:
    """What these step times give with a learner on the same GPU: the workload and the learner of end_to_end.py."""
    lines: list[str] = []
    plain: dict[str, float] = {}  # updates per hour by mode; rows without drafts come first
    found = {line["row"]: line for line in measured.rows() if line["kind"] == "row"}
    if not found:
        return ""
    for line in found.values():
        row, shape = Row.parsed(line["row"]), SHAPES[line["shape"]]
        if (speed := shape.learner_tokens_per_second) is None:
            return ""
        schedule = schedule_of(shape, row.mode, line["seed"])
        timed = replace(
            workload_of(shape, row.mode, END_TO_END_UPDATES, line["seed"]),
            step_time=step_time_of(row, measured, shape),
            kv_tokens=measured.profile(row.engine).kv_tokens,
            weight_update_seconds=0.3,
            learner_seconds_per_token=1 / speed,
            learner_seconds_per_update=schedule.rollouts_needed * shape.prompt_tokens / speed,
        )
        rate = simulated.run(timed, schedule, max_updates=END_TO_END_UPDATES).updates_per_hour
        gain = rate / plain.setdefault(row.name.partition(":")[2], rate)
        lines.append(f"{row.name:48} {rate:7.1f} updates per hour {gain:8.2f}")
    head = f"simulated end to end, median {shape.median_length:.0f}, limit {shape.max_response_tokens}:"
    return "\n".join([head, *lines])


def per_step(drafts: dict[str, Any] | None) -> str:
    """Tokens per request and step, over all steps."""
    if drafts is None:
        return f"{'-':>8}"
    rows = sum(int(running) * steps for running, steps in drafts["steps"].items())
    return f"{sum(drafts['tokens'].values()) / max(1, rows):8.2f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "table"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="ROW")
    parser.add_argument("--scale", type=float, default=1.0, help="of response lengths: 0.5 takes half the time")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--stop-after", type=float, default=480, metavar="SECONDS", help="start no row that ends later")
    parser.add_argument("--kv-gib", type=float, help="size of the engine's KV cache")
    parser.add_argument("--end-to-end", type=int, default=0, metavar="UPDATES", help="the first is not counted")
    parser.add_argument("--end-to-end-seconds", type=float, default=0, help="of --stop-after, where no row may run")
    parser.add_argument("--no-profiles", dest="profiles", action="store_false", help="use those that are in OUT")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.command == "run":
        Bench(options).run_all([Row.parsed(text) for text in options.rows])
    measured = Measured(options.out)
    text = f"{table(measured)}\n\n{end_to_end_table(measured)}".strip()
    print(text)
    (options.out / "drafts.txt").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
