"""Real SGLang on a CPU (`make test-sglang`). Elsewhere nothing here is collected."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = ["test_*.py"] if find_spec("sglang") is None else []
