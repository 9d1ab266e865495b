"""The event log on disk: written, read, and recovered after a kill."""

from sortedrl.log.reading import read_events
from sortedrl.log.recorder import Recorder

__all__ = ["Recorder", "read_events"]
