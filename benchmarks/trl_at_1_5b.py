"""TRL's GRPOTrainer with colocated vLLM beside SortedGRPOTrainer at Qwen2.5-1.5B's shape: trained tokens per second.

    python benchmarks/trl_at_1_5b.py --out OUT [--budget 480] [--rounds 2]
    python benchmarks/trl_at_1_5b.py --shape tiny --out OUT            a trial without a GPU; needs vLLM for CPUs
    python benchmarks/trl_at_1_5b.py --out OUT --contenders "sorted, elevator" "sorted, elevator, reuse"    these alone
    python benchmarks/trl_at_1_5b.py --summarize OUT/trl_at_1_5b.jsonl   the table again

All contenders share one vLLM, the one that GRPOTrainer starts. They have the same prompts, the same GRPOConfig
(bfloat16, gradient checkpointing, micro-batches of 8 rows, no KL term, no pass for importance weights) and a copy of
the same random weights each. Response lengths are forced: response k to a prompt has the same length for every
contender. They take turns, `--rounds` times; each round has its own prompts, and its runs start from nothing.

Not counted: one short update per contender at the start, which compiles and allocates, and in every round the first
update of the elevator. Its second one still generates more than it trains on: simulated, these four updates have 0 to
7% fewer tokens per second than a long run. `carried`: tokens of unfinished and untrained responses after an update.
`positions`: what the learner computes, with padding. GRPOTrainer pads an update to its longest response,
SortedGRPOTrainer each micro-batch, so that its baseline differs, too. Generation includes the weight update.

Every update is a line of OUT/trl_at_1_5b.jsonl at once. The prediction comes first: simulated generation, and a learner
of LEARNER_POSITIONS_PER_SECOND. No update starts that would not end within the budget.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from end_to_end_workload import HERE, SHAPES, Mode, Shape, predicted, schedule_of, workload_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl.generation import vllm_generation
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from sortedrl.core.engine import Request
from sortedrl.core.rollout import Prompt
from sortedrl.engines import vllm as our_vllm
from sortedrl.engines.lengths import ForcedLengths, LognormalLengths
from sortedrl.engines.shared import KVCacheReuse
from sortedrl.integrations.trl import SortedGRPOTrainer
from sortedrl.studies import profile_file
from sortedrl.studies.measurements import machine, random_prompts

MICRO_BATCH = 8  # rows
MEMORY_FRACTION = 0.3  # of the GPU, for vLLM
LEARNER_POSITIONS_PER_SECOND = 20_500  # measured: 20,000 (GRPOTrainer) to 21,200
SORTED_PADDING = 1.1  # positions per token in micro-batches that are cut by length, assumed
PREDICTED_UPDATES = 10
WARM_UP_TOKENS = 64  # limit of the responses of the first update
PROFILE = HERE / "measured" / "h200-1.5b" / "profile_fourth.json"


@dataclass(frozen=True)
class Contender:
    name: str
    mode: str | None  # of SortedGRPOTrainer; None: GRPOTrainer
    updates: int  # in a round
    not_counted: int = 0  # the first ones of a round
    reuse_kv_cache: bool = False


REFERENCE = "GRPOTrainer"
CONTENDERS = (
    Contender(REFERENCE, None, 2),
    Contender("sorted, baseline", "baseline", 2),
    Contender("sorted, elevator", "partial+elevator", 5, 1),
    Contender("sorted, elevator, reuse", "partial+elevator", 5, 1, reuse_kv_cache=True),
)


class Lengths:
    """The forced lengths by prompt and place in its group, the same for every contender."""

    def __init__(self, shape: Shape, seed: int, prompts: Sequence[Prompt]) -> None:
        self._draw = LognormalLengths(
            mu=math.log(shape.median_length), limit=shape.max_response_tokens, shortest=16, seed=seed
        )
        self._group = shape.rollouts_per_prompt
        self._prompt_of = {tuple(prompt.tokens): prompt for prompt in prompts}
        self.limit = shape.max_response_tokens

    def of(self, prompt_tokens: Iterable[int], place: int) -> int:
        return min(self.limit, self._draw(self._prompt_of[tuple(prompt_tokens)], place))

    def of_request(self, request: Request) -> int:
        return self.of(request.prompt.tokens, request.id % self._group)

    def force(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `LLM.generate`, which TRL calls with every prompt once per response."""

        def forced(prompts: Any, sampling_params: Any, **named: Any) -> Any:
            seen: Counter[tuple[int, ...]] = Counter()
            parameters = []
            for prompt in prompts:
                tokens = tuple(prompt["prompt_token_ids"])
                own = sampling_params.clone()
                own.max_tokens, own.ignore_eos = self.of(tokens, seen[tokens]), True
                seen[tokens] += 1
                parameters.append(own)
            return generate(prompts, sampling_params=parameters, **named)

        return forced


