"""Forecasts of a run: step time, MFU, tokens/s, peak memory; simulated pipeline schedules, collectives and overlap."""
