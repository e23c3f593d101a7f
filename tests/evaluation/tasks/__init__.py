"""Tests of tasks with answers."""
