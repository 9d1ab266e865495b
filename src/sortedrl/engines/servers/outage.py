"""When a server that is temporarily unavailable is asked again, and when it is given up."""

import random

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 30.0  # also if the server asks for more
_JITTER = (0.75, 1.25)


class Outage:
    """A temporarily unavailable server. It is given up after `give_up_seconds` without an accepted request or a token.

    Each round of refusals doubles the pause (with jitter, so that many clients do not return at the same time), or sets
    it to what the server asks for. Requests refused during a pause belong to the same round. After the pause, one
    request is sent as a probe; the others follow once it is accepted.
    """

    def __init__(self, give_up_seconds: float) -> None:
        self._give_up_seconds = give_up_seconds
        self.rounds = 0
        self._watched = False
        self.reason = ""
        self.since: float | None = None  # None: no outage
        self.retry_at = 0.0

    @property
    def is_on(self) -> bool:
        return self.since is not None

    def note(self, now: float, reason: str, asked_for: float | None = None, *, watched: bool = False) -> None:
        """A request was refused, or (`watched`) a health check failed."""
        if self.since is None:
            self.since, self.rounds, self._watched = now, 0, watched
            self.retry_at = now
        self._watched = self._watched and watched
        self.reason = reason
        if now < self.retry_at:
            return
        doubled = FIRST_PAUSE_SECONDS * 2 ** min(self.rounds, 10) * random.uniform(*_JITTER)
        pause = min(max(doubled, asked_for or 0.0), LONGEST_PAUSE_SECONDS)
        self.rounds += 1
        self.retry_at = now + min(pause, self._give_up_seconds)

    def note_healthy(self) -> None:
        """A health check passed: this ends an outage that started with a failed health check."""
        if self._watched:
            self.end()

    def end(self) -> None:
        self.since = None
        self.retry_at = 0.0

    def is_hopeless(self, now: float, last_token_at: float) -> bool:
        return self.since is not None and now - max(self.since, last_token_at) >= self._give_up_seconds
