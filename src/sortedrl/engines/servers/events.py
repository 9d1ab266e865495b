"""Events of a stream. The server's own class has the fields that it reads, as a msgspec struct, so that their types and
ranges are checked and all others are skipped."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from sortedrl.core.engine_checks import HIGHEST_LOGPROB, LOWEST_LOGPROB
from sortedrl.engines.servers.messages import Malformed, Refused, reason_of, text_of
from sortedrl.engines.servers.messages import msgspec as msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0)]
Logprob = Annotated[float, msgspec.Meta(ge=LOWEST_LOGPROB, le=HIGHEST_LOGPROB)]


class ServerEvent(msgspec.Struct, gc=False):
    """The base of the events of both servers."""

    error: Any = None


Event = TypeVar("Event", bound=ServerEvent)


def parsed(data: bytes, decoder: msgspec.json.Decoder[Event]) -> Event:
    """One event of a stream; raises Malformed, and Refused if it is an error."""
    try:
        event = decoder.decode(data)
    except (ValueError, RecursionError) as error:
        shown = data.decode(errors="replace")
        raise Malformed(f"this is not JSON of the expected form ({text_of(error)}): {shown!r}") from None
    if event.error:
        code = event.error.get("code") if isinstance(event.error, Mapping) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        raise Refused(status, reason_of({"error": event.error}))
    return event
