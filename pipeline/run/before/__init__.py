"""Output before a run starts: summary, memory table, advice, memory of a teacher."""
