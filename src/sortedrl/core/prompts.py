"""The data cursor: every epoch is a seeded permutation of the dataset, and no prompt is lost or read twice."""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sortedrl.core.configuration import checked_bool, checked_int
from sortedrl.core.rollout import Prompt
from sortedrl.core.wording import kind_of


class Prompts:
    """Reads `dataset` for `epochs` epochs, each a permutation (or in order with `shuffle=False`)."""

    def __init__(self, dataset: Sequence[Prompt], *, epochs: int = 1, seed: int = 0, shuffle: bool = True) -> None:
        if isinstance(dataset, Mapping):  # such as a DatasetDict
            raise TypeError(f"the dataset is {kind_of(dataset)} with the keys {list(dataset)[:4]}: pass one value")
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"the dataset is {kind_of(dataset)}: pass a sequence of Prompt, such as a list")
        if not len(dataset):
            raise ValueError("the dataset has no prompts: nothing to train on")
        if isinstance(dataset, list | tuple):  # any other one may tokenize a prompt when it is read
            for place, prompt in enumerate(dataset):
                _require_prompt(place, prompt)
            require_unique_ids("prompts", [prompt.id for prompt in dataset])
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
        """The epoch (from 0) of the prompt that was taken as number `place`."""
        return place // self._size

    def is_in_last_epoch(self, place: int) -> bool:
        """Whether the prompt that was taken as number `place` (from 0) belongs to the last epoch."""
        return place >= (self.epochs - 1) * self._size

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

        Call it before each update: under a staleness bound, updates take several times the prompts that they need.
        """
        epochs = self.epoch + 3 + max(0, -(-(prompts - self.remaining_in_epoch) // self._size))
        if epochs > self.epochs:
            self.epochs = epochs
            self.remaining = self.remaining_in_epoch + (epochs - 1 - self.epoch) * self._size

    def _permutation(self, epoch: int) -> array[int]:
        order = array("q", range(len(self.dataset)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position, **self._order_settings()}

    def _order_settings(self) -> dict[str, Any]:
        """What the order of the prompts depends on, besides the dataset itself."""
        return {"size": self._size, "seed": self.seed, "shuffle": self.shuffle}

    def restore(self, state: dict[str, Any]) -> None:
        own = self._order_settings()
        saved = {name: state.get(name, value) for name, value in own.items()}  # older versions did not save `shuffle`
        if saved != own:
            before, now = (
                f"{one['size']} prompts, seed = {one['seed']} and shuffle = {one['shuffle']}" for one in (saved, own)
            )
            raise ValueError(f"the checkpoint was made with {before}, this run has {now}: resume with the same order")
        self.epoch, self.position = state["epoch"], state["position"]
        epochs_left = self.epochs - 1 - self.epoch  # below 0 if a run is resumed with fewer epochs
        self.remaining = max(0, self.remaining_in_epoch + epochs_left * len(self.dataset))
        self._order = self._permutation(self.epoch)


def _require_prompt(place: int, prompt: Any) -> None:
    if not isinstance(prompt, Prompt):
        raise TypeError(f"dataset[{place}] is {kind_of(prompt)}: make it a Prompt(id, token_ids, payload=answer)")
    if not isinstance(prompt.id, str):
        kind = type(prompt.id).__name__
        raise TypeError(f"dataset[{place}] has the id {prompt.id!r} of type {kind}: use text, as checkpoints are JSON")
    if isinstance(prompt.tokens, str | bytes):
        raise TypeError(f"dataset[{place}] has text in place of token ids: encode it with the tokenizer of the model")
    if not hasattr(prompt.tokens, "__len__"):
        raise TypeError(f"dataset[{place}] has {kind_of(prompt.tokens)} as its token ids: pass a list of them")
    if len(getattr(prompt.tokens, "shape", ())) > 1 or (len(prompt.tokens) and isinstance(prompt.tokens[0], list)):
        raise TypeError(f"dataset[{place}] has a batch in place of token ids: pass its row, as in input_ids[0]")


def require_unique_ids(what: str, ids: Iterable[str]) -> None:
    """Checkpoints and expected lengths refer to prompts by id. Raises ValueError."""
    seen: set[str] = set()
    for id in ids:
        if id in seen:
            raise ValueError(f"two {what} have the id {id!r}: ids must be unique")
        seen.add(id)
