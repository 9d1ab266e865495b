"""How many slots suit an update."""

MANY_SLOTS = 1.5  # times the rollouts of an update


def default_slots(rollouts_per_update: int, most: int) -> int:
    """As many as an update has rollouts, but no more than the engines have."""
    return min(rollouts_per_update, most)


def too_many_slots(slots: int, rollouts_per_update: int) -> str | None:
    """A notice if modes that keep tokens would train on stale ones for no reason."""
    if slots <= MANY_SLOTS * rollouts_per_update:
        return None
    return (
        f"{slots:,} slots are {slots / rollouts_per_update:.1f} times an update of {rollouts_per_update:,} rollouts. "
        "Modes that keep tokens fill all of them, and the mean staleness grows in proportion. Use "
        f"{int(MANY_SLOTS * rollouts_per_update):,} or fewer; sortedrl plan compares them."
    )
