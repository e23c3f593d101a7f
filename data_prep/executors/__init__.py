"""Executors run tasks: local worker processes with retries and speculative execution, Ray, Spark."""
