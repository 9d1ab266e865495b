"""Engines and servers that a test opens in a helper function and that its fixture `closes_all` closes."""

from typing import Protocol, TypeVar


class Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)
_open: list[Closable] = []


def closed_after(opened: T) -> T:
    """The same object, to be closed after the test. The last one opened is closed first."""
    _open.append(opened)
    return opened


def close_all() -> None:
    while _open:
        _open.pop().close()
