"""Keeps a job alive on a cluster: elastic agents, checks of nodes, status; Slurm requeue and shrinking."""
