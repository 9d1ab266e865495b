"""The embedded engine: the contract, exactness, sampling, weights, models of several families."""

import random
import resource
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from ledgers import completed
from small_models import VOCABULARY, engine_of, model_of
from sortedrl.core.configuration import ConfigurationError
from sortedrl.core.engine import Engine, EngineDied, EngineSpec, Request, Sampling
from sortedrl.core.rollout import ENVIRONMENT, Prompt, Segment
from sortedrl.engines.embedded import decoder as embedded_decoder
from sortedrl.engines.embedded import model as embedded_model
from sortedrl.engines.embedded.engine import rows_by_length
from sortedrl.engines.embedded.model import GeneralForward, UnsupportedModel
from sortedrl.engines.embedded.sampling import TokenSampler, seed_key
from sortedrl.engines.registry import make_engine
from sortedrl.engines.shared import StopWatches
from sortedrl.testing.engine_contract import EngineContract, Ledger, resumed
from turns_on_engines import largest_gap_of_turns

pytestmark = pytest.mark.usefixtures("one_thread")


def request(id: int, prompt: Sequence[int], max_new_tokens: int, seed: int = 0, **sampling: Any) -> Request:
    return Request(id, Prompt(str(id), list(prompt)), (), max_new_tokens, seed, Sampling(**sampling))


def random_requests(count: int, seed: int, longest: int = 60, **sampling: Any) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for id in range(count):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 40))]
        requests.append(request(id, prompt, rng.randrange(1, longest), rng.getrandbits(63), **sampling))
    return requests


def reference_logprobs(model: Any, request: Request, tokens: Sequence[int]) -> list[float]:
    """One plain forward pass over the whole response; temperature and top-p as defined, token by token."""
    prompt = list(request.prompt.tokens)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    values = []
    for row, token in zip(logits / request.sampling.temperature, tokens, strict=True):
        probabilities, order = row.softmax(-1).sort(descending=True)
        mass_before = probabilities.cumsum(0) - probabilities
        nucleus = order[mass_before < request.sampling.top_p]
        kept = row.softmax(-1)[nucleus].sum() if request.sampling.top_p < 1 else 1.0
        assert token in nucleus
        values.append(float((row.softmax(-1)[token] / kept).log()))
    return values


def check_logprobs(ledger: Ledger, model: Any) -> None:
    for id, asked in ledger.submitted.items():
        expected = reference_logprobs(model, asked, ledger.tokens(id))
        assert ledger.logprobs(id) == pytest.approx(expected, abs=1e-4)


class TestContract(EngineContract):
    model = model_of("Llama")

    def make_engine(self, slots: int) -> Engine:
        return engine_of(self.model, slots, eos_token_ids=(7,))

    def weights(self, version: int) -> Any:
        return model_of("Llama", seed=version).state_dict()


@pytest.mark.parametrize("mode", ["partial+elevator", "on-policy"])
def test_log_probabilities_are_the_learners_after_each_turn(mode: str) -> None:
    engine = engine_of(model_of("Llama"), slots=3, eos_token_ids=(2, 3, 4, 5), max_length=200)
    assert largest_gap_of_turns(engine, model_of("Llama"), mode) < 1e-4


# Models


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
        ("Llama", {"attn_implementation": "eager"}),
        ("Qwen2", {}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 9}),
        ("Gemma2", {"sliding_window": 9, "attn_implementation": "eager"}),
        ("Phi3", {}),
        ("GPT2", {}),
    ],
)
def test_log_probabilities_are_those_of_a_plain_forward(family: str, changes: dict[str, Any]) -> None:
    model = model_of(family, **changes)
    check_logprobs(completed(engine_of(model), random_requests(9, seed=1)), model)


