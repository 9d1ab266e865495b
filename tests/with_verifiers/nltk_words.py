"""Lays out Debian's word list (package wamerican) as NLTK's `words`, which TextArena's Hangman reads.

    python tests/with_verifiers/nltk_words.py      # into the running Python's environment, where NLTK looks

NLTK's own list comes from a server, not from PyPI. Without the package installed, it is downloaded with apt, which
needs no root.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

INSTALLED = Path("/usr/share/dict/american-english")
TARGET = Path(sys.prefix) / "nltk_data" / "corpora" / "words"


def words_in(path: Path) -> list[str]:
    """Plain words of 4 to 7 letters: neither names nor genitives."""
    return [word for word in path.read_text(encoding="utf-8").split() if re.fullmatch("[a-z]{4,7}", word)]


def downloaded(folder: Path) -> Path:
    subprocess.run(["apt-get", "download", "wamerican"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    (package,) = folder.glob("wamerican_*.deb")
    subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=folder, check=True)
    return folder / INSTALLED.relative_to("/")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = words_in(INSTALLED if INSTALLED.exists() else downloaded(Path(folder)))
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in ("en", "en-basic"):
        (TARGET / name).write_text("\n".join(words) + "\n", encoding="utf-8")
    print(f"{len(words)} words in {TARGET}")


if __name__ == "__main__":
    main()
