"""Models that come with the package."""

from pathlib import Path

BUILT_IN_MODEL = Path(__file__).parent / "knights-tiny"
