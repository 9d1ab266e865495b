"""Generation with drafts (speculative decoding) on one GPU: vLLM in this process, no learner.

    python benchmarks/drafts.py run --out OUT [--shape 8b] [--stop-after 480] [--rows plain:baseline ...]
    python benchmarks/drafts.py table --out OUT            what was measured beside what the simulator predicts

A row is `when[ACCEPTANCE]:mode`, for example `always2.0:baseline` or `never:partial+elevator@oracle:reuse`:

- `plain`: an engine without speculative_config;
- `never`, `tail`, `always`: an engine with a drafter that drafts in no step, in those with so few running requests that
  it pays by the profile, or in all. One engine serves all of them: its drafter and its acceptance are switched.

All weights are random, so acceptance is vLLM's synthetic one, geometric over the drafted tokens with the given mean of
tokens per step. Response lengths are forced; the same prompts and lengths in every row of a mode. On a CPU, where vLLM
has no synthetic acceptance, hardly a draft is accepted: a trial of the script alone (--shape tiny).

Profiles of both engines are measured first. Every row is appended to OUT/drafts.jsonl as soon as it exists. A row that
does not fit in the time that is left, by its prediction, is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from end_to_end_workload import GIB, HERE, SHAPES, Mode, Shape, schedule_of, workload_of

from sortedrl.core.schedule import Schedule
from sortedrl.engines.draft_time import pays_up_to, with_drafts
from sortedrl.engines.kv_cache_reuse import KVCacheReuse
from sortedrl.engines.speculative import DraftCounts, RepeatLast
from sortedrl.engines.step_time import StepTime
from sortedrl.engines.vllm import VllmEngine
from sortedrl.studies import bench, profile_file
from sortedrl.studies import workload as simulated
from sortedrl.studies.measurements import machine, warm_up
from sortedrl.studies.profile import FIRST_PLACE_OF_DRAFTS, Cell, Profile, measure, prefill_of
from sortedrl.studies.workload import Workload

DRAFT_TOKENS = 3
BASELINE, PLANNED, ELEVATOR = "baseline", "on-policy+planned@oracle", "partial+elevator@oracle:reuse"
ROWS = (  # the most valuable first
    *(f"plain:{mode}" for mode in (BASELINE, ELEVATOR, PLANNED)),
    *(f"{when}:{BASELINE}" for when in ("always2.0", "never", "tail2.0")),
    *(f"{when}:{ELEVATOR}" for when in ("always2.0", "never")),
    *(f"{when}:{PLANNED}" for when in ("always2.0", "never")),
    *(f"{when}:{BASELINE}" for when in ("always1.5", "always2.5", "tail1.5", "tail2.5")),
    *(f"{when}:{ELEVATOR}" for when in ("tail2.0", "always1.5", "always2.5")),
    *(f"{when}:{PLANNED}" for when in ("tail2.0", "always1.5", "always2.5")),
)
SLACK = 1.1  # times the predicted seconds of a row


@dataclass(frozen=True)
class Row:
    name: str
    when: str  # plain, never, tail or always
    acceptance: float  # tokens per request and step with drafts; 1 without
    mode: Mode

    @classmethod
    def parsed(cls, text: str) -> Row:
        match = re.fullmatch(r"(plain|never|(tail|always)([\d.]+)):(.+)", text)
        if match is None:
            raise SystemExit(f"--rows {text}: use plain:MODE, never:MODE, tail2.0:MODE or always2.0:MODE")
        first, when, acceptance, mode = match.groups()
        return cls(text, when or first, float(acceptance or 1.0), Mode.parsed(mode))


class Measured:
    """The results in a folder: two profiles, and a line per row."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows_file = folder, folder / "drafts.jsonl"

    def profile_path(self, engine: str) -> Path:
        return self.folder / f"profile-{engine}.json"

    def profile(self, engine: str) -> Profile:
        """Of the engine `plain` or `drafts`. Without drafts, the earlier one of the 8B shape can stand in."""
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
    if row.mode.case.mode.startswith("partial"):
        return shape
    prompts = updates * shape.rollouts_per_update // shape.rollouts_per_prompt
    return replace(shape, prompts_per_cohort=prompts)


