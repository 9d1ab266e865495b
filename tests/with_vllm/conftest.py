"""Real vLLM: the CPU build (`make test-vllm`) or, where there is one, a GPU. Elsewhere nothing here is collected."""

from __future__ import annotations

import os
from importlib.util import find_spec

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

collect_ignore_glob = ["test_*.py"] if find_spec("vllm") is None else []
