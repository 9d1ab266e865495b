"""What an engine knows about its server: whether it is available, and whether it is still the process that was given
the weights."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from sortedrl.engines.servers.messages import Identity, said

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

    def is_well_again(self) -> None:
        """A health check passed: this ends an outage that started with a failed health check."""
        if self._watched:
            self.end()

    def end(self) -> None:
        self.since = None
        self.retry_at = 0.0

    def is_hopeless(self, now: float, last_token_at: float) -> bool:
        return self.since is not None and now - max(self.since, last_token_at) >= self._give_up_seconds


class IdentityCheck:
    """A restarted server has other weights, and a restart breaks open streams. So after a broken connection, and after
    a time without streams, the server must first confirm that it is the same process with the same weights.

    `ask` the server; `trust` it if it is the same, `die` if it is not, `wait_out` a server that does not say.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Identity]],
        *,
        trust: Callable[[], None],
        die: Callable[[str], None],
        is_dead: Callable[[], bool],
        wait_out: Callable[[str], Awaitable[None]],
    ) -> None:
        self._ask, self._trust, self._die = ask, trust, die
        self._is_dead, self._wait_out = is_dead, wait_out
        self._doubts = 0  # how often its identity became uncertain
        self._confirming = asyncio.Lock()
        self.expected = Identity()  # of the server that was given the weights
        self.is_confirmed = False  # whether it is known to be still the same
        self.is_asked = False  # whether a task is confirming it

    def doubt(self) -> None:
        self.is_confirmed = False
        self._doubts += 1

    async def confirm(self) -> None:
        """Trust the server once it is confirmed to be the same; give up if it is not."""
        async with self._confirming:
            self.is_asked = False
            while not self.is_confirmed and not self._is_dead():
                doubts = self._doubts
                try:
                    found = await self._ask()
                    agrees = found.agrees_with(self.expected) if self.expected.is_known else True
                    trouble = "it no longer reports its identity"
                except Exception as error:
                    agrees, trouble = None, said(error)
                if agrees is False:
                    self._die(
                        f"it is not the server that was given the weights: {found}, but it was {self.expected}. It "
                        "restarted, or another client updates its weights; tokens generated since were not used"
                    )
                elif agrees is None:
                    await self._wait_out(trouble)
                elif doubts == self._doubts:
                    self.is_confirmed = True
                    self._trust()