@pytest.mark.parametrize(
    ("family", "changes", "word"),
    [
        ("Bloom", {"n_layer": 1, "n_head": 4}, "position_ids"),
        ("Qwen3Next", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("Llama", {"attn_implementation": "flex_attention"}, "flex_attention"),
    ],
)
def test_a_model_that_cannot_run_is_named(family: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word):
        engine_of(model_of(family, **changes))


def test_a_learners_module_samples_without_dropout_and_keeps_its_attention() -> None:
    model = model_of("GPT2")  # with dropout 0.1 in three places
    requests = random_requests(3, seed=3)
    expected = completed(engine_of(model), requests)
    model.train()
    attention = model.config._attn_implementation
    shared = completed(engine_of(model), requests)
    assert all(shared.logprobs(id) == expected.logprobs(id) for id in expected.finished)
    assert model.config._attn_implementation == attention
    assert all(parameter.grad is None for parameter in model.parameters())


# A rollout's tokens depend on its seed and the weights alone


@pytest.mark.parametrize("general", [False, True], ids=["written out", "general"])
@pytest.mark.parametrize("heads", [4, 2])
def test_random_stops_leave_every_token_and_log_probability(
    heads: int, general: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if general:
        monkeypatch.setattr(embedded_decoder, "forward_for", GeneralForward)
    model = model_of("Llama", num_key_value_heads=heads)
    requests = {request.id: request for request in random_requests(24, seed=4, longest=90)}
    expected = completed(engine_of(model, slots=20), list(requests.values()))
    rng = random.Random(5)
    made: dict[int, list[Segment]] = {id: [] for id in requests}
    ledger = Ledger(engine_of(model, slots=9))
    ledger.submit(list(requests.values()))
    stops = 0
    while ledger.open_ids:
        for _ in range(rng.randrange(1, 4)):
            ledger.apply(ledger.engine.poll(ledger.engine.now() + rng.random() * 0.02))
        chosen = [id for id in ledger.open_ids if rng.random() < 0.6]
        ledger.abort(chosen)
        for id in chosen:
            made[id] += ledger.segments[id]
        rng.shuffle(chosen)
        ledger.submit([resumed(requests[id], made[id]) for id in chosen])
        stops += len(chosen)
    assert stops > 30
    for id in requests:
        segments = [*made[id], *ledger.segments[id]]
        assert [token for s in segments for token in s.tokens] == expected.tokens(id)
        assert [value for s in segments for value in s.logprobs] == expected.logprobs(id)


def test_long_contexts_grow_the_cache_and_stay_exact() -> None:
    """Contexts on both sides of 256 (the first capacity) and 512 (where CPU attention works in blocks)."""
    model = model_of("Llama")
    rng = random.Random(6)
    requests = [
        request(id, [rng.randrange(VOCABULARY) for _ in range(length)], 30, id)
        for id, length in enumerate((5, 250, 240, 500, 505, 30))
    ]
    together = completed(engine_of(model, slots=6), requests)
    for asked in requests:
        alone = completed(engine_of(model, slots=1), [asked])
        assert alone.tokens(asked.id) == together.tokens(asked.id)
        assert alone.logprobs(asked.id) == together.logprobs(asked.id)
    longest = together.logprobs(4)
    assert longest == pytest.approx(reference_logprobs(model, requests[4], together.tokens(4)), abs=1e-4)


def test_waiting_for_company_before_a_prefill_changes_no_token() -> None:
    """What a GPU does; the decision does not depend on the device."""
    model = model_of("Llama")
    requests = random_requests(30, seed=13)
    expected = completed(engine_of(model, slots=10), requests)
    patient = engine_of(model, slots=10)
    patient._patience_steps = 5
    ledger = completed(patient, requests)
    assert all(ledger.logprobs(id) == expected.logprobs(id) for id in expected.finished)


@pytest.mark.parametrize("queries", [1, 24])
def test_attention_of_the_gpu_path_is_that_of_the_cpu_path(queries: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, queries, 8), torch.randn(3, 2, 24, 8), torch.randn(3, 2, 24, 8)
    hidden = torch.ones(24, 24, dtype=torch.bool).triu(1)[24 - queries :]
    mask = torch.zeros(1, 1, queries, 24).masked_fill(hidden, torch.finfo(torch.float32).min)
    with embedded_model.reading({range(2): 24, range(2, 3): 24}):
        ours = embedded_model._attend(query, key, value, mask.expand(3, -1, -1, -1), 0.5)
    fused = embedded_model._fused_attention(query, key, value, None if queries > 1 else mask, 0.5)
    assert torch.allclose(ours, fused, atol=1e-5)


def test_graphs_have_few_spans_and_one_for_every_context() -> None:
    lengths = range(1, 5000)
    spans = [embedded_decoder._rounded_up(n, embedded_decoder._graph_quantum(n)) for n in lengths]
    assert all(n <= span < n + max(64, n / 4 + 1) for n, span in zip(lengths, spans, strict=True))
    assert len(set(spans)) < 30


@given(
    st.dictionaries(st.integers(0, 99), st.tuples(st.integers(1, 300), st.booleans()), max_size=32),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_rows_are_sorted_by_length_into_blocks(
    requests: dict[int, tuple[int, bool]], rows_per_block: int, rng: random.Random
) -> None:
    lengths = {id: length for id, (length, _) in requests.items()}
    old = [id for id, (_, has_row) in requests.items() if has_row]
    rows = dict(zip(old, rng.sample(range(40), len(old)), strict=True))
    count = len(lengths)
    blocks = [range(i, min(i + rows_per_block, count)) for i in range(0, count, rows_per_block)]
    arranged = rows_by_length(lengths, rows, blocks)
    assert sorted(arranged.values()) == list(range(count))
    by_row = [lengths[id] for id in sorted(arranged, key=lambda id: arranged[id])]
    in_blocks = [[by_row[row] for row in block] for block in blocks]
    assert all(min(first) >= max(second) for first, second in pairwise(in_blocks))
    assert rows_by_length(lengths, arranged, blocks) == arranged, "nobody moves twice"


# Sampling


@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"top_p": 0.7}, {"temperature": 1.7, "top_p": 0.5}])
def test_temperature_and_top_p_are_in_the_log_probabilities(sampling: dict[str, Any]) -> None:
    model = model_of("Llama")
    cut = random_requests(5, seed=7, **sampling)
    plain = [request(100 + r.id, r.prompt.tokens, r.max_new_tokens, r.seed) for r in random_requests(3, seed=8)]
    check_logprobs(completed(engine_of(model), [*cut, *plain]), model)


