"""Work of rank 0 alone: its result or its error on all ranks, however long it takes; a rank 0 that dies is noticed."""

from __future__ import annotations

import pytest

from pipeline.runtime.launch.wait_for_rank_zero import LOOK_S, look_s
from tests import warm

CODE = """
import os, sys, time
import torch.distributed
from foundation.cli import guarded
from foundation.errors import ConfigError
from pipeline.runtime.launch import detect, wait_for_rank_zero
from pipeline.runtime.launch.group import process_group
launch = detect()

def work():
    os.environ['WORKED'] = '1'
    if sys.argv[1] == 'refused':
        raise ConfigError('target.latency', 0.01, why='it takes longer', remedy='use 0.5')
    if sys.argv[1] == 'failed':
        raise ZeroDivisionError('ratio')
    if sys.argv[1] == 'died':
        os._exit(9)
    time.sleep(8)  # longer than any collective of this group may take
    return {'hidden_size': 64}, 0.25

silence_s = 4.0 if sys.argv[1] == 'died' else 100.0

def main():
    with process_group(launch, gpu=None, timeout_s=6.0) as rendezvous:
        torch.distributed.barrier()  # as preflight: a rank that leaves before others have connected is their error
        found = wait_for_rank_zero.wait_for_rank_zero(work, rendezvous, what='measuring', silence_s=silence_s)
        assert found == ({'hidden_size': 64}, 0.25)
        assert ('WORKED' in os.environ) == (launch.rank == 0)
        print('found', launch.rank)

code = guarded(main)
print('rank', launch.rank, 'leaves with', code)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("long", ["found 0", "found 1", "found 2"]),
        (
            "refused",
            ["error: target.latency = 0.01", "error (rank 1): target.latency", "error (rank 2): target.latency"],
        ),
        ("failed", ["ZeroDivisionError: ratio", "error (rank 1): rank 0 failed while measuring", "(rank 2)"]),
    ],
)
def test_all_ranks_get_what_rank_zero_found_or_the_error_that_it_met(case: str, expected: list[str]) -> None:
    done = warm.run("-c", CODE, case, processes=3, merged=True)
    assert (done.returncode == 0) == (case == "long"), done.stdout
    for words in expected:
        assert words in done.stdout, done.stdout


def test_a_rank_zero_that_dies_is_noticed() -> None:
    done = warm.run("-c", CODE, "died", processes=2, merged=True)
    assert done.returncode == 9
    assert "rank 1 leaves with 76" in done.stdout, done.stdout
    assert "did not answer for 4 s while measuring" in done.stdout, done.stdout


def test_the_looks_of_very_many_ranks_at_the_store_have_a_limit() -> None:
    assert look_s(2) == LOOK_S
    assert 8192 / look_s(8192) == 4096  # a second
