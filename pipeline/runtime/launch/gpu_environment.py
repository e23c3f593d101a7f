"""Environment variables of torch that a run sets unless the user has: CUDA's allocator, NCCL's recorder, gloo."""

from __future__ import annotations

from collections.abc import Mapping

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The current name, and older ones that torch still reads."""
_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"
_RECORDED = "2000"
"""Number of newest collectives that each rank keeps: some megabytes, and less than a microsecond for each."""


def allocator_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for expandable segments, which fragment memory less; empty where the user chose.

    To be set before the first allocation on the GPU.
    """
    if any(name in environ for name in _ALLOCATOR):
        return {}
    return {_ALLOCATOR[0]: "expandable_segments:True"}


def host_group_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by which gloo beside NCCL connects two ranks when they first send; empty where the user chose.

    Only small tensors on the host are exchanged then, and a connection of each rank with every other takes some
    minutes and as many open files as there are ranks (24 ranks: 28 files and 0.4 s each, 5 and 0.03 s without).
    """
    return {} if _GLOO_LAZY in environ else {_GLOO_LAZY: "1"}


def flight_recorder_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of torch.distributed's flight recorder, dumped also by NCCL's own timeout; empty where the user chose.

    To be set before the process group is made.
    """
    size = {} if any(name in environ for name in _RECORDER) else {_RECORDER[0]: _RECORDED}
    dump = {} if "TORCH_NCCL_DUMP_ON_TIMEOUT" in environ else {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    return {**size, **dump}
