"""What our engines of real models share: refusals, stop strings, reports, reuse of stale KV cache, tied output
layers."""

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

from sortedrl.core.engine import Change, EngineBase, EngineDied, Request, RequestFailed, Tokens
from sortedrl.core.rollout import Segment
from sortedrl.core.wording import counted

_VERBATIM = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}  # decode every character
OUTPUT_LAYER = "lm_head.weight"

# Requests that could never run, with the numbers in the reason, and calls at the wrong time


def require_new(requests: Sequence[Request], inside: Container[int]) -> None:
    """Raise a ValueError if one of these requests is in the engine, or comes twice. `inside`: the ids in the engine."""
    seen: set[int] = set()
    for request in requests:
        if request.id in inside or request.id in seen:
            raise ValueError(f"request {request.id} is already in the engine: abort it first")
        seen.add(request.id)


def require_empty(inside: int, what: str) -> None:
    """Raise a RuntimeError if so many requests are in the engine: their KV would be lost, or of the old weights."""
    if inside:
        raise RuntimeError(f"{what} with {counted(inside, 'request')} in the engine: abort all first")


def refusal(request: Request, max_length: int, vocabulary: int) -> str | None:
    """Why the request cannot run within `max_length` tokens with this size of the vocabulary; None if it can."""
    prompt, kept = len(request.prompt.tokens), request.prefix_length
    if prompt == 0:
        return "the prompt is empty, but the model needs at least 1 token to continue from"
    if prompt + kept >= max_length:
        return (
            f"a prompt of {prompt} and a prefix of {kept} tokens leave no room for another token under "
            f"max_length = {max_length}: leave such prompts out, or raise it if the model has more positions"
        )
    if request.max_new_tokens < 1:
        return f"max_new_tokens = {request.max_new_tokens}: it must be at least 1"
    return unknown_token(request, vocabulary)


def unknown_token(request: Request, vocabulary: int) -> str | None:
    """The token id that the model does not have; None if it has all. One such id would end the engine or its server.

    Only the prompt and the environment's answers are checked: the rest was sampled by the engine itself.
    """
    answers = [("an answer of the environment", s.tokens) for s in request.prefix if s.is_environment]
    for what, tokens in (("the prompt", request.prompt.tokens), *answers):
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < vocabulary):
            bad = next(token for token in tokens if not 0 <= token < vocabulary)
            return f"{what} has token id {bad}, but the vocabulary size is {vocabulary}"
    return None


# Stop strings

StopWatch = Callable[[Sequence[int]], bool]  # whether the last of these tokens completes a stop string


@dataclass(frozen=True)
class StopStrings:
    """Detects the token that completes one of the strings; `tokenizer` is a Hugging Face tokenizer."""

    tokenizer: Any
    strings: tuple[str, ...]

    def completed_by_last(self, turn: Sequence[int], made: Sequence[int]) -> bool:
        """Whether the last token of `made`, which follows `turn`, completes a string.

        `turn` has the earlier tokens of the same turn only: a string in another turn, or in an answer of the
        environment, ends nothing.
        """
        if made[-1] not in self._endings:
            return False
        # A token holds at least one byte of text, so no match starts earlier than this.
        window = max(len(string.encode()) for string in self.strings)
        newest = [*turn[-window:], *made[-window:]]
        text = self.tokenizer.decode(newest[-window:], **_VERBATIM)
        return any(string in text for string in self.strings)

    @cached_property
    def _endings(self) -> frozenset[int]:
        """Tokens that contain the last character of a string; all tokens if they may split or hide it."""
        last_characters = {string[-1] for string in self.strings}
        entries = range(len(self.tokenizer))
        if any(not character.isascii() or character.isspace() for character in last_characters):
            return frozenset(entries)
        texts = self.tokenizer.batch_decode([[entry] for entry in entries], **_VERBATIM)
        return frozenset(e for e, text in zip(entries, texts, strict=True) if last_characters & set(text))


