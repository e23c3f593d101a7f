"""A lost rank is told from other errors by types and by gloo's own source path, never by words."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch.distributed as dist

from foundation.cli import guarded
from foundation.errors import EXIT_LOST, ConfigError, LostError
from foundation.link_errors import is_link_error
from pipeline.runtime.launch.group import free_port
from tests.conftest import ROOT

CALLS = ("all_reduce", "send_and_receive", "gather_objects", "store_wait", "store_set", "deepspeed_collective")
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation"

LOOKALIKES = [
    RuntimeError("CUDA error: peer access is not supported between these two devices"),
    RuntimeError("CUDA error: peer mapping resources exhausted"),
    BrokenPipeError(32, "Broken pipe"),
    ConnectionRefusedError(111, "Connection refused"),  # e.g. of a tracking service
    ConnectionResetError(104, "Connection reset by peer"),
    OSError("remote process closed the connection"),
    ValueError(GLOO),
    RuntimeError(f"the tokenizer has read: {GLOO}"),
    RuntimeError("[enforce fail at /pytorch/third_party/gloo/gloo/allreduce.cc:33] n > 0. 0 vs 0"),
    ConfigError("run.dir", "peer", why="connection refused", remedy="broken pipe"),
]


@pytest.mark.integration
@pytest.mark.parametrize("call", CALLS)
def test_what_is_raised_where_the_other_rank_was_killed_is_a_link_error(call: str) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "tests.runtime.faults.broken_link"]
    killed = subprocess.Popen([*command, "1", port, call], cwd=ROOT, stderr=subprocess.DEVNULL)
    done = subprocess.run(
        [*command, "0", port, call], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert killed.wait(120) == -9
    raised = json.loads(done.stdout.splitlines()[-1])
    assert raised["secondary"], raised


@pytest.mark.parametrize("error", LOOKALIKES, ids=lambda error: str(error)[:40])
def test_words_such_as_peer_do_not_make_an_error_one_of_a_lost_rank(error: Exception) -> None:
    assert not is_link_error(error)


@pytest.mark.parametrize(
    "error",
    [dist.DistBackendError("NCCL error"), dist.DistNetworkError("x"), dist.DistStoreError("x"), RuntimeError(GLOO)],
    ids=lambda error: type(error).__name__,
)
def test_a_link_error_has_the_exit_code_of_a_lost_rank(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error

    assert is_link_error(error)
    assert guarded(fail) == EXIT_LOST
    assert "Traceback" in capsys.readouterr().err
    assert is_link_error(LostError("rank 1 did not answer"))