class Recorder(TrainerCallback):  # type: ignore[misc]
    """One line per update. Its time counts from the end of the one before it."""

    def __init__(self, write: Callable[..., None], ends: float) -> None:
        self._write, self._ends = write, ends
        self.about: dict[str, Any] = {}
        self.not_counted = 0
        self.generation = 0.0
        self._lengths: list[int] = []
        self._began: float | None = None
        self._line: dict[str, Any] = {}
        self.trainer: Any = None
        self.longest = 0.0  # seconds of an update

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*positional: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return generate(*positional, **named)
            finally:
                self.generation += time.perf_counter() - began

        return timed

    def reward(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self._lengths = [len(ids) for ids in completion_ids]
        return [float(sum(ids) & 1) for ids in completion_ids]  # arbitrary

    def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self._began = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self._began is None:
            self._began, self.generation = time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        assert self._began is not None
        seconds, self._began = now - self._began, now
        self.longest = max(self.longest, seconds)
        self._line = self.about | {
            "update": state.global_step,
            "is_counted": state.global_step > self.not_counted,
            "seconds": seconds,
            "generation": self.generation,
            "learner": seconds - self.generation,
            "rollouts": len(self._lengths),
            "tokens": sum(self._lengths),
            "longest": max(self._lengths),
            "positions": self._positions(),
            **self._carried(),
        }
        self.generation = 0.0
        control.should_training_stop |= now + self.longest > self._ends

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **named: Any) -> None:
        if self._line:
            names = ("mismatch", "staleness_mean", "bubble")
            found = {name: logs[f"sortedrl/{name}"] for name in names if f"sortedrl/{name}" in logs}
            self._write(**self._line, **found)
            self._line = {}

    def _positions(self) -> int:
        buffered = self.trainer._buffered_inputs
        return sum(part["prompt_ids"].numel() + part["completion_ids"].numel() for part in buffered)

    def _carried(self) -> dict[str, int]:
        run = getattr(self.trainer, "_run", None)
        carried = [] if run is None else [len(rollout) for rollout in run.controller.live.values()]
        return {"carried": sum(carried), "carried_rollouts": sum(1 for length in carried if length)}


