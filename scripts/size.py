"""How large the project is, against its bounds: `make size`. Exit code 1 if a bound is exceeded."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "sortedrl"
CORE = PACKAGE / "core"
# What a reader of the algorithm reads, with all that these files of core/ import, except what can wait.
READ_FIRST = ("rollout", "schedule", "buffer", "ledger", "engine_reports", "controller")
READ_FIRST += ("strategies/base", "strategies/paper", "strategies/ours")
CAN_WAIT = {"checkpoint", "turns", "streaming", "events"}
BOUNDS = {
    "lines of src": 37_200,
    "lines of core": 5_073,
    "lines of the reading path": 2_565,
    "lines of tests": 35_500,
    "lines of the longest file in src": 450,
    "words of docs": 27_000,
    "lines of README": 90,
}


def sizes() -> dict[str, int]:
    source = sorted(PACKAGE.rglob("*.py"))
    return {
        "lines of src": _lines(source),
        "lines of core": _lines(CORE.rglob("*.py")),
        "lines of the reading path": _lines(reading_path()),
        "lines of tests": _lines((ROOT / "tests").rglob("*.py")),
        "lines of the longest file in src": max(_lines([file]) for file in source),
        "words of docs": sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")),
        "lines of README": _lines([ROOT / "README.md"]),
    }


def reading_path() -> list[Path]:
    named = [CORE / f"{name}.py" for name in READ_FIRST]
    imported = {found for file in named for found in _imported_from_core(file) if found.stem not in CAN_WAIT}
    return sorted({*named, *imported})


def _imported_from_core(file: Path) -> Iterable[Path]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sortedrl.core."):
            yield PACKAGE.parent / f"{(node.module or '').replace('.', '/')}.py"


def _lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> int:
    found = sizes()
    for what, size in found.items():
        print(f"{what:34} {size:7,} of at most {BOUNDS[what]:7,}{'  <- too many' if size > BOUNDS[what] else ''}")
    return int(any(size > BOUNDS[what] for what, size in found.items()))


if __name__ == "__main__":
    sys.exit(main())
