"""What a run will cost before it starts: `python -m pipeline.planner goodput` simulates failures over weeks."""