def work_of(shape: Shape, row: Row, updates: int, seed: int) -> tuple[Workload, Schedule]:
    sized = shape_of(shape, row, updates)
    return workload_of(sized, row.mode, updates, seed), schedule_of(sized, row.mode, seed)


def step_time_of(row: Row, measured: Measured, shape: Shape) -> StepTime:
    if row.when == "plain":
        return measured.profile("plain").step_time()
    known = measured.profile("drafts")
    if row.when == "never":
        return known.step_time()
    times = known.step_time(), known.drafted_step_time()
    return with_drafts(
        *times, row.acceptance, "tail" if row.when == "tail" else "always", shape.slots, context_of(shape)
    )


def context_of(shape: Shape) -> float:
    """Of a request while few run: the long responses."""
    return shape.prompt_tokens + shape.max_response_tokens / 2


def predicted(row: Row, measured: Measured, shape: Shape, updates: int, seed: int) -> dict[str, float]:
    workload, schedule = work_of(shape, row, updates, seed)
    kv_tokens = measured.profile("plain" if row.when == "plain" else "drafts").kv_tokens
    timed = replace(workload, step_time=step_time_of(row, measured, shape), kv_tokens=kv_tokens)
    found = simulated.run(timed, schedule, max_updates=updates)
    return {"kept": found.kept, "goodput": found.goodput, "bubble": found.bubble, "seconds": found.seconds}


