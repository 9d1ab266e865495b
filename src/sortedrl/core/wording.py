"""Counts and kinds of values in printed text."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 line", "2 lines", "10,000 lines". For nouns whose plural ends in -s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def kind_of(value: object) -> str:
    """ "an int", "a dict", "None", "the class Pool": what a wrong value is."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