def word_tokenizer(config: Any) -> PreTrainedTokenizerFast:
    """One word per id of the vocabulary: no tokenizer of a real model is at hand, and every id must have a text."""
    special = {config.eos_token_id: "<eos>", config.bos_token_id: "<pad>"}
    words = {special.get(id, f"t{id}"): id for id in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def dataset(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerFast) -> Any:
    texts = [" ".join(tokenizer.convert_ids_to_tokens(list(prompt.tokens))) for prompt in prompts]
    return Dataset(InMemoryTable.from_pydict({"prompt": texts}), fingerprint=f"prompts-{prompts[0].id}")


class Bench:
    """All contenders in this process: their trainers are made once and train once per round."""

    def __init__(self, options: argparse.Namespace, shape: Shape) -> None:
        self.options, self.shape = options, shape
        self.began = time.perf_counter()
        self.on_gpu = torch.cuda.is_available()
        self.rows = (max(one.updates for one in CONTENDERS) + 1) * shape.rollouts_per_update + (
            shape.prompts_per_cohort * shape.rollouts_per_prompt
        )
        self.rows //= shape.rollouts_per_prompt
        config = AutoConfig.from_pretrained(HERE / "shapes" / shape.folder)
        prompts = random_prompts(range((options.rounds + 1) * self.rows), shape.prompt_tokens, config.vocab_size)
        self.prompts = [prompts[at : at + self.rows] for at in range(0, len(prompts), self.rows)]  # by round
        self.lengths = Lengths(shape, options.seed, prompts)
        self.config = config

    def write(self, **line: Any) -> None:
        line = {"at": round(time.perf_counter() - self.began, 1), **line}
        with (self.options.out / "trl_at_1_5b.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def start(self, folder: Path) -> None:
        device, dtype = ("cuda", torch.bfloat16) if self.on_gpu else ("cpu", torch.float32)
        torch.manual_seed(self.options.seed)
        with torch.device(device):
            AutoModelForCausalLM.from_config(self.config, dtype=dtype).save_pretrained(folder)  # type: ignore[no-untyped-call]
        tokenizer = word_tokenizer(self.config)
        tokenizer.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
        copies = [copy.deepcopy(model) for _ in CONTENDERS[1:]]
        if not self.on_gpu:
            vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True, dtype="float32")
        # Before TRL's vLLM sets LOCAL_RANK: accelerate would take later configs for those of one rank of several.
        configs = [self._config_of(contender, folder) for contender in CONTENDERS]
        self.trainers: dict[str, Any] = {}
        self.recorders: dict[str, Recorder] = {}
        for contender, config, own in zip(CONTENDERS, configs, [model, *copies], strict=True):
            recorder = Recorder(self.write, self.began + self.options.budget)
            given = {
                "model": own,
                "reward_funcs": recorder.reward,
                "args": config,
                "train_dataset": dataset(self.prompts[0], tokenizer),
                "processing_class": tokenizer,
                "callbacks": [recorder],
            }
            trainer: Any
            if contender.mode is None:
                trainer = GRPOTrainer(**given)
                trainer._generate_single_turn = recorder.timed(trainer._generate_single_turn)
                llm = trainer.vllm_generation.llm
                llm.generate = self.lengths.force(llm.generate)
                self.engine = self._engine_on(llm.llm_engine, str(folder))
                for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                    os.environ.pop(name, None)
                trainer.vllm_generation.sync_weights = self._checked_sync(trainer.vllm_generation.sync_weights, own)
            else:
                engine = ForcedLengths(self.engine, self.lengths.of_request)
                trainer = SortedGRPOTrainer(**given, schedule=contender.mode, engine=engine)
                trainer._next_update = recorder.timed(trainer._next_update)
            trainer.remove_callback(PrinterCallback)
            recorder.trainer = trainer
            self.trainers[contender.name], self.recorders[contender.name] = trainer, recorder
            ranks = str(trainer.accelerator.distributed_type)
            self.write(ready=contender.name, ranks=ranks, dtype=str(own.dtype), memory_gib=self._memory_gib())

    def _checked_sync(self, sync: Callable[[], None], model: Any) -> Callable[[], None]:
        """TRL loads into vLLM's parameters, which the CPU build has repacked: then the weights go in as ours do."""

        def synced() -> None:
            try:
                sync()
            except AttributeError as error:
                self.write(contender=REFERENCE, sync_weights=repr(error))
                self.engine.update_weights(model.named_parameters(), 0)

        return synced

    def _engine_on(self, llm_engine: Any, folder: str) -> our_vllm.VllmEngine:
        """Our engine on TRL's vLLM instead of one that it would start itself: same settings, same memory, one start."""
        our_vllm._started_vllm = lambda **ignored: llm_engine
        shape = self.shape
        length = shape.prompt_tokens + shape.max_response_tokens
        return our_vllm.VllmEngine(folder, slots=shape.rollouts_per_update, eos_token_ids=(), max_length=length)

    def _config_of(self, contender: Contender, folder: Path) -> GRPOConfig:
        shape = self.shape
        of_trls_vllm = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": MEMORY_FRACTION if self.on_gpu else 0.05,
            "vllm_max_model_length": shape.prompt_tokens + shape.max_response_tokens,
            "vllm_importance_sampling_correction": False,  # no further forward pass: ours makes none
        }
        return GRPOConfig(
            output_dir=str(folder / contender.name),
            max_steps=1,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=shape.rollouts_per_update // MICRO_BATCH,
            num_generations=shape.rollouts_per_prompt,
            max_completion_length=shape.max_response_tokens,
            shuffle_dataset=False,
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            bf16=self.on_gpu,
            use_cpu=not self.on_gpu,
            seed=self.options.seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **(of_trls_vllm if contender.mode is None else {}),
        )

    def _memory_gib(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**30 if self.on_gpu else 0.0

    def run(self, contender: Contender, turn: int) -> None:
        """Round 0 warms up. A failure is written, and the next contender starts."""
        trainer, recorder = self.trainers[contender.name], self.recorders[contender.name]
        if time.perf_counter() - self.began + recorder.longest > self.options.budget:
            self.write(contender=contender.name, round=turn, left_out="the budget is used up")
            return
        self.lengths.limit = self.shape.max_response_tokens if turn else WARM_UP_TOKENS
        recorder.about = {"contender": contender.name, "round": turn}
        recorder.not_counted = contender.not_counted if turn else 1
        trainer.train_dataset = dataset(self.prompts[turn], trainer.processing_class)
        trainer.args.max_steps = contender.updates if turn else 1
        trainer.args.output_dir += f"-{turn}"  # with an event log of its own
        self.engine.kv_cache_reuse = KVCacheReuse(keep=contender.reuse_kv_cache)
        try:
            self.engine.update_weights(None, 0)  # clears what is left of the contender before
            reused = self.engine.reused_kv_tokens
            trainer.train()
            self.write(
                contender=contender.name,
                round=turn,
                reused_kv_tokens=self.engine.reused_kv_tokens - reused,
                memory_gib=self._memory_gib(),
            )
        except Exception as error:
            self.write(contender=contender.name, round=turn, error=repr(error), traceback=traceback.format_exc())


def predictions(shape: Shape, seed: int) -> dict[str, dict[str, float]]:
    """From the simulator for generation, and from the assumed speed of the learner."""
    known = replace(profile_file.read(PROFILE), prefill_tokens_per_step=4096)  # TRL's setting
    speed, found = LEARNER_POSITIONS_PER_SECOND, {}
    for contender in CONTENDERS:
        mode = Mode.parsed((contender.mode or "baseline") + (":reuse" if contender.reuse_kv_cache else ""))
        schedule, workload = schedule_of(shape, mode, seed), workload_of(shape, mode, PREDICTED_UPDATES, seed)
        said = predicted(workload, schedule, known, speed / SORTED_PADDING, PREDICTED_UPDATES)
        tokens = said["trained_tokens_per_second"] * said["seconds_per_update"]
        learner = said["learner"]
        if contender.mode is None:
            learner = shape.rollouts_per_update * (shape.prompt_tokens + shape.max_response_tokens) / speed
        generation = said["generate"] + said["re_prefill"] + said["weights"]
        rate = tokens / (generation + learner)
        found[contender.name] = {"generation": generation, "learner": learner, "tokens_per_second": rate}
    return found


def rate(lines: Sequence[dict[str, Any]]) -> float:
    return float(sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines))


