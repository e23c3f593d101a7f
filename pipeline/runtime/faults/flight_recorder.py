"""Reads torch's flight recorder of this rank: its pending collective, and a dump of its newest collectives.

The recorder keeps the last collectives of each process group with their state, for NCCL and for gloo. Reading it waits
for no device and no rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILES = "flight-recorder-rank-"
"""Prefix of the names of dumps; the rank follows, as torch's analysis tool (torchfrtrace) requires."""


def pending_collective() -> str:
    """Returns this rank's oldest collective that has not ended; empty without such a collective or a recorder."""
    return describe_pending(_traces())


def describe_pending(traces: list[Mapping[str, Any]]) -> str:
    """Describes these traces' oldest collective that has not ended, e.g. "nccl:all_reduce 7 of mesh_tp, Float [64]".

    Args:
        traces: JSON of each recorder of this process: `entries`, each with `state`, `retired`, ...
    """
    entries = [entry for trace in traces for entry in trace.get("entries", ()) if _is_pending(entry)]
    if not entries:
        return ""
    oldest = min(entries, key=lambda entry: entry.get("time_created_ns", 0))
    number = oldest["p2p_seq_id"] if oldest.get("is_p2p") else oldest["collective_seq_id"]
    group = next(filter(None, reversed(oldest.get("process_group", ()))), "")
    kinds, sizes = oldest.get("input_dtypes", ()), oldest.get("input_sizes", ())
    tensors = [f"{kind} {size}" for kind, size in zip(kinds, sizes, strict=False)]
    shown = ", ".join(tensors[:2]) + (f" and {len(tensors) - 2} more" if len(tensors) > 2 else "")
    return f"{oldest['profiling_name']} {number} of {group}" + (f", {shown}" if shown else "")


def dump(run_dir: Path, rank: int) -> Path | None:
    """Writes the newest collectives of this rank into the run's directory; None if there is no recorder.

    The dump is a pickle for torch's own analysis tool with NCCL, and JSON with gloo.

    Raises:
        OSError: the file cannot be written.
    """
    recorded = _call("_dump_nccl_trace") or _call("_dump_fr_trace_json")
    if not recorded:
        return None
    path = run_dir / f"{FILES}{rank}"
    partial = path.with_name(f".partial-{path.name}")
    partial.write_bytes(recorded)
    partial.replace(path)
    return path


def _is_pending(entry: Mapping[str, Any]) -> bool:
    return not entry.get("retired") and entry.get("state") != "completed"


def _traces() -> list[Mapping[str, Any]]:
    """Returns the traces of NCCL and of gloo, as far as this build of torch and this process have them."""
    import torch.distributed as dist  # noqa: PLC0415  the watchdog of a process without torch has nothing to ask

    if not dist.is_available() or not dist.is_initialized():
        return []
    answers = (_call("_dump_nccl_trace_json"), _call("_dump_fr_trace_json"))
    return [json.loads(answer) for answer in answers if answer]


def _call(name: str) -> bytes:
    """Calls a C++ function of torch; returns nothing where this build lacks it, for example for want of NCCL."""
    import torch._C._distributed_c10d as c10d  # noqa: PLC0415

    function = getattr(c10d, name, None)
    answer: bytes | str = b"" if function is None else function()
    return answer.encode() if isinstance(answer, str) else answer
