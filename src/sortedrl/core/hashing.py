"""A small hash for seeds: the same numbers give the same result on every machine."""

from __future__ import annotations


def mixed(*numbers: int) -> int:
    """63 well-mixed bits of the numbers, in order (splitmix64's finaliser)."""
    value = 0
    for number in numbers:
        value = ((value ^ number) + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value >> 1
