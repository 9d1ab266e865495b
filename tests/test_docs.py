"""The pages: short lines, small tables, the README's shape, and a site without a broken link."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*LOG.md")]
WORDS = ("slots", "bubble", "staleness", "cohorts", "harvest")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_are_short_and_tables_small(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [f"{page.name}:{i}" for i, line in enumerate(lines, 1) if len(line) > 120]
    headers = [before for before, line in pairwise(lines) if re.fullmatch(r"\|(-+\|)+", line)]
    assert not [header for header in headers if header.count("|") > 8], "at most seven columns"


def test_the_readme_is_a_landing_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    before_first_table = text[: text.index("\n|")].lower()
    assert all(f"**{word}**" in before_first_table for word in WORDS)
    code = [line for block in text.split("```")[1::2] for line in block.splitlines()]
    assert max(map(len, code)) <= 88, "they scroll on the site"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install '.[docs]'")
    words = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    commands = (tmp_path / "site" / "cli.html").read_text(encoding="utf-8")
    assert "sortedrl train" in commands and "--max-staleness" in commands
    assert "carry_on_during" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
