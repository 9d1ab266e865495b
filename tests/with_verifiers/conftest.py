"""Real verifiers (`make test-verifiers`). Elsewhere nothing here is collected."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
collect_ignore_glob = ["test_*.py"] if find_spec("verifiers") is None else []
sys.path.insert(0, str(HERE))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
