"""mkdocs hook: the pages that are made when the site is built, so that nothing is written twice.

index.md          README.md, with its links into docs/ made relative to it
cli.md            every command with its settings, from `sortedrl COMMAND --help`
changelog.md      CHANGELOG.md
contributing.md   CONTRIBUTING.md
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "README.md": "index.md"}
FILE_LINK = re.compile(r"\[([^\]]+)\]\((?:src|tests|benchmarks|examples|scripts)/[^)]*\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=as_page((ROOT / source).read_text(encoding="utf-8"))))
    files.append(File.generated(config, "cli.md", content=cli_page()))
    return files


def as_page(text: str) -> str:
    """Links as they are seen from docs/; a link to a file outside of it becomes its text."""
    for source, page in PAGES.items():
        text = text.replace(f"]({source})", f"]({page})")
    return FILE_LINK.sub(r"\1", text.replace("](docs/", "]("))


def cli_page() -> str:
    overview = help_of()
    commands = re.findall(r"^  (\w+)  +(\S.*)$", overview, re.MULTILINE)
    if not commands:
        raise RuntimeError(f"no commands in the output of sortedrl --help:\n{overview}")
    parts = [
        "# Commands",
        "Made from each command's `--help`. Settings can also be given in a TOML file with `--config`.",
    ]
    for name, summary in commands:
        parts += [
            f"## sortedrl {name}",
            f"{summary[0].upper()}{summary[1:]}.",
            f"```text\n{unframed(help_of(name))}\n```",
        ]
    return "\n\n".join(parts) + "\n"


def help_of(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}
    environment.pop("FORCE_COLOR", None)
    words = [sys.executable, "-m", "sortedrl", *command, "--help"]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120, env=environment).stdout


def unframed(text: str) -> str:
    """Without the box that some terminals get drawn around the settings."""
    return "\n".join(re.sub(r"^[│╭╰]─* ?|[ ─]*[│╮╯]$", "", line).rstrip() for line in text.splitlines()).strip()