def test_temperature_zero_takes_the_likeliest_token_for_sure() -> None:
    model = model_of("Llama")
    asked = request(0, [5, 9, 2], 25, temperature=0.0)
    ledger = completed(engine_of(model), [asked, request(1, [5, 9, 2], 25)])
    tokens = ledger.tokens(0)
    with torch.no_grad():
        logits = model(torch.tensor([[5, 9, 2, *tokens]])).logits[0, 2:-1]
    assert tokens == logits.argmax(-1).tolist()
    assert set(ledger.logprobs(0)) == {0.0}
    assert ledger.tokens(1) != tokens


def test_tokens_are_drawn_with_their_probabilities() -> None:
    """Chi-square against the softmax, over seeds and over positions; 5 standard deviations are allowed."""
    sampler = TokenSampler(torch.device("cpu"))
    logits = torch.linspace(-6, 2, 40)
    draws = 40_000
    numbers = torch.arange(draws)
    same = torch.full((draws,), seed_key(11))
    keys = torch.tensor([seed_key(seed) for seed in range(400)]).repeat(draws // 400)
    for seed_keys, positions in ((same, numbers), (keys, numbers // 400)):
        tokens, logprobs = sampler.draw(logits.expand(draws, -1), seed_keys, positions, torch.ones(draws), None)
        expected = logits.softmax(-1) * draws
        observed = torch.bincount(tokens, minlength=len(logits))
        statistic = float(((observed - expected) ** 2 / expected).sum())
        assert abs(statistic - 39) < 5 * (2 * 39) ** 0.5
        assert torch.allclose(logprobs, logits.log_softmax(-1)[tokens], atol=1e-5)


def test_noise_of_neighbours_is_independent() -> None:
    sampler = TokenSampler(torch.device("cpu"))
    keys = torch.tensor([seed_key(seed) for seed in range(500)])
    noise = torch.stack([sampler.exponentials(keys, torch.full((500,), n), 100) for n in range(10)]).log()
    noise = (noise - noise.mean()) / noise.std()
    for first, second in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise[..., 1:], noise[..., :-1])):
        assert abs(float((first * second).mean())) < 5 / first.numel() ** 0.5


# Ends


def test_end_of_sequence_ends_and_is_part_of_the_response() -> None:
    model = model_of("Llama")
    asked = random_requests(8, seed=9, longest=200)
    free = completed(engine_of(model), asked)
    ends = (3, 4)
    ledger = completed(engine_of(model, eos_token_ids=ends), asked)
    ended = 0
    for id in free.finished:
        tokens = free.tokens(id)
        first_end = next((place for place, token in enumerate(tokens) if token in ends), None)
        expected = tokens if first_end is None else tokens[: first_end + 1]
        assert ledger.tokens(id) == expected
        assert ledger.finished[id] == (first_end is None)
        ended += first_end is not None
    assert ended > 2


def letters_tokenizer() -> Any:
    """Token n is the n-th letter; 26 and up are pairs."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(a + b for a in "abcde" for b in "vwxyz"), *"ABCDEFGHIJ"]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


def test_stop_strings_end_with_the_token_that_completes_one() -> None:
    model, tokenizer = model_of("Llama"), letters_tokenizer()
    asked = random_requests(10, seed=10, longest=150)
    free = completed(engine_of(model), asked)
    text = {id: tokenizer.decode(free.tokens(id)) for id in free.finished}
    cut_from = max(text, key=lambda id: len(text[id]))
    strings = (text[cut_from][20:23], text[cut_from][60:62])
    stopped = [request(r.id, r.prompt.tokens, r.max_new_tokens, r.seed, stop_strings=strings) for r in asked]
    ledger = completed(engine_of(model, tokenizer=tokenizer), stopped)
    for id in free.finished:
        tokens = free.tokens(id)
        prefixes = (tokens[:n] for n in range(1, len(tokens) + 1))
        expected = next((p for p in prefixes if any(s in tokenizer.decode(p) for s in strings)), tokens)
        assert ledger.tokens(id) == expected
    assert not ledger.finished[cut_from]


def test_a_stop_string_that_is_completed_at_the_limit_is_no_truncation() -> None:
    model, tokenizer = model_of("Llama"), letters_tokenizer()
    free = completed(engine_of(model), [request(0, [1, 2, 3], 6, seed=3)])
    stops = request(0, [1, 2, 3], 6, seed=3, stop_strings=(tokenizer.decode(free.tokens(0)),))
    ledger = completed(engine_of(model, tokenizer=tokenizer), [stops])
    assert ledger.tokens(0) == free.tokens(0) and (free.finished, ledger.finished) == ({0: True}, {0: False})


@pytest.mark.parametrize("strings", [("IJ",), ("IJ", "\u00e9" * 8)])  # with the second every token is looked at
@pytest.mark.parametrize(
    ("turn", "observation", "made", "ends"),
    [("", "", "xIJ", True), ("abI", "", "J", True), ("ab", "qI", "J", False), ("abIJ", "q", "x", False)],
)
def test_a_stop_string_may_begin_in_kept_tokens_of_the_same_turn_only(
    turn: str, observation: str, made: str, ends: bool, strings: tuple[str, ...]
) -> None:
    """For all engines: not in what the environment wrote, and not in the turn before."""
    tokenizer = letters_tokenizer()
    before, observed, new = (tokenizer.convert_tokens_to_ids(list(text)) for text in (turn, observation, made))
    parts = (Segment(before, [-1.0] * len(before), 0), Segment(observed, [0.0] * len(observed), ENVIRONMENT))
    asked = Request(0, Prompt("0", [1]), tuple(filter(len, parts)), 6, 0, Sampling(stop_strings=strings))
    watch = StopWatches(tokenizer).of(asked)
    assert watch is not None and watch(new) == ends


def test_a_context_may_fill_a_table_of_positions() -> None:
    """A prefill is padded to a multiple of 16 tokens; the table has no positions for that padding."""
    model = model_of("GPT2", n_positions=41)
    asked = [request(0, [1] * 39, 2), request(1, [2] * 30, 11)]
    ledger = completed(engine_of(model, max_length=41), asked)
    assert [len(ledger.tokens(one.id)) for one in asked] == [2, 11]
    check_logprobs(ledger, model)


def test_a_model_that_cannot_run_gets_no_advice_about_lengths() -> None:
    model = model_of("Llama")
    model.config._attn_implementation = "flex_attention"
    spec = EngineSpec(model="mine", slots=4, max_length=64, module=model)
    with pytest.raises(ConfigurationError, match="flex_attention") as refused:
        make_engine("embedded", spec)
    assert "max_response_tokens" not in str(refused.value)


def test_what_cannot_run_fails_with_a_reason_and_the_rest_goes_on() -> None:
    full = Request(2, Prompt("2", [1] * 10), (Segment([1] * 10, [-1.0] * 10, 0),), 5, 0)
    ledger = completed(
        engine_of(model_of("Llama"), max_length=20),
        [request(0, [1] * 20, 5), request(1, [], 5), full, request(3, [1], 0), request(4, [1] * 12, 50)],
    )
    assert set(ledger.failed) == {0, 1, 2, 3}
    assert "no room for another token under max_length = 20" in ledger.failed[0]
    assert len(ledger.tokens(4)) == 8 and ledger.finished == {4: True}, "prompt and response together"


def test_a_token_that_the_model_does_not_have_costs_its_request_only() -> None:
    turn = Segment([1], [-1.0], 0)
    answered = [
        Request(id, Prompt(str(id), [1]), (turn, Segment([token], [0.0], ENVIRONMENT)), 5, 0)
        for id, token in enumerate((VOCABULARY, VOCABULARY - 1, -1))
    ]
    ledger = completed(engine_of(model_of("Llama")), [*answered, request(3, [1, VOCABULARY], 5), request(4, [2], 5)])
    assert set(ledger.failed) == {0, 2, 3} and set(ledger.finished) == {1, 4}
    assert ledger.failed[0].startswith(f"an answer of the environment has token id {VOCABULARY}, but the vocabulary")


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        engine_of(model_of("Llama")).submit([request(0, [1], 5, stop_strings=("x",))])


def test_bad_sizes_are_refused() -> None:
    model = model_of("Llama")
    for changes, word in (({"slots": 0}, "slots"), ({"max_length": 1}, "at least 2"), ({"max_length": 4096}, "1024")):
        with pytest.raises(ValueError, match=word):
            engine_of(model, **changes)
    engine = engine_of(model)
    engine.submit([request(0, [1], 5)])
    with pytest.raises(ValueError, match="request 0"):
        engine.submit([request(0, [1], 5)])


# Weights


@pytest.mark.parametrize("tied", [False, True])
def test_load_is_as_if_the_engine_were_new(tied: bool) -> None:
    """Half way through, so that keys of the old weights are in the cache."""
    requests = random_requests(6, seed=11)
    new = model_of("Llama", seed=1, tie_word_embeddings=tied)
    expected = completed(engine_of(new), requests)
    model = model_of("Llama", seed=2, tie_word_embeddings=tied)
    engine = engine_of(model)
    engine.submit(requests)
    engine.poll(engine.now() + 0.01)
    engine.abort([request.id for request in requests])
    engine.update_weights((item for item in new.named_parameters()), 3)
    ledger = completed(engine, requests)
    for id in expected.finished:
        assert ledger.tokens(id) == expected.tokens(id)
        assert ledger.logprobs(id) == expected.logprobs(id)
    assert {segment.version for segment in ledger.segments[0]} == {3}


def negate(model: Any) -> None:
    model.lm_head.weight.data.neg_()  # a change that torch does not count


def take_a_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.tensor([[1, 2, 3]])).logits.square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("change", "says_so"), [(negate, True), (take_a_step, False)])
def test_a_shared_module_needs_no_weights(change: Callable[[Any], None], says_so: bool) -> None:
    """Copies of weights in the written-out forward must not go stale after a step that nothing reports."""
    model = model_of("Llama")
    engine = engine_of(model)
    asked = request(0, [1, 2], 12)
    before = completed(engine, [asked]).logprobs(0)
    change(model)
    if says_so:
        engine.update_weights(None, 1)
    ledger = completed(engine, [asked])
    assert ledger.logprobs(0) != before
    check_logprobs(ledger, model)
    assert ledger.segments[0][0].version == says_so


def test_adapters_in_place_of_projections_take_part() -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            doubled: torch.Tensor = 2 * self.inner(hidden)
            return doubled

    model = model_of("Llama")
    model.model.layers[0].self_attn.q_proj = Doubled(model.model.layers[0].self_attn.q_proj)
    model.model.layers[1].mlp.down_proj = Doubled(model.model.layers[1].mlp.down_proj)
    check_logprobs(completed(engine_of(model), [request(0, [1, 2], 12)]), model)


def test_weights_that_do_not_fit_change_nothing() -> None:
    model = model_of("Llama", tie_word_embeddings=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = engine_of(model)
    whole = {name: value + 1 for name, value in before.items()}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    short = {name: value for name, value in whole.items() if name != "model.norm.weight"}
    for weights, word in (
        ({**whole, "extra.weight": torch.ones(1)}, "extra.weight"),
        (short, "model.norm.weight"),
        ({**whole, "model.norm.weight": torch.ones(3)}, r"\(3,\)"),
        ({**whole, head: whole[embedding] + 1}, "differ"),
    ):
        with pytest.raises(ValueError, match=word):
            engine.update_weights(weights, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert engine.version == 0


def test_load_while_requests_are_in_the_engine_is_refused() -> None:
    engine = engine_of(model_of("Llama"))
    engine.submit([request(0, [1], 5)])
    with pytest.raises(RuntimeError, match="1 "):
        engine.update_weights(None, 1)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """This process may have 2 GiB more than it has: large allocations fail, as on a full GPU."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_an_engine_out_of_memory_is_dead_with_one_line(little_memory: None) -> None:
    engine = engine_of(model_of("Llama", max_position_embeddings=4096), slots=2**17, max_length=4096)
    engine.submit([request(0, [1] * 2100, 5)])
    assert engine.poll(), "it has started"
    for _ in range(2):
        with pytest.raises(EngineDied, match=r"embedded engine ran out of memory .* contexts of up to 2100") as died:
            engine.poll()
        assert "fewer slots than 131072" in str(died.value) and "\n" not in str(died.value)
    for call in (lambda: engine.submit([]), lambda: engine.abort([0]), lambda: engine.update_weights(None, 1)):
        with pytest.raises(EngineDied, match="ran out of memory"):
            call()


# CUDA


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_replay_the_step(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Qwen2").to("cuda", dtype)
    requests = random_requests(40, seed=12, longest=300)
    graphs = completed(engine_of(model, slots=24), requests)
    monkeypatch.setattr(embedded_decoder._StepGraphs, "run", lambda self, shape, step, states: step())
    plain = completed(engine_of(model, slots=24), requests)
    equal = sum(graphs.tokens(id) == plain.tokens(id) for id in graphs.finished)
    assert equal >= 0.9 * len(requests)
