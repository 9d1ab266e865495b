"""One iterator of weights for several readers, bucket by bucket: never all weights at once.

The thread that owns the iterator reads it (`send`), since gathering sharded weights is a collective. It fills the next
bucket while the readers, each in its own thread, go through the current one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BUCKET_BYTES = 256 << 20
_CHECK_SECONDS = 0.1  # how often a reader that has gone without a word is looked for

Named = tuple[str, Any]


class WeightBuckets:
    def __init__(self, weights: Iterator[Named], readers: int) -> None:
        self._weights = weights
        self._news = threading.Condition()
        self._bucket: list[Named] | None = []  # None: the weights have ended
        self._number = 0
        self._error: BaseException | None = None
        self._reading = dict.fromkeys(range(readers), 0)  # by reader: the last bucket that it has finished

    @contextmanager
    def reader(self, place: int) -> Iterator[Iterator[Named]]:
        """For one reader, which may stop before the end."""
        try:
            yield self._read(place)
        finally:
            with self._news:
                self._reading.pop(place, None)
                self._news.notify_all()

    def send(self, is_gone: Callable[[int], bool]) -> None:
        """Read the iterator to its end, for all readers that are not gone."""
        try:
            for bucket in _buckets(self._weights):
                self._hand_out(bucket, is_gone)
            self._hand_out(None, is_gone)
        except BaseException as error:
            with self._news:
                self._error = error
                self._news.notify_all()
            raise

    def _hand_out(self, bucket: list[Named] | None, is_gone: Callable[[int], bool]) -> None:
        with self._news:
            while any(n < self._number for place, n in self._reading.items() if not is_gone(place)):
                self._news.wait(_CHECK_SECONDS)
            self._bucket, self._number = bucket, self._number + 1
            self._news.notify_all()

    def _read(self, place: int) -> Iterator[Named]:
        finished = 0
        while True:
            with self._news:
                self._reading[place] = finished
                self._news.notify_all()
                while self._number == finished and self._error is None:
                    self._news.wait()
                if self._error is not None:
                    raise RuntimeError(f"the weights could not be read to the end: {self._error!r}")
                bucket, finished = self._bucket, self._number
            if bucket is None:
                return
            yield from bucket
            del bucket


def _buckets(weights: Iterator[Named]) -> Iterator[list[Named]]:
    bucket: list[Named] = []
    size = 0
    for name, weight in weights:
        bucket.append((name, weight))
        size += getattr(weight, "nbytes", 0)
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    yield bucket
