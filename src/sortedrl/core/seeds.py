"""A small hash for seeds: the same numbers give the same result on every machine."""

from functools import lru_cache


@lru_cache(maxsize=1 << 14)  # a resumed rollout asks again for the seed of its attempt
def derive_seed(*numbers: int) -> int:
    """63 well-mixed bits of the numbers, in order (splitmix64's finalizer)."""
    state = 0
    for number in numbers:
        state = mixing(state, number)
    return state >> 1


def mixing(state: int, number: int) -> int:
    """One step of the hash: `mixing(mixing(0, first), second) >> 1` is `derive_seed(first, second)`. A shared first
    step saves time: a step takes Python 1 us."""
    state = ((state ^ number) + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return state ^ (state >> 31)
