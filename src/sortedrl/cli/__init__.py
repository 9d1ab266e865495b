"""The command `sortedrl`: main.py has the table of commands, one file per command has its settings and its output."""

from sortedrl.cli.main import main

__all__ = ["main"]
