"""Counts in printed text."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """ "1 line", "2 lines", "10,000 lines". For nouns whose plural ends in -s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
