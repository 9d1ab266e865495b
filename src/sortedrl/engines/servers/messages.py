"""Messages from an inference server, validated before any other code sees them.

A malformed message (`Malformed`) fails the request it belongs to. `Refused` has the HTTP status, which says whether
it is about the request (`REQUESTS_OWN`) or about the server's state.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from sortedrl.core.checkpoint import HIGHEST_LOGPROB, LOWEST_LOGPROB
from sortedrl.core.configuration import ConfigurationError
from sortedrl.settings.install_hint import install_hint

try:
    import msgspec
except ImportError:
    raise ConfigurationError("msgspec", None, "it is not installed", f"{install_hint('http')}.") from None

REQUESTS_OWN = frozenset({400, 404, 413, 422})  # all other statuses are about the server, or may be
BUSY = frozenset({408, 425, 429, 502, 503, 504, 529})  # certainly about the server
_decoder = msgspec.json.Decoder()  # of the many small messages of streams: three times as fast as json
ANY_VOCABULARY = 1 << 31  # if the vocabulary size is unknown


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one stream. `end` is None, `stop`, `length`, or the server's name for any other end.

    If the server reports them: `made` is its count of the response's tokens, including these; `weights` is the weight
    version that generated them.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    end: str | None = None
    made: int | None = None
    weights: str | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies a server process and its weights. None: the server does not report it."""

    process: str | None = None
    weights: str | None = None

    @property
    def is_known(self) -> bool:
        return self.process is not None or self.weights is not None

    def agrees_with(self, other: Identity) -> bool | None:
        """Whether both are the same; None if they cannot be compared."""
        pairs = [(self.process, other.process), (self.weights, other.weights)]
        known = [a == b for a, b in pairs if a is not None and b is not None]
        return all(known) if known else None

    def __str__(self) -> str:
        parts = [("started at", self.process), ("weight version", self.weights)]
        return ", ".join(f"{name} {value}" for name, value in parts if value is not None)


class Refused(Exception):
    """The server returned no stream. `status` is the HTTP status, also for an error within a stream."""

    def __init__(self, status: int, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_after = retry_after

    @property
    def is_servers_state(self) -> bool:
        return self.status not in REQUESTS_OWN

    @property
    def is_about_the_key(self) -> bool:
        return self.status in (401, 403)


class Malformed(ValueError):
    """The server sent an invalid message."""


class OtherWeights(Exception):
    """The server generated tokens with other weights than it was given."""


def checked(delta: Delta, made_before: int, vocabulary: int) -> Delta:
    """The delta if it is valid; without its tokens if it repeats earlier ones.

    Called for every message, so it checks whole lists rather than single tokens.
    """
    tokens, logprobs = delta.tokens, delta.logprobs
    if delta.made is not None and tokens:
        made = whole_number(delta.made, "count of tokens")
        if made == made_before:
            return Delta((), (), delta.end, made, delta.weights)
        if made != made_before + len(tokens):
            raise Malformed(f"the server counts {made} tokens, but {made_before} + {len(tokens)} arrived")
    if len(tokens) != len(logprobs):
        raise Malformed(f"{len(tokens)} tokens arrived with {len(logprobs)} log-probabilities")
    if not tokens:
        return delta
    if set(map(type, tokens)) != {int}:
        raise Malformed(f"a token id is not a whole number: {list(tokens)}")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise Malformed(f"a token id is outside of the vocabulary of {vocabulary}: {list(tokens)}")
    if not set(map(type, logprobs)) <= {float, int}:
        raise Malformed(f"a log-probability is not a number: {list(logprobs)}")
    if not (min(logprobs) >= LOWEST_LOGPROB and max(logprobs) <= HIGHEST_LOGPROB and math.isfinite(sum(logprobs))):
        raise Malformed(f"a log-probability is not between {LOWEST_LOGPROB:g} and 0: {list(logprobs)}")
    return delta


def whole_number(value: Any, what: str) -> int:
    """A validated count from the server; raises Malformed."""
    if type(value) is not int or value < 0:
        raise Malformed(f"the {what} is {str(value)!r}")
    return value


def weight_version(value: Any) -> str:
    """A validated weight version from the server; raises Malformed."""
    if not isinstance(value, str):
        raise Malformed(f"the weight version is {value!r}, not a text")
    return value


def parsed(data: bytes) -> dict[str, Any]:
    """Parse one event of a stream; raises Malformed."""
    try:
        event = _parsed(data)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"this is not JSON ({said(error)}): {data.decode(errors='replace')!r}") from None
    if not isinstance(event, dict):
        raise Malformed(f"this is not a JSON object: {data.decode(errors='replace')!r}")
    return event


def _parsed(data: bytes) -> Any:
    try:
        return _decoder.decode(data)
    except ValueError:
        return json.loads(data)  # takes NaN, too, so that the error names the value


def refusal_in(event: Mapping[str, Any]) -> Refused | None:
    """The error that an event reports, if it is one."""
    error = event.get("error")
    if not error:
        return None
    code = error.get("code") if isinstance(error, Mapping) else None
    return Refused(code if type(code) is int and 400 <= code < 600 else 500, reason_of(event))


def reason_of(answer: Any) -> str:
    """The message of an error response, in any of the formats that servers use."""
    if isinstance(answer, str):
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError):
            return str(answer).strip()
    for key in ("error", "detail", "message"):
        if isinstance(answer, Mapping) and answer.get(key):
            answer = answer[key]
    return str(answer)


def retry_after(header: str | None) -> float | None:
    """Seconds to wait according to a Retry-After header (a number or a date); None if it is neither."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def said(error: BaseException) -> str:
    """The message of an exception, or its type if it has none."""
    return str(error) or type(error).__name__
