"""What tests of the TRL adapter share. Imports are inside: TRL may be missing."""

from typing import Any

import pytest


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from sortedrl.models import BUILT_IN_MODEL

    return AutoTokenizer.from_pretrained(BUILT_IN_MODEL)