def geometric(mean: float) -> float:
    """The chance that the next drafted token is accepted, for this mean of tokens per step."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**n for n in range(DRAFT_TOKENS + 1)) < mean:
            low = middle
        else:
            high = middle
    return low


# The engines


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.shape = options, shaped(options.shape, options.scale)
        self.measured = Measured(options.out)
        self.began = time.perf_counter()
        self.on_gpu = torch.cuda.is_available()
        self.max_length = self.shape.prompt_tokens + self.shape.max_response_tokens

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
            kv_cache_memory_bytes=int(self.shape.kv_gib * GIB),
            **({"gpu_memory_utilization": 0.3} if self.on_gpu else {"enforce_eager": True}),
            **({"speculative_config": self.speculative_config()} if name == "drafts" else {}),
        )
        for most_running in (0, engine.slots) if name == "drafts" else ():
            engine.drafter.most_running = most_running
            warm_up(engine, engine.info().vocabulary, self.max_length)
        warm_up(engine, engine.info().vocabulary, self.max_length)
        self.log(f"engine {name} started and warmed up in {self.seconds() - began:.0f} s")
        self.measured.append(kind="start", engine=name, machine=machine(), seconds=self.seconds() - began)
        return engine

    def speculative_config(self) -> dict[str, Any]:
        config = {
            "method": "custom_class",
            "model": f"{RepeatLast.__module__}.{RepeatLast.__name__}",
            "num_speculative_tokens": DRAFT_TOKENS,
        }
        if not self.on_gpu:
            return config
        rates = [0.5 ** (n + 1) for n in range(DRAFT_TOKENS)]  # replaced before every row
        return config | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}

    def accept(self, engine: VllmEngine, mean: float) -> None:
        """From the next step on, vLLM accepts drafts with this mean of tokens per step."""
        if not self.on_gpu:
            return
        chance = geometric(mean)

        def accept(worker: Any) -> None:
            with torch.inference_mode():
                worker.model_runner.rejection_sampler.synthetic_conditional_rates.fill_(chance)

        engine._core.collective_rpc(accept)

    def profile(self, engine: VllmEngine, name: str) -> None:
        slots, vocabulary = engine.slots, engine.info().vocabulary
        levels = sorted({1, *(max(1, slots // part) for part in (16, 8, 4, 2)), slots - 1})
        contexts = (32, max(64, self.shape.max_response_tokens // 4))
        cells = [(running, context) for context in contexts for running in levels]
        steps = 48 if self.on_gpu else 16
        draft_cells: list[Cell] = []
        if name == "drafts":
            self.accept(engine, 1.0)
            untimed = [cell for cell in cells if cell[1] == contexts[0]]  # kernels are compiled for each batch size
            measure(engine, untimed, vocabulary, steps=steps, repeats=1, first_place=2 * FIRST_PLACE_OF_DRAFTS)
            draft_cells = measure(
                engine, cells, vocabulary, steps=steps, repeats=1, first_place=FIRST_PLACE_OF_DRAFTS,
                drafter=engine.drafter,
            )  # fmt: skip
            engine.drafter.most_running = 0
        plain = measure(engine, cells, vocabulary, steps=steps, repeats=1)
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
            draft_tokens=DRAFT_TOKENS if name == "drafts" else 0,
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
        if self.seconds() + SLACK * said["seconds"] > self.options.stop_after:
            self.log(f"{row.name}: left out, it would take about {said['seconds']:.0f} s")
            return
        drafter = engine.drafter
        if drafter is not None:
            self.accept(engine, row.acceptance)
            drafter.most_running = self.most_running(row)
            drafter.counts = DraftCounts()
        engine.kv_cache_reuse = KVCacheReuse(keep=row.mode.reuse_kv_cache)
        began = self.seconds()
        found = bench.run(engine, workload, schedule, engine.info().vocabulary, max_updates=self.options.updates)
        passed = self.seconds() - began
        counts = None if drafter is None else asdict(drafter.counts)
        self.measured.append(
            kind="row",
            row=row.name,
            shape=self.options.shape,
            scale=self.options.scale,
            updates=self.options.updates,
            seed=self.options.seed,
            most_running=None if drafter is None else drafter.most_running,
            wall_seconds=passed,
            metrics=found,
            drafts=counts,
        )
        self.log(
            f"{row.name}: {found['kept']:,.0f} tok/s in {passed:.1f} s (predicted {said['kept']:,.0f}), "
            f"bubble {found['bubble']:.1%}"
        )

    def most_running(self, row: Row) -> int:
        if row.when != "tail":
            return self.shape.slots if row.when == "always" else 0
        known = self.measured.profile("drafts")
        times = known.step_time(), known.drafted_step_time()
        return pays_up_to(*times, row.acceptance, self.shape.slots, context_of(self.shape))

    def run_all(self, rows: Sequence[Row]) -> None:
        for name, some in by_engine(rows):
            engine = self.start(name)
            if self.options.profiles or not self.measured.profile_path(name).exists():
                self.profile(engine, name)
            for row in some:
                try:
                    self.run(engine, row)
                except Exception as error:  # the rows so far are on disk, and the next one may run
                    self.log(f"{row.name} failed: {type(error).__name__}: {error}")
                    self.measured.append(kind="failed", row=row.name, error=f"{type(error).__name__}: {error}")
            engine.close()


def by_engine(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for name, is_plain in (("plain", True), ("drafts", False)):
        if some := [row for row in rows if (row.when == "plain") == is_plain]:
            yield name, some


# The table


def table(measured: Measured) -> str:
    lines = [
        f"{'row':48} {'tok/s':>7} {'x plain':>8} {'said':>7} {'error':>7} {'bubble':>7} {'per step':>8}  drafts up to"
    ]
    found = [line for line in measured.rows() if line["kind"] == "row"]
    plain = {
        line["row"].partition(":")[2]: line["metrics"]["kept"] for line in found if line["row"].startswith("plain:")
    }
    for line in found:
        row, kept = Row.parsed(line["row"]), line["metrics"]["kept"]
        said = predicted(row, measured, shaped(line["shape"], line["scale"]), line["updates"], line["seed"])
        of_plain = plain.get(row.name.partition(":")[2])
        gain = f"{kept / of_plain:8.2f}" if of_plain else f"{'-':>8}"
        most = line["most_running"]
        lines.append(
            f"{row.name:48} {kept:7,.0f} {gain} {said['kept']:7,.0f} {said['kept'] / kept - 1:+7.1%} "
            f"{line['metrics']['bubble']:7.1%} {per_step(line['drafts'])}  {'-' if most is None else most}"
        )
    return "\n".join(lines)


def per_step(drafts: dict[str, Any] | None) -> str:
    """Tokens per request and step, over all steps."""
    if drafts is None:
        return f"{'-':>8}"
    rows = sum(int(running) * steps for running, steps in drafts["steps"].items())
    return f"{sum(drafts['tokens'].values()) / rows:8.2f}"


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
    parser.add_argument("--no-profiles", dest="profiles", action="store_false", help="use those that are in OUT")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.command == "run":
        Bench(options).run_all([Row.parsed(text) for text in options.rows])
    text = table(Measured(options.out))
    print(text)
    (options.out / "drafts.txt").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
