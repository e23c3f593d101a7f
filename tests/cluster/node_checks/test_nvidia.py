"""What nvidia-smi and the kernel's log say about GPUs."""

from __future__ import annotations

from pipeline.cluster.node_checks.nvidia import command_output, gpu_problems, row_problems, xid_problems

HEALTHY = """\
0, 00000000:1B:00.0, NVIDIA H100 80GB HBM3, 0, [N/A]
1, 00000000:43:00.0, NVIDIA H100 80GB HBM3, 0, [N/A]
2, 00000000:01:00.0, NVIDIA GeForce RTX 3090, [N/A], [N/A]
3, 00000000:02:00.0, Tesla T4, [Not Supported], No
"""


def test_healthy_gpus_have_no_problem() -> None:
    assert gpu_problems(HEALTHY) == []
    assert row_problems("00000000:1B:00.0, 0, 0\n00000000:43:00.0, No, No\n00000000:01:00.0, [N/A], [N/A]\n") == []
    assert row_problems("00000000:1B:00.0, 1, 0\n") == []  # a pending row does no harm until a reset


def test_uncorrected_errors_pending_pages_and_lost_gpus_are_named() -> None:
    text = """\
0, 00000000:1B:00.0, NVIDIA H100 80GB HBM3, 2, [N/A]
1, 00000000:43:00.0, Tesla V100-SXM2-32GB, 0, Yes
2, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]
3, 00000000:52:00.0, NVIDIA A100-SXM4-80GB, [Unknown Error], [N/A]
"""
    assert gpu_problems(text) == [
        "GPU 0 (00000000:1B:00.0) has 2 uncorrected ECC errors since its driver was loaded",
        "GPU 1 (00000000:43:00.0) has memory pages that a reset would retire",
        "GPU 2 ([GPU is lost]) is lost",
        "GPU 3 (00000000:52:00.0) is lost",
    ]
    assert row_problems("00000000:1B:00.0, 0, 1\n00000000:43:00.0, No, Yes\n") == [
        "GPU 00000000:1B:00.0 has memory rows that could not be remapped",
        "GPU 00000000:43:00.0 has memory rows that could not be remapped",
    ]


def test_recent_xid_errors_of_the_hardware_are_named_once_and_a_programs_own_are_not() -> None:
    log = """\
[   12.000000] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15
[  100.140318] NVRM: Xid (PCI:0000:01:00): 48, pid='<unknown>', name=<unknown>, DBE at partition 2
[200000.678901] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[200000.678950] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[200001.000000] NVRM: Xid (PCI:0000:43:00): 31, pid=2096908, name=python3, Ch 00000008, intr 00000000. MMU Fault
"""
    assert xid_problems(log, uptime_s=200100.0) == ["GPU 0000:3b:00 had Xid 79 (GPU has fallen off the bus)"]


def test_a_command_that_is_missing_fails_or_hangs_says_so() -> None:
    assert command_output(["no-such-smi"], timeout_s=1) == ("", "there is no no-such-smi")
    assert command_output(["sh", "-c", "echo GPU is lost; exit 15"], timeout_s=5) == ("", "GPU is lost")
    assert command_output(["sleep", "30"], timeout_s=0.2) == ("", "sleep did not answer within 0.2 s")
    assert command_output(["echo", "1"], timeout_s=5) == ("1\n", "")
