"""`python -m pipeline.cluster.elastic.slurm_end JOB CODE`: ends a running Slurm job whose batch script is gone.

The job is COMPLETED, or FAILED with the code, as if its script had ended, and jobs that depend on it see that state. No
Slurm command does this: after `scancel`, a job that depends on success can never start. srun and salloc end their own
jobs by the same call. It has a process of its own, since the library ends its process where it cannot read slurm.conf.
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
    slurm = ctypes.CDLL(library[1], ctypes.RTLD_GLOBAL, use_errno=True)  # Slurm's plugins look up the library's symbols
    slurm.slurm_init(None)
    slurm.slurm_strerror.restype = ctypes.c_char_p
    # from Slurm 25.11 (library 44) a pointer to a slurm_step_id_t (slurm.h): 64 bits, the job, NO_VAL twice
    job = (ctypes.c_uint32 * 6)(0, 0, number, -2, -2) if slurm.slurm_api_version() >> 16 >= 44 else number
    if slurm.slurm_complete_job(job, code << 8):  # the code in the form that wait() returns
        sys.exit(slurm.slurm_strerror(ctypes.get_errno()).decode())


if __name__ == "__main__":
    end_job(int(sys.argv[1]), int(sys.argv[2]))
