"""Several ranks: what rank 0 shares with the others if it schedules for all, and how an error on one ends all.

A rank that raises leaves the others in a collective that never completes. So it first writes its error to the store of
the process group. On every rank a thread looks there: it interrupts the main thread, and if that is in a collective,
ends the process. The launcher (torchrun, accelerate) sees to ranks that were killed.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from sortedrl.core.user_values import reason_of

LOOK_SECONDS = 1.0
GRACE_SECONDS = 5.0  # for a rank that can still close its log and abort its requests
_HARVEST = timedelta(days=7)  # how long others wait for rank 0: the default would end a long harvest


class Ranks:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None
        self._runs = 0

    def scatter(self, parts: Sequence[Any] | None) -> Any:
        """This rank's part of what rank 0 gives."""
        received: list[Any] = [None]
        dist.scatter_object_list(received, None if parts is None else list(parts), src=0, group=self._objects())
        return received[0]

    def on_rank_0(self, do: Callable[[list[Any]], list[Any]], asked: list[Any]) -> list[Any]:
        """What rank 0 makes of each of the values that this rank asks for; it gets those of all ranks at once."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(asked, values, dst=0, group=self._objects())
        if values is None:
            return list(self.scatter(None))
        made = iter(do([value for part in values for value in part]))
        return list(self.scatter([list(islice(made, len(part))) for part in values]))

    def _objects(self) -> Any:
        """A group on the CPU: with NCCL, a rank that waits would keep its GPU busy."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_HARVEST)
        return self._group

    @contextmanager
    def ending_together(self) -> Iterator[None]:
        """An error in this block ends all ranks. Only the rank that failed first raises it; the others exit with a
        line that repeats it."""
        if self.size == 1:
            yield
            return
        self._runs += 1
        failure = _Failure(f"sortedrl/failure/{self._runs}", self.rank)
        try:
            yield
        except BaseException as error:
            first = failure.first(error)
            if first is None:
                raise
            raise SystemExit(first) from None
        finally:
            failure.stop()


class _Failure:
    """Of the rank that fails first, in the store of the process group."""

    def __init__(self, key: str, rank: int) -> None:
        self._key = key
        self._rank = rank
        store: Any = _get_default_store()
        self._store = store.clone()  # a connection of its own
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure of a rank", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def first(self, error: BaseException) -> str | None:
        """Report this rank's error: None if it is the first, otherwise a line with that of the other rank."""
        self.stop()
        own = f"rank {self._rank} failed: {reason_of(error)}"
        try:
            first = self._store.compare_set(self._key, "", own).decode()
        except Exception:  # its host is gone, and with it rank 0
            return None
        return None if first == own else self._line(first)

    def _line(self, first: str) -> str:
        return f"rank {self._rank} ends, because {first}"

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            try:
                if not self._store.check([self._key]):
                    continue
                first = self._store.get(self._key).decode()
            except Exception:  # its host is gone: the launcher ends this rank
                return
            _thread.interrupt_main()
            if not self._is_over.wait(GRACE_SECONDS):
                print(self._line(first), file=sys.stderr, flush=True)
                os._exit(1)
            return


class FollowedRun:
    """In the place of a `ScheduledRun` on the ranks that rank 0 schedules for."""

    has_batch_in_hand = False
    metrics = None
    reward_mean = 0.0

    def __init__(self) -> None:
        self.version = 0

    def mark_phase(self, phase: str) -> None: ...

    def score(self, reward_of: dict[int, float]) -> None: ...

    def publish(self, weights: Iterable[Any] | None, *, at_once: bool) -> None: ...

    def end(self) -> None: ...
