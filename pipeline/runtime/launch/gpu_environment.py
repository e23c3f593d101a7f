"""Environment variables of torch that a run sets unless the user has: CUDA's allocator, NCCL's recorder, gloo,
Inductor."""

from __future__ import annotations

from collections.abc import Mapping

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of the allocator's variable: the current one, and older ones that torch still reads."""
_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"
_COMPILERS, _MOST_COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS", 32
"""Variable with the number of Inductor's worker processes, and Inductor's own limit of it."""
_RECORDED = "2000"
"""Number of newest collectives that each rank keeps: some megabytes in all, under a microsecond per collective."""


def allocator_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables for expandable segments, which fragment memory less; empty if the user has set one.

    A process that has imported torch has to pass the value to torch, too: the CUDA library reads it when it is loaded.
    """
    if any(name in environ for name in _ALLOCATOR):
        return {}
    return {_ALLOCATOR[0]: "expandable_segments:True"}


def host_group_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables that let gloo beside NCCL connect ranks lazily, at first send; empty if the user has set one.

    Gloo then exchanges only small host tensors. Connecting every rank with every other may take minutes, and as many
    open files as there are ranks (24 ranks: 28 files and 0.4 s each; 5 files and 0.03 s when lazy).
    """
    return {} if _GLOO_LAZY in environ else {_GLOO_LAZY: "1"}


def compiler_defaults(environ: Mapping[str, str], *, ranks: int, cores: int, allowed: int) -> dict[str, str]:
    """Returns the variable that limits Inductor's workers to a rank's share of the cores; empty if the user has set it.

    Each rank would start a worker for every core, at most 32: 256 processes, each with torch, on a node of 8 GPUs.

    Args:
        environ: the environment.
        ranks: number of ranks on this host.
        cores: number of cores of this host.
        allowed: number of cores that this process may use.
    """
    if _COMPILERS in environ:
        return {}
    return {_COMPILERS: str(max(1, min(cores // ranks, allowed, _MOST_COMPILERS)))}


def flight_recorder_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns variables of torch.distributed's flight recorder, with a dump at NCCL's own timeout; empty if user-set.

    Set them before the process group is made.
    """
    size = {} if any(name in environ for name in _RECORDER) else {_RECORDER[0]: _RECORDED}
    dump = {} if "TORCH_NCCL_DUMP_ON_TIMEOUT" in environ else {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    return {**size, **dump}
