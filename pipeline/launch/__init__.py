"""Launcher detection and rendezvous: `detect`, `process_group`, `wait_as_spare`; `supervise` starts local ranks."""

from pipeline.launch.environment import Launch, detect
from pipeline.launch.group import process_group
from pipeline.launch.local import supervise, supervise_pod
from pipeline.launch.pod import place_of_pod
from pipeline.launch.rendezvous import Rendezvous
from pipeline.launch.spare_ranks import wait_as_spare

__all__ = [
    "Launch",
    "Rendezvous",
    "detect",
    "place_of_pod",
    "process_group",
    "supervise",
    "supervise_pod",
    "wait_as_spare",
]
