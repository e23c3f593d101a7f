"""The sweep of scale: its page of exponents and limits; simulated ranks ask the store what real ranks ask."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.scale.measuring import Figures, Part
from tests.scale.page import Growth, judge, lines, shown
from tests.scale.store_traffic import HELLO, Request, decoded

SIZES = (100, 200, 400, 800)


def part(**fields: object) -> Part:
    about = {"name": "agents: the leader", "what": "A leader.", "unit": "hosts", "sizes": SIZES, "target": 8000}
    return Part(**{**about, "run": lambda _size, _work: Figures(), **fields})  # type: ignore[arg-type]


def figures(**values: list[float]) -> dict[int, Figures]:
    rows = (dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True))
    return {size: Figures(**row) for size, row in zip(SIZES, rows, strict=True)}


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_a_power_law_is_found_and_followed(exponent: float) -> None:
    growth = Growth(SIZES, [3.0 * size**exponent for size in SIZES])
    assert growth.exponent == pytest.approx(exponent, abs=1e-9)
    assert growth.at(8000) == pytest.approx(3.0 * 8000**exponent)
    assert growth.at(400) == growth.values[2]


def test_growth_that_a_constant_hides_is_followed_from_the_two_largest_sizes() -> None:
    growth = Growth(SIZES, [1000.0 + size for size in SIZES])
    assert growth.exponent < 0.3
    assert growth.at(1600) > 1800 * 2**growth.exponent


def test_a_figure_that_is_zero_somewhere_has_no_exponent() -> None:
    growth = Growth(SIZES, [0.0, 0.0, 1.0, 2.0])
    assert math.isnan(growth.exponent)
    assert growth.at(8000) == 2.0


def test_what_is_over_a_limit_and_what_grows_faster_than_linearly_is_named() -> None:
    slow = judge(part(), figures(cpu_s=[1.0, 2.0, 4.0, 8.0], bytes=[1e6] * 4))
    assert slow.exceeded() == ["80 s CPU (limit 60 s)"]
    square = judge(part(target=1600), figures(cpu_s=[0.1, 0.4, 1.6, 6.4]))
    assert square.exceeded() == ["CPU grows with exponent 2.00"]
    shared = judge(part(per_process=False), figures(file_operations=[1e6, 1e6, 1e6, 1e6]))
    assert shared.exceeded() == []
    text = "\n".join(lines([slow, square, shared]))
    assert "| the leader | 800 hosts | 8 s ^1.00 | 1 MB ^-0.00 |  | 100 |" in text
    assert "**8,000**, from there" in text


_BLOCK = """
import pathlib, sys
from tests.scale.measuring import measured

folder = pathlib.Path(sys.argv[1])
with measured() as found:
    for number in range(10):
        (folder / str(number)).write_bytes(b"")
        assert (folder / str(number)).exists()
    block = bytearray(50_000_000)
assert len(block) == 50_000_000
assert found.file_operations == 20, found
assert 4e7 < found.bytes < 8e7, found
assert found.seconds > 0, found
"""


def test_a_block_is_measured_with_its_file_operations(tmp_path: Path) -> None:
    # in a process of its own: threads that other tests left in this one do file operations too
    subprocess.run([sys.executable, "-c", _BLOCK, str(tmp_path)], check=True)


def test_figures_are_shown_in_the_unit_that_fits() -> None:
    assert shown("bytes", 3.2e9) == "3.2 GB"


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
