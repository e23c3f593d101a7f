"""Faults of ranks: heartbeats, watchdog, hangs, diagnosis, stop signals (SIGUSR1, SIGTERM), exit codes, stack dumps."""
