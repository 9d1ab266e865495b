"""How to install an optional part of this package."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """The package is not on PyPI: extras are installed from a checkout."""
    return f"pip install '.[{extra}]' in the SortedRL checkout"
