"""Who started this process, and how it meets the others: `detect`, `process_group`, `supervise`."""

from pipeline.launch.environment import Launch, detect
from pipeline.launch.group import Meeting, process_group
from pipeline.launch.local import supervise

__all__ = ["Launch", "Meeting", "detect", "process_group", "supervise"]
