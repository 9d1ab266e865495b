"""Real vLLM: the CPU build (`make test-vllm`) or, where there is one, a GPU. Elsewhere nothing here is collected."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

collect_ignore_glob = ["test_*.py"] if find_spec("vllm") is None else []


def pytest_runtest_setup() -> None:
    """vLLM's n-gram drafts import numba. Then no other engine starts in this process with the CPU build of 0.32.0: it
    looks at all that modules contain, and llvmlite's library answers with an error. numba itself has it in use."""
    sys.modules.pop("llvmlite.binding.ffi", None)
