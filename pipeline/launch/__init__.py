"""Who started this process, and how it meets the others: `detect`, `process_group`, `stand_by`, `supervise`."""

from pipeline.launch.arrivals import Rendezvous
from pipeline.launch.environment import Launch, detect
from pipeline.launch.group import process_group
from pipeline.launch.local import supervise
from pipeline.launch.spare_ranks import stand_by

__all__ = ["Launch", "Rendezvous", "detect", "process_group", "stand_by", "supervise"]
