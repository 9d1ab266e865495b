"""The data cursor: every epoch is a seeded permutation of the dataset, and no prompt is lost or read twice."""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Sequence

from sortedrl.core.configuration import checked_bool, checked_int
from sortedrl.core.rollout import Prompt
from sortedrl.core.user_values import check_dataset


class Prompts:
    """Reads `dataset` for `epochs` epochs, each a permutation (or in order with `shuffle=False`)."""

    def __init__(self, dataset: Sequence[Prompt], *, epochs: int = 1, seed: int = 0, shuffle: bool = True) -> None:
        check_dataset(dataset)
        self.dataset = dataset
        self.epochs = checked_int("epochs", epochs, 1)
        self.seed = checked_int("seed", seed)
        self.shuffle = checked_bool("shuffle", shuffle)
        self.epoch = 0
        self.position = 0
        self.remaining = self.epochs * len(dataset)
        self._size = len(dataset)
        self._order = self._permutation(self.epoch)

    @property
    def remaining_in_epoch(self) -> int:
        return self._size - self.position

    def epoch_of(self, place: int) -> int:
        """The epoch (from 0) of the prompt that was taken as number `place` (from 0)."""
        return place // self._size

    def taken_at(self, places: Collection[int]) -> dict[int, Prompt]:
        """The prompts that were taken as these numbers (from 0). No other one is read."""
        orders = {epoch: self._permutation(epoch) for epoch in {place // self._size for place in places}}
        return {place: self.dataset[orders[place // self._size][place % self._size]] for place in places}

    def take(self, count: int, *, within_epoch: bool) -> list[Prompt]:
        """The next prompts: at most `count`, fewer if the data (or the epoch) ends."""
        taken: list[Prompt] = []
        while len(taken) < count and self.remaining:
            if self.position == self._size:
                if within_epoch and taken:
                    break
                self.epoch += 1
                self.position = 0
                self._order = self._permutation(self.epoch)
            step = min(count - len(taken), self._size - self.position)
            taken += [self.dataset[i] for i in self._order[self.position : self.position + step]]
            self.position += step
            self.remaining -= step
        return taken

    def extend(self, prompts: int) -> None:
        """Add epochs until at least `prompts` and two epochs beyond them are left, for a run that ends by its updates.

        Call it before each update: under a staleness bound, updates take several times the prompts that they need."""
        epochs = self.epoch + 3 + max(0, -(-(prompts - self.remaining_in_epoch) // self._size))
        if epochs > self.epochs:
            self.epochs = epochs
            self.remaining = self.remaining_in_epoch + (epochs - 1 - self.epoch) * self._size

    def _permutation(self, epoch: int) -> array[int]:
        order = array("q", range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def go_to(self, epoch: int, position: int) -> None:
        """Continue there, as a resumed run does, perhaps one with fewer epochs."""
        self.epoch, self.position = epoch, position
        self.remaining = max(0, self.remaining_in_epoch + (self.epochs - 1 - epoch) * self._size)
        self._order = self._permutation(epoch)
