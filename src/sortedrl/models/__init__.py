"""The built-in model: a small Llama that reasons aloud about small Knights & Knaves puzzles.

`scripts/warm_start.py` makes it; `recipe.json` in its folder says how, and what it measured.
"""

from __future__ import annotations

from pathlib import Path

BUILT_IN_MODEL = Path(__file__).parent / "knights-tiny"


def model_named(name: str) -> str:
    """The folder or hub name that a user's `model` stands for."""
    return str(BUILT_IN_MODEL) if name == "built-in" else name
