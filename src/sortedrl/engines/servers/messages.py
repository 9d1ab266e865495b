"""Messages from an inference server, validated before any other code sees them.

A malformed message (`Malformed`) fails the request it belongs to. `Refused` has the HTTP status, which says whether
it is about the request (`REQUESTS_OWN`) or about the server's state.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from sortedrl.core.configuration import ConfigurationError
from sortedrl.settings.install_hint import install_hint

try:
    import msgspec as msgspec  # others of this package import it from here, so that its absence has one message
except ImportError:
    raise ConfigurationError("msgspec", None, "it is not installed", f"{install_hint('http')}.") from None

REQUESTS_OWN = frozenset({400, 404, 413, 422})  # all other statuses are about the server, or may be
BUSY = frozenset({408, 425, 429, 502, 503, 504, 529})  # certainly about the server
ANY_VOCABULARY = 1 << 31  # if the vocabulary size is unknown


class Delta(msgspec.Struct, gc=False):
    """New tokens of one stream. `end` is None, `stop`, `length`, or the server's name for any other end.

    If the server reports them: `made` is its count of the response's tokens, including these; `weights` is the weight
    version that generated them.
    """

    tokens: list[int]
    logprobs: list[float]
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
    """The delta if it fits the tokens before it; without its tokens if it repeats earlier ones."""
    tokens, logprobs, made = delta.tokens, delta.logprobs, delta.made
    count = len(tokens)
    if made is not None and count and made != made_before + count:
        if made == made_before:
            return Delta([], [], delta.end, made, delta.weights)
        raise Malformed(f"the server counts {made} tokens, but {made_before} + {count} arrived")
    if count != len(logprobs):
        raise Malformed(f"{count} tokens arrived with {len(logprobs)} log-probabilities")
    if not count:
        return delta
    if max(tokens) >= vocabulary:
        raise Malformed(f"a token id is outside of the vocabulary of {vocabulary}: {tokens}")
    return delta


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


def text_of(error: BaseException) -> str:
    """The message of an exception, or its type if it has none."""
    return str(error) or type(error).__name__
