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
from shutil import which


def end_job(number: int, code: int) -> None:
    """Ends the job with the code; exits with Slurm's error message where that fails."""
    linked = subprocess.run(["ldd", which("scontrol") or "scontrol"], capture_output=True, text=True, check=False)
    library = re.search(r"=> (\S*/libslurm\S*)", linked.stdout)
    if library is None:
        sys.exit("scontrol is linked with no libslurm")
    slurm = ctypes.CDLL(library[1], ctypes.RTLD_GLOBAL, use_errno=True)  # its plugins look for its symbols
    slurm.slurm_init(None)
    slurm.slurm_strerror.restype = ctypes.c_char_p
    # from 25.11 on, whose library is 44, a pointer to a slurm_step_id_t (slurm.h): 64 bits, job, two of NO_VAL
    job = (ctypes.c_uint32 * 6)(0, 0, number, -2, -2) if slurm.slurm_api_version() >> 16 >= 44 else number
    if slurm.slurm_complete_job(job, code << 8):  # the code as wait() has it
        sys.exit(slurm.slurm_strerror(ctypes.get_errno()).decode())


if __name__ == "__main__":
    end_job(int(sys.argv[1]), int(sys.argv[2]))
