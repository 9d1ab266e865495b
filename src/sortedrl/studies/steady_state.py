"""Tokens per second with every slot full: the upper bound of any schedule, simulated or measured on a real engine."""

from collections.abc import Callable

from sortedrl.core.engine import Engine, Request, RequestFailed, RequestFinished, Tokens


class SteadyState:
    """Keeps every slot full: when a request finishes, its slot gets the next one.

    `request_of` makes the request with the given id. `next_turn` continues a request that finished with so many tokens
    in the same slot, or returns None at the end of its rollout.
    """

    def __init__(
        self,
        engine: Engine,
        request_of: Callable[[int], Request],
        next_turn: Callable[[Request, int], Request | None] = lambda request, made: None,
    ) -> None:
        self._engine, self._request_of, self._next_turn = engine, request_of, next_turn
        self._turnovers = [0] * engine.slots  # rollouts that each slot has finished
        self._wanted = self._behind = 0  # turnovers of each slot, and slots with fewer
        self._running: dict[int, tuple[int, Request]] = {}  # slot and request
        self._made: dict[int, int] = {}  # tokens of each running request
        self._started = self._delivered = 0

    def tokens_per_second(
        self, *, turnovers: int, rollouts: int = 0, tokens_made: Callable[[], int] | None = None
    ) -> float:
        """The rate from the moment when every slot has finished one rollout, until each has finished `turnovers` more
        and at least `rollouts` have started. `tokens_made` counts the engine's tokens; default: those delivered."""
        made = tokens_made or (lambda: self._delivered)
        for slot in range(self._engine.slots):
            self._start(slot)
        self._run_until(1, 0)
        began, before = self._engine.now(), made()
        self._run_until(1 + turnovers, rollouts)
        ended, after = self._engine.now(), made()
        self._engine.abort(list(self._running))
        return (after - before) / (ended - began)

    def _start(self, slot: int, following: Request | None = None) -> None:
        """The next turn of the slot's rollout, or a new one."""
        request = following or self._request_of(self._started)
        self._started += following is None
        self._running[request.id], self._made[request.id] = (slot, request), 0
        self._engine.submit([request])

    def _run_until(self, turnovers: int, rollouts: int) -> None:
        self._wanted, self._behind = turnovers, sum(done < turnovers for done in self._turnovers)
        while self._behind or self._started < rollouts:
            for change in self._engine.poll():
                if isinstance(change, RequestFailed):
                    raise RuntimeError(f"the engine refused a request: {change.reason}")
                if isinstance(change, Tokens):
                    self._made[change.id] += len(change.segment)
                    self._delivered += len(change.segment)
                elif isinstance(change, RequestFinished):
                    (slot, request), made = self._running.pop(change.id), self._made.pop(change.id)
                    following = None if change.truncated else self._next_turn(request, made)
                    if following is None:
                        self._turnovers[slot] += 1
                        self._behind -= self._turnovers[slot] == self._wanted
                    self._start(slot, following)
