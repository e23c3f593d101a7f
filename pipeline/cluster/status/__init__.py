"""`headrace status`: progress of a run, why it ended or waits (squeue, sacct), merged logs of all ranks."""
