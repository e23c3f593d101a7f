"""Loss spikes and non-finite steps (NaN): detection, skip, rollback; the samples of a step."""
