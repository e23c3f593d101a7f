"""The rendezvous store with thousands of ranks."""

from __future__ import annotations

import subprocess
import sys

import torch.distributed as dist

from pipeline.runtime.launch.rendezvous import Rendezvous, mark
from tests.conftest import ROOT


def test_the_ranks_that_have_not_set_their_flag_are_found_among_thousands() -> None:
    store = dist.PrefixStore("run", dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False))
    rendezvous = Rendezvous(0, 8192, store, 10.0)
    assert rendezvous.ranks_without("gave-up", [0, 8191]) == [0, 8191]
    for rank in rendezvous.ranks:
        if rank not in (5, 8000):
            mark(store, "gave-up", rank)
    assert rendezvous.ranks_without("gave-up", rendezvous.ranks) == [5, 8000]
    assert rendezvous.mark("gave-up")  # once more is no other rank
    assert rendezvous.ranks_without("gave-up", range(6)) == [5]


def test_more_ranks_than_rank_zero_can_open_files_for_are_refused_and_the_soft_limit_is_raised() -> None:
    code = """
import resource
from pipeline.runtime.launch import Launch
from pipeline.runtime.launch.store import _check_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
for rank, ranks in ((0, 1920), (4000, 8192), (0, 1921)):
    _check_open_files(Launch("srun", rank, ranks, 0, "host:29500"))
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines() == ["(4096, 4096)"] * 2
    assert "ulimit -Hn = 4096\n  why: 1,921 ranks connect to rank 0" in ended.stderr
    assert "4,098 are needed" in ended.stderr
