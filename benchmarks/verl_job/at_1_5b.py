"""verl at its best on one H200: Qwen2.5-1.5B's shape, packed sequences, forced response lengths up to 4,096 tokens.

    python at_1_5b.py OUT --work DIR [--settings sync elevator ...] [--budget 800]
    python at_1_5b.py OUT --work DIR --cpu          a trial with a tiny model and short responses

Random weights, prompts of 128 random letters (a token each), updates of 16 prompts x 8 rollouts, 128 slots (vLLM
max_num_seqs). All settings have the same prompts and response lengths. A setting that is named twice has two jobs; one
with :N has N steps at most. All jobs start at once, since starting takes minutes, and then wait for their turns
(forced.py); meanwhile the kinds of packed attention are tried (packed.py) and the prediction is stated. The jobs that
are left share the budget, in seconds, equally, and each ends by itself. The first step of each, which compiles and
warms up, is not counted.

OUT gets few files, always up to date: before.json (the trial and the prediction), JOB.jsonl (verl's metrics, a line per
step), JOB.log (the end of its output), results.json (for table.py) and raw.tgz. DIR has everything else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

import forced
import pandas
import table

from sortedrl.core.rollout import Prompt

HERE = Path(__file__).resolve().parent
SHAPE = HERE.parent / "shapes" / "qwen2.5-1.5b"
PROFILE = HERE.parent / "measured" / "h200-1.5b" / "profile_fourth.json"
PROMPTS, PROMPT_TOKENS, LEARNED_TOKENS = 1024, 128, 32768
OTHER_SECONDS = 0.3  # per step: weights to the servers, sleep, rewards
SERVER_SLOWER = 1.07  # than our vLLM in process, with the polling of verl every 2 s
SCHEDULES = {"sync": "baseline", "elevator": "partial+elevator", "planned": "on-policy+planned"}
MOST_STEPS = 12
KV_GIB = 8
COMPILED_SIZES = [1, 2, 4, *range(8, 129, 8)]


def prepare(asked: argparse.Namespace) -> None:
    """The model with its tokenizer, and the prompts as verl reads them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = asked.work / "model"
    if (model / "config.json").exists():
        return
    config = AutoConfig.from_pretrained(SHAPE)
    if asked.cpu:
        config = AutoConfig.from_pretrained(SHAPE, **TINY)
    torch.manual_seed(0)
    with torch.device("cpu" if asked.cpu else "cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
    byte_tokenizer(config).save_pretrained(model)
    letters = Random(0)
    rows = [
        {
            "data_source": "random",
            "prompt": [{"role": "user", "content": "".join(letters.choices(ascii_lowercase, k=asked.prompt_tokens))}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(PROMPTS)
    ]
    (asked.work / "data").mkdir(exist_ok=True)
    for name, part in {"train": rows, "held_out": rows[:8]}.items():
        pandas.DataFrame(part).to_parquet(asked.work / "data" / f"{name}.parquet")


TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "layer_types": ["full_attention"] * 2,
    "eos_token_id": 2047,
    "bos_token_id": 2046,
}


def byte_tokenizer(config: Any) -> Any:
    """Qwen's, without merges: a token per byte, and a word for every other id, since verl masks ids without one."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    words = dict(enumerate(sorted(ByteLevel.alphabet())))
    words |= {id: f"t{id}" for id in range(len(words), config.vocab_size)}
    words |= {config.eos_token_id: "<|im_end|>", config.bos_token_id: "<|endoftext|>"}
    made = Qwen2Tokenizer(vocab={word: id for id, word in words.items()}, merges=[], eos_token="<|im_end|>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    assert len(made) == config.vocab_size
    return made


def lengths_of_update(asked: argparse.Namespace) -> list[int]:
    """Prompt and response of each row of the first update."""
    draw = forced.lengths()
    places = [(Prompt(str(prompt), [0], prompt), place) for prompt in range(asked.prompts) for place in range(8)]
    return [asked.prompt_tokens + draw(prompt, place) for prompt, place in places]


def tried(asked: argparse.Namespace) -> dict[str, Any]:
    """Which attention is right and fast here; in a process of its own, which frees the GPU."""
    found = asked.work / "packed.json"
    if not found.exists():
        lengths = json.dumps(lengths_of_update(asked))
        added = {"PACKED_LENGTHS": lengths, "PACKED_TOKENS": str(asked.learned_tokens)}
        command = [sys.executable, str(HERE / "packed.py"), str(asked.work / "model"), str(found)]
        try:
            subprocess.run(command, env={**os.environ, **added}, check=True, timeout=120)
        except subprocess.SubprocessError as error:
            print(f"the trial of packed attention: {error}", flush=True)
            found.write_text(json.dumps({"kind": "rows", "seconds": {}}))
    return dict(json.loads(found.read_text()))


def predicted(asked: argparse.Namespace, trial: dict[str, Any]) -> dict[str, Any]:
    """Simulated generation; the learner as just measured, with a third of a pass more for the old log-probabilities."""
    sys.path.insert(0, str(HERE.parent))
    from end_to_end_workload import SHAPES, Mode, schedule_of, workload_of
    from end_to_end_workload import predicted as simulate

    from sortedrl.studies import profile_file

    update = trial["seconds"].get(trial["kind"]) or 6.0
    per_token = 4 / 3 * update / sum(lengths_of_update(asked))
    found = {}
    for setting in SCHEDULES.keys() & {entry.partition(":")[0] for entry in asked.settings}:
        mode = Mode.parsed(SCHEDULES[setting])
        schedule, workload = schedule_of(SHAPES["1.5b"], mode, 5), workload_of(SHAPES["1.5b"], mode, 8, 5)
        said = simulate(workload, schedule, profile_file.read(PROFILE), 1 / per_token, 8)
        tokens = said["trained_tokens_per_second"] * said["seconds_per_update"]
        generation = SERVER_SLOWER * (said["generate"] + said["re_prefill"])
        seconds = generation + said["learner"] + OTHER_SECONDS
        found[setting] = {
            "tokens_per_second": tokens / seconds,
            "generation": generation,
            "learner": said["learner"],
            "other": OTHER_SECONDS,
        }
    return found


def overrides(asked: argparse.Namespace) -> list[str]:
    rollout = "actor_rollout_ref.rollout"
    found = [
        f"reward.custom_reward_function.path={HERE / 'forced.py'}",
        f"{rollout}.ignore_eos=True",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={asked.learned_tokens}",
        "data.shuffle=False",
        "+ray_kwargs.ray_init.object_store_memory=2000000000",
    ]
    if not asked.cpu:
        found += [
            f"{rollout}.load_format=dummy",
            # A fixed size: vLLM would otherwise measure what the other jobs leave.
            f"{rollout}.gpu_memory_utilization=0.16",
            f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={KV_GIB << 30}",
            f"{rollout}.max_model_len={asked.prompt_tokens + asked.response_tokens + 8}",
            f"{rollout}.cudagraph_capture_sizes={COMPILED_SIZES}".replace(" ", ""),
        ]
    return found


class Job:
    """A setting of job.py in a process, with a Ray cluster of its own. It waits for its turn."""

    def __init__(self, asked: argparse.Namespace, name: str, steps: int) -> None:
        self.name, self.folder, self.out = name, asked.work / name, asked.out
        self.command = [
            *(sys.executable, str(HERE / "job.py"), name.removesuffix("-2"), "--packed", "--module", "forced"),
            *("--model", str(asked.work / "model"), "--data", str(asked.work / "data"), "--out", str(self.folder)),
            *("--steps", str(steps), "--prompts", str(asked.prompts), "--slots", str(8 * asked.prompts)),
            *("--prompt-tokens", str(asked.prompt_tokens), "--response-tokens", str(asked.response_tokens)),
            *("--workers", "1", "--learning-rate", "1e-6", *(["--cpu"] if asked.cpu else [])),
            *("--override", *overrides(asked)),
        ]
        self.environment = {
            **os.environ,
            "PACKED_ATTENTION": str(asked.work / "packed.json"),
            "JOB_TURN": str(self.folder / "turn"),
            "RAY_TMPDIR": f"/tmp/at-{name}",  # short: the names of sockets have at most 107 characters
            "RAY_memory_monitor_refresh_ms": "0",
        }
        self.start()

    def start(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.environment["RAY_TMPDIR"], ignore_errors=True)
        self.folder.mkdir(parents=True)
        Path(self.environment["RAY_TMPDIR"]).mkdir()
        with (self.folder / "log.txt").open("w") as log:
            self.process = subprocess.Popen(
                self.command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def is_ready(self) -> bool:
        return (self.folder / "ready").exists()

    def run(self, seconds: float) -> dict[str, Any] | None:
        """Gives it the turn for so long."""
        began = time.time()
        (self.folder / "time").write_text(str(began + seconds - 15))
        (self.folder / "time").rename(self.folder / "turn")
        while self.process.poll() is None and time.time() < began + seconds + 20:
            time.sleep(2)
            self.keep()
        code = self.process.poll()
        self.end()
        self.keep()
        print(f"{self.name}: {'killed' if code is None else f'exit {code}'}, {time.time() - began:.0f} s", flush=True)
        if code != 0:
            summarize = [*self.command, "--summarize"]
            subprocess.run(summarize, env=self.environment, check=False, stdout=subprocess.DEVNULL)
        result = self.folder / "result.json"
        return dict(json.loads(result.read_text())) if result.exists() else None

    def keep(self) -> None:
        """What must not be lost if this command is killed."""
        if (self.folder / "metrics.jsonl").exists():
            shutil.copy(self.folder / "metrics.jsonl", self.out / f"{self.name}.jsonl")
        text = (self.folder / "log.txt").read_text(errors="replace")
        (self.out / f"{self.name}.log").write_text(text[-100_000:])

    def end(self) -> None:
        """Kills what is left of it, of Ray and vLLM, by its mark in their environment."""
        mark = f"JOB_TURN={self.environment['JOB_TURN']}".encode()
        for _ in range(20):
            left = [pid for pid in processes() if mark in environment_of(pid)]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.5)
        self.process.wait()


def start_all(asked: argparse.Namespace, jobs: list[Job]) -> None:
    """Into `jobs` one by one: those that run must be ended if a later one cannot start."""
    for entry in asked.settings:
        setting, _, steps = entry.partition(":")
        name = f"{setting}-2" if setting in [job.name for job in jobs] else setting
        jobs.append(Job(asked, name, int(steps or MOST_STEPS)))
        time.sleep(asked.apart)


def wait_for(jobs: list[Job], until: float) -> list[Job]:
    """Those that are ready; one that ended before starts again, once."""
    again: set[str] = set()
    while time.time() < until and not all(job.is_ready() for job in jobs):
        time.sleep(2)
        for job in jobs:
            job.keep()
            if job.process.poll() is not None and job.name not in again:
                print(f"{job.name} ended before its turn: starting it again", flush=True)
                again.add(job.name)
                shutil.copy(job.folder / "log.txt", job.out / f"{job.name}-first.log")
                job.end()
                job.start()
    for job in jobs:
        if not job.is_ready():
            print(f"{job.name} is not ready", flush=True)
            job.end()
    return [job for job in jobs if job.is_ready()]


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", default=["sync", "elevator", "colocate_async", "elevator", "sync"])
    parser.add_argument("--budget", type=float, default=800.0, help="seconds")
    parser.add_argument("--start", type=float, default=330.0, help="seconds of these for starting, at most")
    parser.add_argument("--apart", type=float, default=15.0, help="seconds between two starts")
    parser.add_argument("--cpu", action="store_true")
    return parser


def main() -> None:
    began = time.time()
    asked = command_line().parse_args()
    asked.out, asked.work = asked.out.resolve(), asked.work.resolve()
    asked.prompts, asked.prompt_tokens, asked.response_tokens = (2, 16, 96) if asked.cpu else (16, PROMPT_TOKENS, 4096)
    asked.learned_tokens = 512 if asked.cpu else LEARNED_TOKENS
    os.environ["FORCED_LIMIT"] = str(asked.response_tokens)
    forced.LIMIT = asked.response_tokens
    for folder in (asked.out, asked.work):
        folder.mkdir(parents=True, exist_ok=True)
    prepare(asked)
    print(f"{time.time() - began:.0f} s: the model is written", flush=True)
    jobs: list[Job] = []
    try:
        start_all(asked, jobs)
        trial = tried(asked)
        print(f"{time.time() - began:.0f} s; packed attention: {trial}", flush=True)
        state_prediction(asked, trial)
        jobs = wait_for(jobs, began + asked.start)
        print(f"{time.time() - began:.0f} s: ready", flush=True)
        results: list[dict[str, Any]] = []
        for place, job in enumerate(jobs):
            left = asked.budget - (time.time() - began)
            found = job.run(left / (len(jobs) - place))
            results += [] if found is None else [found]
            (asked.out / "results.json").write_text(json.dumps(results))
            pack(asked)
    finally:
        for job in jobs:
            job.end()
    print("\n".join([table.HEADER, *map(table.row, results)]), flush=True)


def state_prediction(asked: argparse.Namespace, trial: dict[str, Any]) -> None:
    try:
        said = {} if asked.cpu else predicted(asked, trial)
    except Exception as error:  # the runs are worth more
        said = {"error": repr(error)}
    before = json.dumps({"packed": trial, "predicted": said}, indent=1)
    (asked.out / "before.json").write_text(before)
    print(before, flush=True)


def pack(asked: argparse.Namespace) -> None:
    """What the results were computed from."""
    with tarfile.open(asked.out / "raw.tgz", "w:gz") as archive:
        for folder in asked.work.glob("*/occupancy"):
            for path in [*folder.parent.glob("*.json*"), *folder.glob("*")]:
                archive.add(path, path.relative_to(asked.work))


if __name__ == "__main__":
    main()
