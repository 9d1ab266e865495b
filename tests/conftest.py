"""For all tests: commands that they start can be interrupted, wherever the tests themselves run."""

from __future__ import annotations

import signal

# A shell's background job ignores SIGINT, and so would every process that a test starts there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
