"""`python -m pipeline.cluster.elastic.slurm_end JOB CODE`: ends a running Slurm job whose batch script is gone.

The job is COMPLETED, or FAILED with the code, as by the end of its script, and jobs that wait for it go by that. No
command of Slurm's does this: after `scancel` no job that waits for a success can start. The call is the one with which
srun and salloc end a job of their own. It is made in a process of its own: the library ends its process where it cannot
read slurm.conf.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Sequence
from shutil import which

_JOB_IS_A_POINTER = 44 << 16
"""Version of the library (Slurm 25.11) from which on the call takes a pointer to a `_StepId` (slurm.h)."""
_NONE = 0xFFFFFFFE


class _StepId(ctypes.Structure):
    _fields_ = (("sluid", ctypes.c_uint64), *((name, ctypes.c_uint32) for name in ("job", "component", "step")))


def main(argv: Sequence[str]) -> int:
    """Ends the job with the code; 0 where Slurm has taken it."""
    number, code = map(int, argv)
    linked = subprocess.run(["ldd", which("scontrol") or "scontrol"], capture_output=True, text=True, check=False)
    library = re.search(r"=> (\S*/libslurm\S*)", linked.stdout)
    if library is None:
        print("scontrol is linked with no libslurm", file=sys.stderr)
        return 1
    slurm = ctypes.CDLL(library[1], ctypes.RTLD_GLOBAL, use_errno=True)  # its plugins look for its symbols
    slurm.slurm_init(None)
    new = slurm.slurm_api_version() >= _JOB_IS_A_POINTER
    job = ctypes.byref(_StepId(0, number, _NONE, _NONE)) if new else ctypes.c_uint32(number)
    if slurm.slurm_complete_job(job, ctypes.c_uint32(code << 8)):  # as wait() has it
        slurm.slurm_strerror.restype = ctypes.c_char_p
        print(slurm.slurm_strerror(ctypes.get_errno()).decode(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
