"""Calibration of the planner: measures products, links and overlap of this machine; scores predictions."""