def table(path: Path) -> str:
    """Of the counted updates, each column round by round."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    said = next((line["predicted"] for line in lines if "predicted" in line), {})
    counted = [line for line in lines if line.get("is_counted") and line["round"]]
    columns = ("updates", "s per update", "generation", "learner", "tokens/s", f"x {REFERENCE}", "predicted x")
    columns += ("positions/token", "carried", "staleness")
    out = [f"{'of each round':<26}" + "".join(f"{column:>17}" for column in columns)]
    for contender in CONTENDERS:
        rounds = sorted({line["round"] for line in counted if line["contender"] == contender.name})
        by_round = {at: [x for x in counted if (x["contender"], x["round"]) == (contender.name, at)] for at in rounds}
        reference = {at: [x for x in counted if (x["contender"], x["round"]) == (REFERENCE, at)] for at in rounds}
        if not rounds:
            continue

        def mean(name: str, by_round: dict[int, Any] = by_round) -> str:
            return ", ".join(f"{sum(x[name] for x in found) / len(found):.1f}" for found in by_round.values())

        def of_all(form: str, value: Callable[[Any], float], by_round: dict[int, Any] = by_round) -> str:
            return ", ".join(format(value(found), form) for found in by_round.values())

        times = [rate(found) / rate(reference[at]) for at, found in by_round.items() if reference[at]]
        predicted_times = (
            said[contender.name]["tokens_per_second"] / said[REFERENCE]["tokens_per_second"] if said else math.nan
        )
        cells = (
            of_all("d", len),
            mean("seconds"),
            mean("generation"),
            mean("learner"),
            of_all(",.0f", rate),
            ", ".join(f"{one:.2f}" for one in times),
            f"{predicted_times:.2f}",
            of_all(".2f", lambda found: sum(x["positions"] for x in found) / sum(x["tokens"] for x in found)),
            of_all(",d", lambda found: found[-1]["carried"]),
            of_all(".2f", lambda found: found[-1].get("staleness_mean", 0.0)),
        )
        out.append(f"{contender.name:<26}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("h200"))
    parser.add_argument("--shape", choices=("1.5b", "tiny"), default="1.5b")
    names = [contender.name for contender in CONTENDERS]
    parser.add_argument("--contenders", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=480.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--summarize", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.summarize:
        print(table(options.summarize))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[options.shape]
    bench = Bench(options, shape)
    given = {key: str(value) for key, value in vars(options).items()}
    bench.write(arguments=given, machine=machine(), predicted=predictions(shape, options.seed))
    with tempfile.TemporaryDirectory() as folder:
        bench.start(Path(folder))
        for turn in range(options.rounds + 1):
            for contender in CONTENDERS:
                if contender.name in options.contenders:
                    bench.run(contender, turn)
            if turn:
                print(table(options.out / "trl_at_1_5b.jsonl"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
