"""How to install an optional part of this package."""


def install_hint(extra: str) -> str:
    """The package is not on PyPI: extras are installed from a checkout."""
    return f"pip install '.[{extra}]' in the SortedRL checkout"
