"""The rendezvous store with thousands of ranks; work of rank 0 alone, whose result or error all ranks get."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from foundation.errors import ConfigError
from pipeline.runtime.launch import Launch
from pipeline.runtime.launch.group import free_port
from pipeline.runtime.launch.rank_devices import RankDevice
from pipeline.runtime.launch.rendezvous import Rendezvous, mark
from pipeline.runtime.launch.store import open_rendezvous
from pipeline.runtime.launch.wait_for_rank_zero import LOOK_S, look_s
from tests import warm
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


def test_groups_are_split_in_the_second_training_of_a_process_too() -> None:
    # the second split died. torch's own `split_group` wants a GPU; beneath it gloo and NCCL look their ranks up alike
    code = """
import torch, torch.distributed as dist
from pipeline.runtime.launch import detect
from pipeline.runtime.launch.group import process_group
for _ in range(2):
    with process_group(detect(), gpu=None):
        split = dist.group.WORLD.split_group([0], group_name="split", group_desc="")
        values = torch.full((1,), 3.0)
        split.allreduce(values).wait()
        print(split.rank(), split.size(), values.item())
"""
    # one rank died of it as several did; among several gloo's split hangs on busy cores
    done = warm.run("-c", code, merged=True)
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["0 1 3.0", "0 1 3.0"]


CPU, NCCL, SHARED = (
    RankDevice("cpu", "gloo"),
    RankDevice("cuda", "cpu:gloo,cuda:nccl", "GPU-7"),
    RankDevice("cuda", "cpu:gloo,cuda:gloo"),
)


@pytest.mark.parametrize(
    ("devices", "refused"),
    [
        ((CPU, CPU), None),
        ((SHARED, SHARED), None),
        ((CPU, NCCL), "cpu (gloo): rank 0 on {host}; cuda (cpu:gloo,cuda:nccl): rank 1 on {host}"),
        ((NCCL, SHARED), "ranks compute on different devices"),
        ((NCCL, NCCL), "several ranks have one GPU: GPU GPU-7: rank 0 on {host}, rank 1 on {host}"),
    ],
)
def test_ranks_of_different_devices_or_on_one_gpu_are_refused_before_a_group_is_made(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[RankDevice, RankDevice], refused: str | None
) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))

    stores = []  # rank 0's outlives the requests of rank 1

    def join(rank: int) -> str | None:
        try:
            stores.append(
                open_rendezvous(Launch("environment", rank, 2, rank, f"127.0.0.1:{port}"), 60.0, device=devices[rank])
            )
        except ConfigError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(join, range(2)))
    if refused is None:
        assert found == [None, None]
    else:
        assert all(refused.format(host=socket.gethostname()) in text for text in found), found


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
