"""Launcher detection and rendezvous: `detect`, `process_group`, `wait_as_spare`; `supervise` starts local ranks."""

from pipeline.runtime.launch.environment import Launch, detect
from pipeline.runtime.launch.group import process_group
from pipeline.runtime.launch.local import supervise, supervise_pod
from pipeline.runtime.launch.pod import place_of_pod
from pipeline.runtime.launch.rendezvous import Rendezvous
from pipeline.runtime.launch.spare_ranks import wait_as_spare

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
