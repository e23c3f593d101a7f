"""`headrace submit`: chains of Slurm jobs for prep, training, export and compression, with a snapshot of the code."""
