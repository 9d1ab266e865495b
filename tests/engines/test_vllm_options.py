"""What the engine of vLLM refuses before it starts vLLM, which these tests do without."""

from __future__ import annotations

import pytest

from sortedrl.core.configuration import ConfigurationError
from sortedrl.engines.vllm import VllmEngine


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("max_num_seqs", 128, "slots"),
        ("logprobs_mode", "raw_logprobs", "Leave it out"),
        ("tensor_parallel_size", 2, "vllm-server"),
        ("pipeline_parallel_size", 2, "vllm-server"),
    ],
)
def test_an_option_that_would_break_the_accounting_is_refused(option: str, value: object, instead: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} {value}.*{instead}"):
        VllmEngine("model", slots=4, eos_token_ids=[2], max_length=64, **{option: value})
