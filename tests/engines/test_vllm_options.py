"""What the engine of vLLM refuses before it starts vLLM, which these tests do without."""

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


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SYNTHETIC = {**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        (SYNTHETIC, {}, "did not sample"),
        (NGRAM, {"seeded": True}, "does not decide its tokens"),
        ({"method": "eagle3", "model": "x"}, {"enable_sleep_mode": True}, "weights of the draft model"),
        ("ngram", {}, "it is a JSON object"),
    ],
)
def test_drafts_that_would_not_be_exact_are_refused(config: object, options: dict[str, bool], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        VllmEngine("model", slots=4, eos_token_ids=[2], max_length=64, speculative_config=config, **options)
