"""One data-prep job: plan, phases, job directory, resume after a crash, Slurm array, status, progress, statistics."""