class StopWatches:
    """Requests with the same stop strings share a detector."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._detector_of = cache(partial(StopStrings, tokenizer))

    def of(self, request: Request) -> StopWatch | None:
        """For the tokens that follow its prefix; None if it has no stop strings. Raises a ValueError if they cannot be
        used."""
        strings = request.sampling.stop_strings
        if not strings or request.sampling.ignore_eos:
            return None
        if self._tokenizer is None:
            raise ValueError(f"stop_strings = {strings} are text, but the engine has no tokenizer: pass tokenizer=...")
        return partial(self._detector_of(strings).completed_by_last, request.turn_tokens)


# Engines in this process


@dataclass(slots=True, eq=False, kw_only=True)
class Decoding:
    """A request with its undelivered tokens."""

    request: Request
    stop_watch: StopWatch | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def ends_with_stop_string(self) -> bool:
        return self.stop_watch is not None and bool(self.tokens) and self.stop_watch(self.tokens)


class LocalEngine(EngineBase):
    """Collects changes until they are reported. Subclasses set `_died` to the reason when they cannot go on."""

    def __init__(self, tokenizer: Any) -> None:
        self.version = 0
        self._stop_watches = StopWatches(tokenizer)
        self._unreported: list[Change] = []
        self._died: str | None = None

    def now(self) -> float:
        return time.perf_counter()

    def _require_usable(self, requests: Sequence[Request], inside: Container[int]) -> None:
        """Before any of them is in the engine."""
        require_new(requests, inside)
        for request in requests:
            self._stop_watches.of(request)

    def _deliver(self, one: Decoding) -> None:
        if one.tokens:
            segment = Segment(tokens=one.tokens, logprobs=one.logprobs, version=self.version)
            self._unreported.append(Tokens(one.request.id, self.now(), segment))

    def _fail(self, request: Request, reason: str) -> None:
        self._unreported.append(RequestFailed(request.id, self.now(), reason))

    def _report(self, until: float | None = None, *, is_idle: bool = False) -> list[Change]:
        """The changes since the last report. If there are none, an idle engine sleeps until then."""
        if is_idle and until is not None and not self._unreported:
            time.sleep(max(0.0, until - self.now()))
        changes, self._unreported = self._unreported, []
        return changes

    def _raise_if_dead(self) -> None:
        if self._died is not None:
            raise EngineDied(self._died)


# KV cache and weights


class KVCacheReuse:
    """The rule for one engine: `keep` stale KV cache, or clear it at every weight update, without salts.

    The cache salt of a request is the weight version under which its response started. So stale KV is used only by
    responses that started under its version: a resumed response finds its own KV, and responses to one prompt that
    started under one version share the KV of the prompt. A new response, a weight check or an evaluation only sees KV
    of the current weights.
    """

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._engine = f"{time.time_ns():x}"  # a server may hold KV cache of an earlier engine with the same versions
        self._loaded: int | None = None

    def survives_update_to(self, version: int) -> bool:
        """Whether cached KV may stay. Not when versions start over: stale KV could be mistaken for another run's."""
        is_newer = self._loaded is not None and version > self._loaded
        self._loaded = version
        return self._keep and is_newer

    def salt(self, request: Request, version: int) -> str | None:
        """The cache salt of a request submitted under this version."""
        return f"{self._engine}-{request.prefix[0].version if request.prefix else version}" if self._keep else None


def with_output_layer(
    weights: Mapping[str, Any] | Iterable[tuple[str, Any]], *, is_tied: bool = True
) -> Iterator[tuple[str, Any]]:
    """All weights by name, and the embedding as the output layer if that is not among them: neither vLLM nor SGLang
    updates a tied one otherwise."""
    is_named = False
    embedding = None
    for name, weight in weights.items() if isinstance(weights, Mapping) else weights:
        is_named = is_named or name == OUTPUT_LAYER
        if name.endswith("embed_tokens.weight"):
            embedding = weight
        yield name, weight
    if is_tied and not is_named and embedding is not None:
        yield OUTPUT_LAYER, embedding
