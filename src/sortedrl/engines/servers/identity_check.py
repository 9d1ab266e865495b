"""Whether the server is still the process that was given the weights.

A restarted server has other weights. A restart breaks open streams. So after a broken connection, and after a time
without streams, the server must first confirm that it is the same process with the same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sortedrl.engines.servers.messages import Identity, said


class IdentityCheck:
    """`ask` the server; `trust` it if it is the same, `die` if it is not, `wait_out` a server that does not say."""

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
