"""A run: config keys, rules, batch arithmetic, learning-rate schedules, topology (rank to mesh). No torch."""
