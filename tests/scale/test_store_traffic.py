"""Simulated ranks of the rendezvous ask the store what real ranks ask."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.scale.store_traffic import HELLO, Request, decoded

_REAL = """
from tests.scale.parts.rendezvous import counted, phases, recorded

found = recorded(4)
assert len(found) == 3
for requests in found:
    played = [each for base, notes, _ in phases(1, 4) for each in (*base, *notes)]
    assert counted(requests) == counted(played), (counted(requests), counted(played))
"""


def test_simulated_ranks_ask_what_real_ones_do() -> None:
    # in a process of its own, which forks ranks
    subprocess.run([sys.executable, "-c", _REAL], check=True, cwd=ROOT, timeout=240)


@pytest.mark.parametrize(
    "request_",
    [
        *HELLO,
        Request("SET", "host/3", b"node"),
        Request("COMPARE_SET", "device", b"cpu (gloo)"),
        Request("APPEND", "joined/ranks", b"3 "),
        Request("ADD", "arrived", number=-1),
        Request("GET", "host/0"),
        Request("CHECK", "complete"),
        Request("WAIT", "complete"),
    ],
    ids=lambda each: each.operation,
)
def test_a_request_is_read_as_it_was_sent(request_: Request) -> None:
    assert decoded(request_.encoded() + HELLO[0].encoded()) == [request_, HELLO[0]]
