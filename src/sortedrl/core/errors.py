"""The base class of errors that a user can fix."""

from __future__ import annotations


class UserError(Exception):
    """Its text is one line: what is wrong, why, and the fix. The command line prints it without a traceback."""
