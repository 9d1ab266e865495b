"""The event log on disk: written, read, and recovered after a kill."""

from sortedrl.log.file import EventFile, recover_file
from sortedrl.log.lines import JsonLines
from sortedrl.log.reading import read_events
from sortedrl.log.recovery import CheckpointMark

__all__ = ["CheckpointMark", "EventFile", "JsonLines", "read_events", "recover_file"]
