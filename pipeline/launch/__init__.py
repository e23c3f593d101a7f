"""Launcher detection and rendezvous: `detect`, `process_group`, `wait_as_spare`; `supervise` starts local ranks."""

from pipeline.launch.environment import Launch, detect
from pipeline.launch.group import process_group
from pipeline.launch.local import supervise
from pipeline.launch.rendezvous import Rendezvous
from pipeline.launch.spare_ranks import wait_as_spare

__all__ = ["Launch", "Rendezvous", "detect", "process_group", "supervise", "wait_as_spare"]
