"""The style of the SVG pictures of the docs, for light and dark mode."""

from __future__ import annotations

from collections.abc import Mapping

FONT = "text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"

# Property and color of a class, light and dark. No CSS variables: many SVG viewers do not support them.
Colors = Mapping[str, tuple[str, str, str]]
TEXT: Colors = {
    "paper": ("fill", "#ffffff", "#0d1117"),
    "ink": ("fill", "#1f2328", "#e6edf3"),
    "soft": ("fill", "#59636e", "#9198a1"),
}


def style(colors: Colors, sizes: str) -> str:
    """`sizes`: rules for the classes of larger and smaller text."""
    light = "".join(f".{name}{{{what}:{color}}}" for name, (what, color, _) in colors.items())
    dark = "".join(f".{name}{{{what}:{color}}}" for name, (what, _, color) in colors.items())
    return f"{FONT}{sizes}{light}@media(prefers-color-scheme:dark){{{dark}}}"
