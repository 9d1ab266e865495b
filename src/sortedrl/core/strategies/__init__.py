"""Schedules: the interface (base), the paper's, ours, other systems', and all of them by name (registry)."""
